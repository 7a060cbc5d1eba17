"""The folder of a run: the names of its files, the exit statuses of its ranks, and JSON files."""

import json
import os
from pathlib import Path
from typing import Any

from conformance.errors import KitError

# Exit statuses of a rank.
DONE = 0
RAISED = 70
KIT_FAILED = 71
PEER_DIED = 77  # ended by the kit, as the fault of the scenario

# Files of a rank for rules, and the file of the run for its outcome.
EVENTS = "events.jsonl"
TENSORS = "tensors.safetensors"
COVERAGE = "coverage.json"
OUTCOME = "outcome.json"

# Files that a rank saves for a process that resumes from them; the controller never reads them.
STATE = "state.pt"
MODEL = "model.pt"

# The activity of a rank that makes its model under DDP, before it loads the subject.
MODEL_MADE = "model"

# Names the store in which ranks meet, if it is not in the folder of the run.
MEETING = "meeting.json"


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file; afterwards it is either complete or not there.

    Raises:
        KitError: the disk is full, or the folder is not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise KitError(f"cannot write {path}: {error.strerror}") from error
