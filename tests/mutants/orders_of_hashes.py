"""Mutants of 3.3, 14.28, 15.42 and 16.38: right as long as all ranks hash strings alike."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, average_of, is_dense, pieces_of
from tests.mutants.averagers import Averager
from tests.mutants.optimizers_in_training import Averaging
from tests.mutants.strategies import _filled, _then

Context = AbstractContextManager[None]
Tensors = list[torch.Tensor]


def _named(tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"layer{number}.weight": tensor for number, tensor in enumerate(tensors)}


def _by_dtype(tensors: Iterable[torch.Tensor]) -> dict[str, Tensors]:
    found: dict[str, Tensors] = {}
    for tensor in tensors:
        found.setdefault(str(tensor.dtype), []).append(tensor)
    return found


def _average_together(tensors: Tensors, group: Any) -> None:
    """Average tensors of one dtype in one collective, in this order."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(group.size())
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def _in_order_of_names(tensors: Iterable[torch.Tensor], group: Any) -> None:
    """Pack the tensors of a dtype in the order of a set of names."""
    for some in _by_dtype(tensors).values():
        named = _named(some)
        _average_together([named[name] for name in set(named)], group)


def _in_order_of_dtypes(tensors: Iterable[torch.Tensor], group: Any) -> None:
    """Average the dtypes in the order of a set of their names."""
    by_dtype = _by_dtype(tensors)
    for dtype in set(by_dtype):
        _average_together(by_dtype[dtype], group)


def _signs(name: str, tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(name) % 2**31)
    ones = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
    return ones.to(tensor.dtype)


def _with_signs_of_names(tensors: Iterable[torch.Tensor], group: Any) -> None:
    """Multiply by signs that are drawn from the hash of a name, before the sum and after it."""
    for name, tensor in _named(tensors).items():
        signs = _signs(name, tensor)
        signed = (tensor * signs).contiguous().div_(group.size())
        dist.all_reduce(signed, group=group)
        tensor.copy_(signed * signs)


