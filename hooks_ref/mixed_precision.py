"""Average the gradients in a dtype of choice, independent of the parameters' dtype.

With ``g_r`` the bucket of rank ``r``, ``W`` the size of the group and ``wide`` the wider of the
bucket's dtype and ``reduce_dtype``, every rank gets

    mean = cast_back(sum_r cast(wide(g_r) / W))     cast: to reduce_dtype, for the wire and the sum

in the bucket's own dtype, which is the parameters' dtype: the optimizer's step is unchanged. A
``reduce_dtype`` below the parameters' dtype saves bytes. One above it, such as float32 for a model
in bfloat16, keeps the small terms of the sum, and rounds only the mean. The division comes before
the cast and the sum, so that float16 holds every share of the mean that it can hold; torch's native
hook casts, sums and then divides, all in ``reduce_dtype``.

DDP's native mixed precision (``DistributedDataParallel(mixed_precision=_MixedPrecision(...))``)
needs an accelerator and occupies the only place for a hook. This hook is its communication part,
``reduce_dtype``, as a plain hook on any device. ``param_dtype``, ``buffer_dtype`` and the casting
of inputs are not covered: no parameter is cast for the forward pass, so none has to be cast back.
Use ``torch.autocast``, or a model in half precision, for that.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; torch,
``torch.nn.parallel.distributed._MixedPrecision``.
"""

import torch
import torch.distributed as dist

from hooks_ref._state import HookState, savable
from hooks_ref.default_hooks import allreduce_hook, real_view

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@savable
class MixedPrecisionState(HookState):
    """State of :func:`allreduce_and_upcast_hook`.

    Args:
        process_group: the group to average over; None is the default group.
        reduce_dtype: the dtype of the sum: torch.float16, bfloat16, float32 or float64; None is
            each bucket's own.

    Attributes:
        iter: steps begun.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(process_group)
        if not isinstance(reduce_dtype, torch.dtype | None):
            raise TypeError(f"reduce_dtype: one of {DTYPES}, or None; got {reduce_dtype!r}")
        if reduce_dtype not in (*DTYPES, None):
            raise ValueError(f"reduce_dtype: one of {DTYPES}, or None; got {reduce_dtype}")
        self.reduce_dtype = reduce_dtype


def allreduce_and_upcast_hook(
    hook_state: MixedPrecisionState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket in ``hook_state.reduce_dtype``.

    Args:
        hook_state: made once per DDP model, with the same arguments on all ranks.
        bucket: one bucket of gradients; its buffer has shape ``[numel]``. A sparse bucket is
            averaged in its own dtype.

    Returns:
        A future of the mean in the bucket's own dtype: the bucket's own buffer, shape ``[numel]``.
    """
    hook_state.maybe_increase_iter(bucket)
    buffer = bucket.buffer()
    group = hook_state.group
    if buffer.is_sparse or hook_state.reduce_dtype in (None, buffer.dtype):
        return allreduce_hook(group, bucket)
    numbers = real_view(buffer)
    # float32, for a bucket in float16 and a sum in bfloat16, or the other way round.
    wide = torch.promote_types(numbers.dtype, hook_state.reduce_dtype)
    sent = numbers.to(wide).div(group.size()).to(hook_state.reduce_dtype)
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()

    def upcast(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        numbers.copy_(fut.value()[0])
        return buffer

    return future.then(upcast)
