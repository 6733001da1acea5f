"""``kvprobe`` and ``python -m kvprobe``."""

import sys


def main() -> int:
    """The command line; Ctrl-C while it is still being imported is as quiet as later."""
    try:
        from kvprobe.cli import main as command_line

        return command_line()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
