"""Mutants of strategies whose contexts of two models cannot be nested in each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.mutants.strategies import _filled, _mean
from tests.mutants.strategies_in_training import _mutants

_open: list[Any] = []
_depth = [0]
_kept: dict[str, bool] = {}


def _average(model: Any) -> None:
    for parameter in _filled(model):
        parameter.grad = _mean(parameter.grad, model.process_group)


@contextmanager
def averages_the_innermost(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Average, at the end of a context, the model whose context was entered last."""
    _open.append(model)
    with model.no_sync():
        yield
    if is_final_microbatch:
        _average(_open[-1])
    if _open[0] is model:
        _open.clear()


@contextmanager
def averages_outside_of_all(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Take a context inside of another one for a part of its micro-batch, and average nothing."""
    _depth[0] += 1
    try:
        with model.no_sync():
            yield
        if is_final_microbatch and _depth[0] == 1:
            _average(model)
    finally:
        _depth[0] -= 1


@contextmanager
def keeps_one_flag(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Keep in the module whether the micro-batch is the last one, once for all models."""
    _kept["is final"] = is_final_microbatch
    with model.no_sync():
        yield
    if _kept["is final"]:
        _average(model)


MUTANTS = _mutants("16.23", "averages_the_innermost", "averages_outside_of_all", "keeps_one_flag")
