"""The one error type that kvprobe raises on purpose."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of the command line; the meaning of each is part of the contract."""

    OK = 0
    FINDINGS = 1
    USAGE = 2
    UNSUPPORTED = 3
    INCOMPLETE = 4
    ROLLED_BACK = 5
    NOT_ROLLED_BACK = 6
    DEFECT = 70
    """An error nobody foresaw: a defect in kvprobe."""
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    """The reader of stdout went away, as a shell reports it."""


class KvprobeError(Exception):
    """Something a person can act on: one line that says what, one hint that says what next.

    Args:
        message: WHAT at WHERE, one line, no trailing period.
        hint: the next command or action, one line, or empty.
        exit_code: what the process exits with when nobody handles the error.
    """

    def __init__(self, message: str, hint: str = "", exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
