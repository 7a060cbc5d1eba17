"""Mutants of section 15 whose step is captured after some steps, with options of that time."""

from collections.abc import Callable
from typing import Any

from tests.mutants import Mutant
from tests.mutants.optimizers_in_training import Averaging

_OPTIONS = ("lr", "momentum", "betas", "dampening", "weight_decay", "eps")


class CapturesItsStep(Averaging):
    """Capture the step with the options of the groups; a new group, or a load, ends that.

    Args:
        optim: the optimizer inside.
        process_group: the group of ranks.
        after: the number of steps before the capture.
        live: an option that is read in each step all the same.
    """

    def __init__(self, optim: Any, process_group: Any, after: int = 10, live: str = "lr") -> None:
        self.after = after
        self.baked = [name for name in _OPTIONS if name != live]
        self.release()
        super().__init__(optim, process_group)

    def release(self) -> None:
        self.eager_steps = 0
        self.captured: list[dict[str, Any]] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.release()
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.release()
        super().load_state_dict(state_dict)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if self.eager_steps == self.after and not self.captured:
            self.captured = [
                {name: group[name] for name in self.baked if name in group}
                for group in self.param_groups
            ]
        self.eager_steps += 1
        if not self.captured:
            return super().step(closure)
        current = [dict(group) for group in self.param_groups]
        for group, options in zip(self.param_groups, self.captured, strict=True):
            group.update(options)
        loss = super().step(closure)
        for group, options in zip(self.param_groups, current, strict=True):
            group.update(options)
        return loss


OF = {"claims": "averages", "kind": "optimizer"}
LATE = {"15.24": "options are written after many steps there, too"}
MUTANTS = [
    Mutant("CapturesItsStep", ("15.24",), **OF),
    *(
        Mutant(f"CapturesItsStep,{arguments}", ("15.29",), because=LATE, **OF)
        for arguments in ("live=momentum", "after=140,live=weight_decay")
    ),
]
