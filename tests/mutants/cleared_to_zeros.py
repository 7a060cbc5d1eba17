"""Mutants of strategies that are wrong if some gradients are zeros at first, and others None."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant
from tests.mutants.strategies import _mean, _trainable

_lists: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()


@contextmanager
def lists_gradients_of_all(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average the gradients in a list, which is made anew if none of them is there any more."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with model.no_sync():
        yield
    if not is_final_microbatch:
        return
    now = [parameter.grad for parameter in _trainable(model)]
    if any(grad is None or grad.is_sparse for grad in now):
        raise RuntimeError("all parameters need a dense gradient")
    if not any(one is other for one, other in zip(_lists.get(model, []), now, strict=False)):
        _lists[model] = now
    for grad in _lists[model]:
        _mean(grad, model.process_group)
    model.require_forward_param_sync = True


MUTANTS = [Mutant("lists_gradients_of_all", ("16.36",), "all_used", kind="strategy")]
