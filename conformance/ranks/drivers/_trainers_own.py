"""The things of a trainer that a sync strategy has no right to change."""

import torch

from conformance.ranks.instruments.digest import checksum


class CountingOptimizer(torch.optim.SGD):
    """An optimizer whose steps are counted, and leave the parameters as they are.

    Gradients alone are judged, and some of them are NaN.

    Args:
        params: the parameters or groups.
    """

    def __init__(self, params: list[torch.nn.Parameter] | list[dict[str, object]]) -> None:
        super().__init__(params, lr=0.0)
        self.steps = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Count a step."""
        self.steps += 1


class TrainersOwn:
    """The values of a model's parameters, their requires_grad, and the modes of its modules.

    Args:
        probe: the model without DDP.
        params: its parameters, in a list that the trainer may change.
    """

    def __init__(self, probe: torch.nn.Module, params: list[torch.nn.Parameter]) -> None:
        self.probe = probe
        self.params = params
        self._known = self._values() | self._requires_grad() | self._modes()

    def trainer_froze(self) -> None:
        """Take note of requires_grad, which the trainer has just set for all parameters."""
        self._known |= self._requires_grad()

    def changed(self) -> list[str]:
        """Return the names of the things that the trainer has left otherwise."""
        now = self._values() | self._requires_grad() | self._modes()
        return [name for name, value in now.items() if value != self._known[name]]

    def _values(self) -> dict[str, object]:
        return {f"the values of p{at}": checksum(one) for at, one in enumerate(self.params)}

    def _requires_grad(self) -> dict[str, object]:
        return {f"requires_grad of p{at}": one.requires_grad for at, one in enumerate(self.params)}

    def _modes(self) -> dict[str, object]:
        return {
            f"the mode of {name or 'the model'}": module.training
            for name, module in self.probe.named_modules()
        }


def steps_of(optimizers: list[CountingOptimizer]) -> list[int]:
    """Step each optimizer, as the trainer does, and return how many steps each has taken."""
    taken = []
    for optimizer in optimizers:
        before = optimizer.steps
        optimizer.step()
        taken.append(optimizer.steps - before)
    return taken


@torch.no_grad()
def set_values(params: list[torch.nn.Parameter], seed: str) -> None:
    """Give parameters drawn values, the same on all ranks, that narrower dtypes do not hold."""
    numbers = torch.Generator().manual_seed(int.from_bytes(seed.encode(), "big") % 2**63)
    for parameter in params:
        # Drawn in float32, so that the default dtype does not matter.
        values = torch.randn(parameter.numel(), generator=numbers, dtype=torch.float32)
        parameter.copy_(values.reshape(parameter.shape))
