"""Right optimizers that average gradients, and whose states each rank saves for itself."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right.optimizer_wrappers import AveragesGradients, BySlices, average_gradients


class RefusesOtherStates(AveragesGradients):
    """Save the rank's place, and refuse the state of another place with an error."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "place": dist.get_rank(self.group)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        place = state.pop("place")
        if place != dist.get_rank(self.group):
            raise ValueError(f"a state of rank {place} of its group")
        super().load_state_dict(state)


class AveragesSlices(BySlices):
    """Average gradients, and step a slice of every parameter, whose state is this rank's own."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [{"params": wholes} for wholes in self.wholes]
        with torch.no_grad():
            average_gradients(groups, self.group, lambda grad: grad / self.size)
        super().step()
        return loss


RIGHT = [
    Right("RefusesOtherStates", "averages", kind="optimizer"),
    Right("AveragesSlices", "averages", kind="optimizer"),
]
