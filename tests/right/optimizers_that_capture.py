"""Right optimizers that keep something of their steps for as long as nothing has changed."""

from collections.abc import Callable
from typing import Any

from tests.right import Right
from tests.right.optimizer_wrappers import AveragesGradients


class CapturesItsStep(AveragesGradients):
    """Capture the step with the options of its groups, after ten steps; capture it anew if an
    option is written, or a group is added.
    """

    AFTER = 10

    def __init__(self, optim: Any, process_group: Any) -> None:
        self.eager_steps = 0
        self.captured: list[dict[str, Any]] = []
        super().__init__(optim, process_group)

    def options(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.param_groups
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        current = self.options()
        if current != self.captured:
            self.eager_steps = 0
            self.captured = current
        self.eager_steps += 1
        if self.eager_steps > self.AFTER:
            for group, options in zip(self.param_groups, self.captured, strict=True):
                group.update(options)
        return super().step(closure)


RIGHT = [Right("CapturesItsStep", "averages", kind="optimizer")]
