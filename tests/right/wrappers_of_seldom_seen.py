"""Right wrappers in the odd shapes of those that overlook bits of tensors, or reasons to draw."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import hooks_ref
from tests.careful_checkpoint import careful_checkpoint
from tests.mutants.seldom_seen_by_wrappers import _as_memory, _as_tensor
from tests.mutants.wrappers import Around, Forward, calls
from tests.right import Right


def _pack(tensor: torch.Tensor) -> Any:
    return _as_memory(tensor), tensor.is_conj(), tensor.is_neg()


def _unpack(packed: Any) -> torch.Tensor:
    held, is_conjugated, is_negated = packed
    if isinstance(held, torch.Tensor):
        return held
    made = _as_tensor(held)
    made = made.conj() if is_conjugated else made
    return torch._neg_view(made) if is_negated else made


@calls
def keeps_memory_and_bits(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep the memory of activations, and whether it is conjugated or negated."""
    with saved_tensors_hooks(_pack, _unpack):
        return forward(*args, **kwargs)


@calls
def restores_if_drawn(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Compare the generator before and after each forward, and restore it if this one has drawn."""
    before = torch.get_rng_state()
    drew: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not drew:
            result = forward(*args, **kwargs)
            drew.append(not torch.equal(before, torch.get_rng_state()))
            return result
        if not drew[0]:
            return forward(*args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(before)
            return forward(*args, **kwargs)

    return careful_checkpoint(run, *args, preserve_rng_state=False, **kwargs)


class OneStream(Around):
    """A checkpoint whose recomputations draw from one stream, which goes on after evaluations."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._stream: torch.Tensor | None = None

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            if self._stream is None:
                torch.default_generator.manual_seed(20251)
            else:
                torch.set_rng_state(self._stream)
            try:
                yield
            finally:
                torch.rand(1)  # It goes on also if the block draws nothing.
                self._stream = torch.get_rng_state()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not ran:
                ran.append(True)
                return self.module(*args, **kwargs)
            with self._drawing():
                return self.module(*args, **kwargs)

        return careful_checkpoint(run, *args, preserve_rng_state=False, **kwargs)


_CHOICES = {torch.ops.aten.randn_like.default, torch.ops.aten.multinomial.default}


class _Choices(TorchDispatchMode):
    """Keep the results of some draws in the first forward, and give them again in others.

    The draws are made again, too, so that the generator goes on to those of others.
    """

    def __init__(self, kept: list[torch.Tensor], gives: bool) -> None:
        super().__init__()
        self.kept = kept
        self.gives = gives
        self.place = 0

    def __enter__(self) -> Any:
        self.place = 0
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function not in _CHOICES:
            return made
        if not self.gives:
            self.kept.append(made.clone())
            return made
        self.place += 1
        return self.kept[self.place - 1].clone()


def _contexts() -> tuple[_Choices, _Choices]:
    kept: list[torch.Tensor] = []
    return _Choices(kept, gives=False), _Choices(kept, gives=True)


@calls
def keeps_choices_and_draws(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep the choices of a router and its noise, and move the generator as they do."""
    return careful_checkpoint(forward, *args, context_fn=_contexts, **kwargs)


def selective_reference(module: torch.nn.Module) -> torch.nn.Module:
    """Keep products in the reference, which runs again on copies of buffers."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return hooks_ref.checkpoint_wrapper(module, context_fn=contexts)


RIGHT = [
    Right("keeps_choices_and_draws", "recomputes", kind="wrapper"),
    Right("selective_reference", kind="wrapper"),
    Right("keeps_memory_and_bits", kind="wrapper"),
    Right("restores_if_drawn", "recomputes", kind="wrapper"),
    Right("OneStream", "recomputes, draws_anew", kind="wrapper"),
]
