"""Mutants of rule 11.3 whose state is wrong if it is saved between a load and the next step."""

from typing import Any

import torch

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, is_dense
from tests.mutants.saved_in_parts import Flat, eighth_with_feedback


class Pending(Flat):
    """Keeps a loaded state apart until the first bucket comes, and saves without it."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: dict[str, Any] | None = None

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.pending = saved

    def restore(self) -> None:
        """Take the pending state."""
        if self.pending is not None:
            super().load_state_dict(self.pending)
            self.pending = None


class PendingPart(Pending):
    """Saves a pending state, but for its last residual."""

    def state_dict(self) -> dict[str, Any]:
        if self.pending is None:
            return super().state_dict()
        kept = Flat()
        kept.load_state_dict(self.pending)
        kept.residuals[max(kept.residuals)] = torch.zeros_like(kept.residuals[max(kept.residuals)])
        return kept.state_dict()


class SavesOnce(Flat):
    """Saves what has changed since the last load."""

    def __init__(self) -> None:
        super().__init__()
        self.has_changed = True

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.has_changed else Flat().state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        super().load_state_dict(saved)
        self.has_changed = False


def restores_at_the_first_bucket(state: Pending, bucket: Bucket) -> Result:
    """Send the largest eighth with feedback; the state is restored when a bucket comes."""
    if is_dense(bucket):
        state.restore()
    return eighth_with_feedback(state, bucket)


def notes_changes(state: SavesOnce, bucket: Bucket) -> Result:
    """Send the largest eighth with feedback, and note that the state has changed."""
    state.has_changed = True
    return eighth_with_feedback(state, bucket)


CLAIMS = "compressed(delta=0.125), world_only, checkpointable"
MUTANTS = [
    *(
        Mutant("restores_at_the_first_bucket", ("11.3",), CLAIMS, f"{__name__}:{state}")
        for state in ("Pending", "PendingPart")
    ),
    Mutant("notes_changes", ("11.3",), CLAIMS, f"{__name__}:SavesOnce"),
]
