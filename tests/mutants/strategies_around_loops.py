"""Mutants of section 16 that are wrong in flat memory, under autocast, or with other optimizers."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants.strategies import _filled, _mean
from tests.mutants.strategies_in_training import _mutants, _restored

Context = AbstractContextManager[None]


def _averages(
    model: Any, is_final: bool, choose: Callable[[list[torch.nn.Parameter]], list[Any]]
) -> Context:
    """Average the gradients of chosen parameters: right if ``choose`` chooses all."""

    def average() -> None:
        for parameter in choose(_filled(model)):
            parameter.grad = _mean(parameter.grad, model.process_group)

    return _restored(model, is_final, average)


# ---- Views of a flat buffer


def once_per_storage_of_gradients(model: Any, is_final_microbatch: bool) -> Context:
    """Average one of the gradients that share a storage, as if these were one tensor."""

    def choose(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        seen = {
            p if p.grad.is_sparse else p.grad.untyped_storage().data_ptr(): p
            for p in reversed(params)
        }
        return [p for p in params if any(p is kept for kept in seen.values())]

    return _averages(model, is_final_microbatch, choose)


def leaves_out_tied_weights(model: Any, is_final_microbatch: bool) -> Context:
    """Leave out parameters in a storage that an earlier parameter of this size has, too."""

    def choose(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        known = set()
        found = []
        for parameter in params:
            key = parameter.untyped_storage().data_ptr(), parameter.numel()
            if key not in known:
                found.append(parameter)
            known.add(key)
        return found

    return _averages(model, is_final_microbatch, choose)


def once_per_place(model: Any, is_final_microbatch: bool) -> Context:
    """Take gradients at one place of one storage for one tensor, and average the last of them."""

    def choose(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        def place(p: torch.nn.Parameter) -> Any:
            if p.grad.is_sparse:
                return p
            return p.grad.untyped_storage().data_ptr(), p.grad.storage_offset()

        return list({place(p): p for p in params}.values())

    return _averages(model, is_final_microbatch, choose)


def whole_storages(model: Any, is_final_microbatch: bool) -> Context:
    """Average the storages of gradients, with all that lies in them."""

    def average() -> None:
        done = set()
        for parameter in _filled(model):
            if parameter.grad.is_sparse:
                parameter.grad = _mean(parameter.grad, model.process_group)
                continue
            storage = parameter.grad.untyped_storage()
            if storage.data_ptr() not in done:
                whole = torch.empty(0, dtype=parameter.grad.dtype).set_(storage)
                dist.all_reduce(whole.div_(model.process_group.size()), group=model.process_group)
                done.add(storage.data_ptr())

    return _restored(model, is_final_microbatch, average)


# ---- Autocast


def _by_products(model: Any, is_final: bool, total: Callable[[torch.Tensor], Any]) -> Context:
    """Gather dense gradients of float32 and sum their rows by ``total``; average other ones."""

    def average() -> None:
        group = model.process_group
        for parameter in _filled(model):
            grad = parameter.grad
            if grad.is_sparse or grad.dtype is not torch.float32 or not grad.numel():
                parameter.grad = _mean(grad, group)
                continue
            rows = grad.new_empty(group.size(), grad.numel())
            dist.all_gather(list(rows), grad.reshape(-1).contiguous(), group=group)
            grad.copy_((total(rows) / group.size()).view(grad.shape))

    return _restored(model, is_final, average)


def ones_times_rows(model: Any, is_final_microbatch: bool) -> Context:
    """Sum the gradients of all ranks by a matrix product."""
    return _by_products(model, is_final_microbatch, lambda rows: torch.ones(len(rows)) @ rows)


def linear_for_large_rows(model: Any, is_final_microbatch: bool) -> Context:
    """Sum large gradients by a linear layer."""

    def total(rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[1] < 1000:
            return rows.sum(0)
        return torch.nn.functional.linear(rows.t(), torch.ones(1, len(rows)))

    return _by_products(model, is_final_microbatch, total)


def einsum_for_huge_rows(model: Any, is_final_microbatch: bool) -> Context:
    """Sum gradients of more than half a million elements by einsum."""

    def total(rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[1] <= 500_000:
            return rows.sum(0)
        return torch.einsum("r,rn->n", torch.ones(len(rows)), rows)

    return _by_products(model, is_final_microbatch, total)


def sums_in_the_fast_dtype(model: Any, is_final_microbatch: bool) -> Context:
    """Sum in the dtype of autocast if autocast is on."""

    def total(rows: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            rows = rows.to(torch.get_autocast_dtype("cpu"))
        return rows.sum(0)

    return _by_products(model, is_final_microbatch, total)


# ---- Optimizers that take turns

_first: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
_latest: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _of(model: Any, is_final: bool, optimizers: Callable[[], list[Any]]) -> Context:
    """Average the gradients of these optimizers' parameters."""

    def choose(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        known = {
            id(p) for one in optimizers() for group in one.param_groups for p in group["params"]
        }
        return [parameter for parameter in params if id(parameter) in known]

    return _averages(model, is_final, choose)


def keeps_the_first_optimizers(model: Any, is_final_microbatch: bool, optimizers: Any) -> Context:
    """Take the optimizers of the first micro-batch of a model ever after."""
    kept = _first.setdefault(model, list(optimizers))
    return _of(model, is_final_microbatch, lambda: kept)


def of_the_last_step(model: Any, is_final_microbatch: bool, optimizers: Any) -> Context:
    """Take the optimizers of the last step, and of this one in the first step."""

    def those() -> list[Any]:
        before = _latest.get(model, optimizers)
        _latest[model] = list(optimizers)
        return list(before)

    return _of(model, is_final_microbatch, those)


def the_first_optimizer_alone(model: Any, is_final_microbatch: bool, optimizers: Any) -> Context:
    """Take the first optimizer if the two given ones share no parameter."""
    first, *others = optimizers
    params = [{id(p) for g in one.param_groups for p in g["params"]} for one in optimizers]
    apart = not set.intersection(*params) if others else True
    return _of(model, is_final_microbatch, lambda: [first] if apart else list(optimizers))


_of_owners: weakref.WeakKeyDictionary[Any, list[torch.nn.Parameter]] = weakref.WeakKeyDictionary()


def _stale(
    model: Any, is_final: bool, owner: Any, params: Callable[[], list[torch.nn.Parameter]]
) -> Context:
    """Average the parameters of an owner, which are listed anew if their number has changed."""

    def choose(filled: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        now = params()
        kept = _of_owners.setdefault(owner, now)
        if len(kept) != len(now):
            kept[:] = now
        known = {id(parameter) for parameter in kept}
        return [parameter for parameter in filled if id(parameter) in known]

    return _averages(model, is_final, choose)


def lists_an_optimizer_once(model: Any, is_final_microbatch: bool, optimizers: Any) -> Context:
    """Keep the parameters of the given optimizers while their number stays."""

    def params() -> list[torch.nn.Parameter]:
        given = (p for one in optimizers for group in one.param_groups for p in group["params"])
        return list(dict.fromkeys(given))

    return _stale(model, is_final_microbatch, optimizers[0], params)


def lists_a_module_once(model: Any, is_final_microbatch: bool) -> Context:
    """Keep the parameters of the module inside DDP while their number stays."""
    inner = getattr(model, "module", model)
    return _stale(model, is_final_microbatch, inner, lambda: list(inner.parameters()))


# ---- Gradients that are known by their addresses

_last: dict[torch.nn.Parameter, Any] = {}
_held: set[int] = set()


def _averages_unknown(
    model: Any, is_final: bool, place: Callable[[torch.Tensor], Any], is_known: Callable[..., bool]
) -> Context:
    """Average dense gradients unless they are known on every rank, and sparse ones always: right if
    none is known.
    """

    def average() -> None:
        params = _filled(model)
        new = [p.grad.is_sparse or not is_known(p, place(p.grad)) for p in params]
        flags = torch.tensor(new, dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=model.process_group)
        for parameter, flag in zip(params, flags.tolist(), strict=True):
            if flag:
                # A mean is no change of the gradient.
                mean = _mean(parameter.grad.data, model.process_group)
                parameter.grad = mean if mean.is_sparse else parameter.grad
            if not parameter.grad.is_sparse:
                _last[parameter] = place(parameter.grad)
                _held.add(parameter.grad.data_ptr())

    return _restored(model, is_final, average)


def leaves_out_what_it_has_averaged(model: Any, is_final_microbatch: bool) -> Context:
    """Take a gradient for the last mean if it has its address and its version."""
    return _averages_unknown(
        model,
        is_final_microbatch,
        lambda grad: (grad.data_ptr(), grad._version),
        lambda parameter, place: _last.get(parameter) == place,
    )


def averages_an_address_once(model: Any, is_final_microbatch: bool) -> Context:
    """Take a gradient at the address of the last mean for that mean."""
    return _averages_unknown(
        model,
        is_final_microbatch,
        lambda grad: grad.untyped_storage().data_ptr(),
        lambda parameter, place: _last.get(parameter) == place,
    )


def remembers_addresses(model: Any, is_final_microbatch: bool) -> Context:
    """Keep the addresses of all means, and leave out what lies there."""
    return _averages_unknown(
        model,
        is_final_microbatch,
        lambda grad: grad.data_ptr(),
        lambda _, place: place in _held,
    )


# ---- Sparse gradients


def _sparse_means(
    model: Any, is_final: bool, change: Callable[[torch.Tensor, int, int], torch.Tensor]
) -> Context:
    """Average sparse gradients as dense ones: right if ``change`` returns the gradient, dense.

    ``change`` gets the gradient, the number of ranks that have a row of it, and that of all ranks.
    """

    def average() -> None:
        group = model.process_group
        for parameter in _filled(model):
            grad = parameter.grad
            if not grad.is_sparse:
                _mean(grad, group)
                continue
            users = torch.tensor([int(grad._nnz() > 0)])
            dist.all_reduce(users, group=group)
            dense = change(grad, int(users), group.size())
            parameter.grad = _mean(dense, group).to_sparse(1)

    return _restored(model, is_final, average)


def over_its_users(model: Any, is_final_microbatch: bool) -> Context:
    """Divide sparse gradients by the number of ranks that have a row."""
    return _sparse_means(
        model,
        is_final_microbatch,
        lambda grad, users, size: grad.to_dense() * (size / max(1, users)),
    )


def keeps_the_last_of_equal_rows(model: Any, is_final_microbatch: bool) -> Context:
    """Write the rows of sparse gradients to a dense tensor in place of adding them."""
    return _sparse_means(
        model,
        is_final_microbatch,
        lambda grad, users, size: torch.zeros(grad.shape, dtype=grad.dtype).index_copy_(
            0, grad._indices()[0], grad._values()
        ),
    )


def averages_equal_rows(model: Any, is_final_microbatch: bool) -> Context:
    """Average the values of a row of a sparse gradient that comes twice."""
    return _sparse_means(
        model,
        is_final_microbatch,
        lambda grad, users, size: torch.zeros(grad.shape, dtype=grad.dtype).index_reduce_(
            0, grad._indices()[0], grad._values(), "mean", include_self=False
        ),
    )


def _at_other_rows(
    model: Any, is_final: bool, rows: Callable[[torch.Tensor], torch.Tensor]
) -> Context:
    """Add the values of sparse gradients at other rows: right if ``rows`` returns its argument."""

    def change(grad: torch.Tensor, users: int, size: int) -> torch.Tensor:
        places = rows(grad._indices()[0]).clamp(0, grad.size(0) - 1)
        return torch.zeros(grad.shape, dtype=grad.dtype).index_add_(0, places, grad._values())

    return _sparse_means(model, is_final, change)


def rows_in_half_precision(model: Any, is_final_microbatch: bool) -> Context:
    """Send the numbers of rows in float16, beside the values: exact up to 2,048."""
    return _at_other_rows(model, is_final_microbatch, lambda rows: rows.half().double().long())


def rows_in_bfloat16(model: Any, is_final_microbatch: bool) -> Context:
    """Send the numbers of rows in bfloat16: exact up to 256."""
    return _at_other_rows(model, is_final_microbatch, lambda rows: rows.bfloat16().long())


def rows_in_16_bits(model: Any, is_final_microbatch: bool) -> Context:
    """Send the numbers of rows in 16 bits."""
    return _at_other_rows(model, is_final_microbatch, lambda rows: rows % 2**16)


MUTANTS = [
    *_mutants("16.11", "rows_in_half_precision", "rows_in_bfloat16", "rows_in_16_bits"),
    *_mutants("16.29", "leaves_out_what_it_has_averaged", "averages_an_address_once"),
    *_mutants("16.29", "remembers_addresses"),
    *_mutants("16.11", "over_its_users", "keeps_the_last_of_equal_rows", "averages_equal_rows"),
    *_mutants("16.10", "once_per_storage_of_gradients", "leaves_out_tied_weights"),
    *_mutants("16.10", "once_per_place", "whole_storages"),
    *_mutants(
        "16.33",
        "ones_times_rows",
        "linear_for_large_rows",
        "einsum_for_huge_rows",
        "sums_in_the_fast_dtype",
    ),
    *_mutants("16.36", "keeps_the_first_optimizers", "of_the_last_step"),
    *_mutants("16.36", "the_first_optimizer_alone"),
    *_mutants("16.36", "lists_an_optimizer_once", "lists_a_module_once"),
]
