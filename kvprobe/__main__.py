"""``python -m kvprobe``."""

import sys

from kvprobe.cli import main

sys.exit(main())
