"""The folder of a run: the names of its files, how a rank's exit status is read, and how JSON is put there."""

import json
import os
from pathlib import Path
from typing import Any

from conformance.errors import KitError

DONE, RAISED, KIT_FAILED, PEER_DIED = 0, 70, 71, 77  # exit statuses of a rank; the last by the kit's own hand
EVENTS, TENSORS, OUTCOME = "events.jsonl", "tensors.safetensors", "outcome.json"
STATE, MODEL = "state.pt", "model.pt"  # what a rank saves for a process that goes on from there; the controller never reads them
MEETING = "meeting.json"  # where ranks find each other, when that is not this folder


def write_json(path: Path, data: Any) -> None:
    """Write JSON so that the file is either whole or not there.

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
