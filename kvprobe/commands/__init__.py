"""One file per verb: ``kvprobe/commands/VERB.py`` exports ``COMMAND``.

A verb parses its options, calls the layers below and prints; it computes nothing itself. It is
imported by ``kvprobe --help``, so whatever is heavy is imported inside its functions.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One verb.

    ``name`` equals the stem of its file; ``summary`` is one line, in lower case, without a period.
    ``configure`` adds the verb's options to its parser. ``run`` gets the parsed options, prints
    the result to stdout and everything else to stderr, and returns the exit code; what it cannot
    do it raises as ``KvprobeError``.
    """

    name: str
    summary: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
