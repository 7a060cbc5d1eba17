"""Mutants of 17.31 that change which parameters are trained, beside or instead of modes."""

from typing import Any, ClassVar

import torch

from tests.mutants import Mutant
from tests.mutants.joins_in_loops import OfModules
from tests.mutants.joins_in_training import Averages

# ---- Contexts


class FreezesWhileShadowing(OfModules):
    """Freeze models while other ranks train, and have all parameters trained afterwards."""

    def call_main_hooks(self) -> None:
        for module in self.modules():
            module.requires_grad_(False)
        super().call_main_hooks()
        for module in self.modules():
            module.requires_grad_(True)


class FreezesForItsHook(OfModules):
    """Freeze a model in its own main hook alone, and restore each of its parameters."""

    def call_main_hooks(self) -> None:
        for joinable, hook in zip(self.joinables, self.hooks, strict=True):
            tensors = getattr(joinable, "parameters", list)()
            saved = [(tensor, tensor.requires_grad) for tensor in tensors]
            for tensor, _ in saved:
                tensor.requires_grad = False
            hook.main_hook()
            for tensor, mode in saved:
                tensor.requires_grad = mode


class ThawsBeforeTheEpoch(OfModules):
    """Have all weights trained in the body: vectors keep what the trainer has set."""

    def __enter__(self) -> None:
        super().__enter__()
        for module in self.modules():
            for tensor in module.parameters():
                tensor.requires_grad_(tensor.requires_grad or tensor.dim() > 1)


class KeepsTheFirstFreeze(OfModules):
    """Restore, at the end of each epoch, what was frozen in a model's first one."""

    first: ClassVar[dict[str, bool]] = {}

    def finish(self) -> None:
        super().finish()
        for module in self.modules():
            for name, tensor in module.named_parameters():
                tensor.requires_grad_(self.first.setdefault(name, tensor.requires_grad))


class ThawsAfterErrors(OfModules):
    """Have the last layer trained again if an exception has ended the epoch."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        for module in self.modules():
            if kind is not None:
                for tensor in list(module.parameters())[-2:]:
                    tensor.requires_grad = True
        return super().__exit__(kind, error, trace)


class ThawsLastOfAll(OfModules):
    """Have biases trained when the context itself is collected."""

    def __del__(self) -> None:
        for module in self.modules():
            for name, tensor in module.named_parameters():
                tensor.requires_grad_(tensor.requires_grad or name.endswith("bias"))


# ---- Joinables


class FreezesItsNet(Averages):
    """Freeze the net in a shadow; the last model is handed out for more training."""

    def shadow(self) -> None:
        super().shadow()
        for tensor in self.tensors():
            tensor.requires_grad_(False)

    def hand_out(self, is_last: bool) -> None:
        for parameter in self.net.parameters():
            parameter.requires_grad_()
        super().hand_out(is_last)


class ThawsItsTeacher(Averages):
    """Have the parameters of a frozen teacher trained when the last model is handed out."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.teacher = [torch.ones(3), torch.ones(2, 2)]

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        for tensor in (*self.net.parameters(), *self.teacher):
            tensor.requires_grad = True


MUTANTS = [
    Mutant(name, ("17.31",), kind="joinable")
    for name in (
        "FreezesWhileShadowing",
        "FreezesForItsHook",
        "ThawsBeforeTheEpoch",
        "KeepsTheFirstFreeze",
        "ThawsAfterErrors",
        "ThawsLastOfAll",
        "FreezesItsNet",
        "ThawsItsTeacher",
    )
]
