"""What a subject keeps: entries of a bounded history are no growth, what they share is."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_entries_of_a_history(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ranks.instruments.history_subjects"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "objects": [],
        "small dicts": [],
        "one list": ["entries"],
        "tensors": ["tensors", "bytes"],
        "long lists": ["objects", "entries"],
        "too long": ["objects", "entries"],
        "without bound": ["objects", "entries"],
    }
