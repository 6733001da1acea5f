"""What can go wrong before a verb does anything: Ctrl-C during imports, a folder for a file."""

import sys
from pathlib import Path

import pytest

from kvprobe import __main__ as entry
from kvprobe.errors import KvprobeError
from kvprobe.signals.places import _file


def test_an_interrupt_during_imports_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "kvprobe.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvprobe.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert entry.main() == 130


@pytest.mark.parametrize(
    ("path", "message"),
    [("", "is a folder"), ("absent/engine.log", "no file")],
)
def test_a_signal_that_can_be_no_file_says_why(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(KvprobeError, match=message):
        _file(str(tmp_path / path))
    assert _file(str(tmp_path / "comes.log")).endswith("comes.log")
