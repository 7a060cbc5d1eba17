"""Mutants of rule 19.16 whose second forward lacks hooks that change values."""

from typing import Any

from tests.careful_checkpoint import careful_checkpoint
from tests.mutants import Mutant
from tests.mutants.wrappers import Around


class HooksOnce(Around):
    """A checkpoint that runs the module's forward again, and not its hooks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if ran:
                return self.module.forward(*args, **kwargs)
            ran.append(True)
            return self.module(*args, **kwargs)

        return careful_checkpoint(run, *args, **kwargs)


class HooksOfLayersOnce(Around):
    """A checkpoint whose second forward runs layers without their hooks, as if these observed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not ran:
                ran.append(True)
                return self.module(*args, **kwargs)
            layers = [layer for layer in self.module.modules() if layer is not self.module]
            kept = [(layer, layer._forward_hooks, layer._forward_pre_hooks) for layer in layers]
            for layer in layers:
                layer._forward_hooks = type(layer._forward_hooks)()
                layer._forward_pre_hooks = type(layer._forward_pre_hooks)()
            try:
                return self.module(*args, **kwargs)
            finally:
                for layer, hooks, pre_hooks in kept:
                    layer._forward_hooks = hooks
                    layer._forward_pre_hooks = pre_hooks

        return careful_checkpoint(run, *args, **kwargs)


MUTANTS = [
    Mutant("HooksOnce", ("19.16",), "recomputes", kind="wrapper"),
    Mutant("HooksOfLayersOnce", ("19.16",), "recomputes", kind="wrapper"),
]
