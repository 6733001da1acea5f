"""Starting must stay cheap: what is heavy is loaded only by the verb that needs it."""

import json
import subprocess
import sys

import pytest

from kvprobe import cli

HEAVY = {"pandas", "pyarrow", "rich", "scipy", "textual"}
CASES: list[tuple[list[str], set[str]]] = [
    (["--help"], HEAVY),
    (["--version"], HEAVY),
    (["playbook", "--json"], HEAVY),
    (["doctor"], HEAVY),
    (["knobs"], HEAVY),
    (["capture", "--help"], HEAVY),
]
SCRIPT = """
import json, sys
from kvprobe.cli import main
main(sys.argv[1:])
print("\\n" + json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize(("words", "unwanted"), CASES, ids=lambda case: " ".join(sorted(case)))
def test_loads_nothing_heavy(words: list[str], unwanted: set[str]) -> None:
    if not words[0].startswith("-") and words[0] not in cli.verbs():
        pytest.skip(f"no verb {words[0]}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "kvprobe.cli" in loaded
    assert not loaded & unwanted
