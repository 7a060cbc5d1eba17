"""Average the gradients over a process group: in full precision, or in half precision.

With ``g_r`` the bucket of rank ``r`` and ``W`` the size of the group, every rank gets

    allreduce   mean = sum_r (g_r / W)
    compressed  mean = cast_back(sum_r cast(g_r / W))

The division comes before the sum, so that the sum overflows only if a mean of like-signed terms
would. It also comes before the cast, so that float16 (largest value 65504) holds every term whose
share of the mean it can hold. Nothing waits: each hook is one asynchronous collective and one
callback, and a failed collective surfaces through ``fut.value()``.

Source: torch documentation, "DDP Communication Hooks", section "Default Communication Hooks".
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def allreduce_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over ``process_group``, in place and in its own dtype.

    Args:
        process_group: the group to average over; None is the default group.
        bucket: one bucket of gradients; its buffer has shape ``[numel]``, or is a sparse tensor.

    Returns:
        A future of the mean: the bucket's own buffer, shape ``[numel]``.
    """
    group = process_group if process_group is not None else dist.group.WORLD
    buffer = bucket.buffer().div_(group.size())
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda fut: in_dtype_of(buffer, fut.value()[0]))


def in_dtype_of(buffer: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
    """Return the reduced buffer; in torch 2.9 that of a complex one arrives as pairs of reals."""
    if buffer.is_complex() and not reduced.is_complex():
        return torch.view_as_complex(reduced)
    return reduced


def real_view(buffer: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a buffer; in torch 2.9 that of complex parameters is itself complex."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def _compress_hook(dtype: torch.dtype, name: str) -> Hook:
    """Make the hook that averages in ``dtype``; its ``__name__`` is ``name``."""

    def hook(
        process_group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        group = process_group if process_group is not None else dist.group.WORLD
        buffer = bucket.buffer()
        if buffer.is_sparse:  # no backend sums sparse tensors of half precision
            return allreduce_hook(process_group, bucket)
        numbers = real_view(buffer)
        # Divided in the bucket's dtype, so that each value is rounded once.
        sent = numbers.div_(group.size()).to(dtype)
        future = dist.all_reduce(sent, group=group, async_op=True).get_future()

        def decompress(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            numbers.copy_(fut.value()[0])
            return buffer

        return future.then(decompress)

    hook.__name__ = hook.__qualname__ = name
    hook.__doc__ = f"""Average the bucket over ``process_group`` in {dtype}.

    This sends half the bytes of float32.

    Args:
        process_group: the group to average over; None is the default group.
        bucket: one bucket of gradients; its buffer has shape ``[numel]``. A sparse bucket is
            averaged in its own dtype.

    Returns:
        A future of the mean in the bucket's own dtype: the bucket's own buffer, shape ``[numel]``.
    """
    return hook


def _compress_wrapper(hook: Hook, dtype: torch.dtype, name: str) -> Hook:
    """Make the hook that runs ``hook`` on the bucket in ``dtype`` and casts its result back."""

    def wrapped(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return hook(state, bucket)
        numbers = real_view(buffer)
        bucket.set_buffer(numbers.to(dtype))

        def decompress(fut: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            bucket.set_buffer(buffer)  # hooks around this one see the bucket as DDP made it
            numbers.copy_(fut.value())
            return buffer

        return hook(state, bucket).then(decompress)

    wrapped.__name__ = wrapped.__qualname__ = name
    return wrapped


# On CPU, DDP refuses any hook named bf16_compress_hook, although Gloo sums bfloat16. This hook has
# therefore another name.
fp16_compress_hook = _compress_hook(torch.float16, "fp16_compress_hook")
bf16_compress_hook = _compress_hook(torch.bfloat16, "bfloat16_compress_hook")


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Run ``hook`` in float16: a dense bucket cast down before it, its result cast back after it.

    ``hook`` divides after this cast, so values above 65504 become inf before they reach it. If that
    matters, use :func:`fp16_compress_hook` or :func:`bf16_compress_wrapper`.

    Args:
        hook: a communication hook ``(state, bucket) -> Future[Tensor]``.

    Returns:
        A hook with the same state; its future holds the bucket's own buffer in its own dtype.
    """
    return _compress_wrapper(hook, torch.float16, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Run ``hook`` in bfloat16: a dense bucket cast down before it, its result cast back after it.

    Args:
        hook: a communication hook ``(state, bucket) -> Future[Tensor]``.

    Returns:
        A hook with the same state; its future holds the bucket's own buffer in its own dtype.
    """
    return _compress_wrapper(hook, torch.bfloat16, "bfloat16_compress_wrapper_hook")