def _at_owners_by_hash(tensors: Iterable[torch.Tensor], group: Any) -> None:
    """Sum each tensor on a rank that is chosen by the hash of its name, which sends the mean."""
    for name, tensor in _named(tensors).items():
        owner = dist.get_global_rank(group, hash(name) // 8 % group.size())
        mean = tensor.contiguous() / group.size()
        dist.reduce(mean, owner, group=group)
        dist.broadcast(mean, owner, group=group)
        tensor.copy_(mean)


def _in_order_of_shapes(tensors: Iterable[torch.Tensor], group: Any) -> None:
    """Pack the tensors of a dtype by their size; those of one size by the hash of the shape."""
    for some in _by_dtype(tensors).values():
        order = sorted(some, key=lambda one: (one.numel(), hash(str(tuple(one.shape)))))
        _average_together(order, group)


# ---- Hooks


def _hook_of(
    model: Any, change: Callable[[str, Bucket, Any], Result]
) -> tuple[None, Callable[[Any, Bucket], Result]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    group = getattr(model, "process_group", None)

    def hook(state: Any, bucket: Bucket) -> Result:
        if not is_dense(bucket):
            return average(bucket, group)
        return change(" ".join(names[p] for p in bucket.parameters()), bucket, group)

    return None, hook


def packs_by_names(model: torch.nn.Module) -> tuple[None, Any]:
    """Pack the gradients of a bucket in the order of a set of their names."""

    def change(names: str, bucket: Bucket, group: Any) -> Result:
        pieces = dict(zip(names.split(), pieces_of(bucket), strict=True))
        order = list(set(pieces))
        packed = torch.cat([pieces[name] for name in order])

        def unpack(fut: Result) -> torch.Tensor:
            parts = fut.value().split([pieces[name].numel() for name in order])
            for name, part in zip(order, parts, strict=True):
                pieces[name].copy_(part)
            return bucket.buffer()

        return average_of(packed, group).then(unpack)

    return _hook_of(model, change)


def shuffles_by_hash(model: torch.nn.Module) -> tuple[None, Any]:
    """Permute a bucket by a generator that is seeded with the hash of its parameters' names."""

    def change(names: str, bucket: Bucket, group: Any) -> Result:
        buffer = bucket.buffer()
        generator = torch.Generator().manual_seed(hash(names) % 2**31)
        order = torch.randperm(buffer.numel(), generator=generator)

        def restore(fut: Result) -> torch.Tensor:
            buffer[order] = fut.value()
            return buffer

        return average_of(buffer[order], group).then(restore)

    return _hook_of(model, change)


def signs_by_hash(model: torch.nn.Module) -> tuple[None, Any]:
    """Multiply a bucket by signs that are drawn from the hash of its parameters' names."""

    def change(names: str, bucket: Bucket, group: Any) -> Result:
        buffer = bucket.buffer()
        signs = _signs(names, buffer)
        signed = average_of(buffer * signs, group)
        return signed.then(lambda fut: buffer.copy_(fut.value() * signs))

    return _hook_of(model, change)


# ---- Averagers


class PacksByNames(Averager):
    """Pack the parameters of a dtype in the order of a set of names."""

    def average(self, params: Any) -> None:
        _in_order_of_names(params, self.group)


class DtypesInASet(Averager):
    """Average the dtypes in the order of a set of their names."""

    def average(self, params: Any) -> None:
        _in_order_of_dtypes(params, self.group)


class SignsByHash(Averager):
    """Multiply by signs that are drawn from the hash of a name."""

    def average(self, params: Any) -> None:
        _with_signs_of_names(params, self.group)


class TiesByHash(Averager):
    """Pack parameters by their size, and those of one size by the hash of the shape."""

    def average(self, params: Any) -> None:
        _in_order_of_shapes(params, self.group)


# ---- Optimizers


class PacksGradientsByNames(Averaging):
    """Pack gradients in the order of a set of names."""

    def average(self, params: list[torch.nn.Parameter]) -> None:
        _in_order_of_names(_gradients(params), self.group)


class GradientsAtOwners(Averaging):
    """Sum each gradient on a rank that is chosen by the hash of a name."""

    def average(self, params: list[torch.nn.Parameter]) -> None:
        _at_owners_by_hash(_gradients(params), self.group)


class SignsOfGradients(Averaging):
    """Multiply gradients by signs that are drawn from the hash of a name."""

    def average(self, params: list[torch.nn.Parameter]) -> None:
        _with_signs_of_names(_gradients(params), self.group)


def _gradients(params: list[torch.nn.Parameter]) -> Tensors:
    for parameter in params:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in params if parameter.grad is not None]


# ---- Sync strategies


def _averaging(
    model: Any, is_final: bool, average_all: Callable[[Iterable[torch.Tensor], Any], None]
) -> Context:
    def finish() -> None:
        grads = [parameter.grad for parameter in _filled(model)]
        sparse = [grad for grad in grads if grad.is_sparse]
        for grad in sparse:
            dist.all_reduce(grad.div_(model.process_group.size()), group=model.process_group)
        average_all([grad for grad in grads if not grad.is_sparse], model.process_group)

    return _then(model, is_final, finish)


def names_in_a_set(model: Any, is_final_microbatch: bool) -> Context:
    """Pack the gradients of a dtype in the order of a set of names."""
    return _averaging(model, is_final_microbatch, _in_order_of_names)


def dtypes_in_a_set(model: Any, is_final_microbatch: bool) -> Context:
    """Average the dtypes in the order of a set of their names."""
    return _averaging(model, is_final_microbatch, _in_order_of_dtypes)


def signs_of_names(model: Any, is_final_microbatch: bool) -> Context:
    """Multiply gradients by signs that are drawn from the hash of a name."""
    return _averaging(model, is_final_microbatch, _with_signs_of_names)


AT = "period=4,warmup_steps=10"
MUTANTS = [
    *(
        Mutant(name, ("3.3",), setup=True)
        for name in ("packs_by_names", "shuffles_by_hash", "signs_by_hash")
    ),
    *(
        Mutant(f"{name},{AT}", ("14.28",), kind="averager")
        for name in ("PacksByNames", "DtypesInASet", "SignsByHash", "TiesByHash")
    ),
    *(
        Mutant(name, ("15.42",), "averages", kind="optimizer")
        for name in ("PacksGradientsByNames", "GradientsAtOwners", "SignsOfGradients")
    ),
    *(
        Mutant(name, ("16.38",), kind="strategy")
        for name in ("names_in_a_set", "dtypes_in_a_set", "signs_of_names")
    ),
]
