"""The hooks with rows of other sizes; and torch's own, made to run on Gloo."""

import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

from hooks_ref import quantization
from hooks_ref.quantization import quantization_perchannel_hook, quantization_pertensor_hook

Result = torch.futures.Future[torch.Tensor]


def perchannel_3(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> Result:
    return quantization_perchannel_hook(process_group, bucket, bucket_size=3)


def perchannel_11(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> Result:
    return quantization_perchannel_hook(process_group, bucket, bucket_size=11)


def perchannel_16(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> Result:
    return quantization_perchannel_hook(process_group, bucket, bucket_size=16)


_TORCHS_LEAST_SCALE = 2.0**-23


def _set_torchs_least_scale() -> None:
    """Round as torch does, which loses rows of small values; for the rest of this rank."""
    quantization.LEAST_SCALE = _TORCHS_LEAST_SCALE


def pertensor_as_torch(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> Result:
    _set_torchs_least_scale()
    return quantization_pertensor_hook(process_group, bucket)


def perchannel_as_torch(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> Result:
    _set_torchs_least_scale()
    return quantization_perchannel_hook(process_group, bucket)


def perchannel_11_as_torch(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> Result:
    _set_torchs_least_scale()
    return perchannel_11(process_group, bucket)


class _Gathered:
    """A finished all_gather, as NCCL returns it.

    The value of its future is one tensor, ``[world, ...]``, in a list.
    """

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        self._outputs = outputs

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([torch.stack(self._outputs)])
        return future


def _all_gather(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> _Gathered:
    # Complete before the next one begins, which torch's hook starts in a callback.
    dist.all_gather(outputs, tensor, group=group)
    return _Gathered(outputs)


def _on_gloo(hook: Any) -> Any:
    """Return torch's ``hook`` with an all_gather that suits it.

    Nothing of torch is replaced for others.
    """
    seen = types.SimpleNamespace(all_gather=_all_gather, get_rank=dist.get_rank, group=dist.group)
    return types.FunctionType(
        hook.__code__, {**hook.__globals__, "dist": seen}, hook.__name__, hook.__defaults__
    )


_theirs = _on_gloo(quantization_hooks.quantization_perchannel_hook)
torch_pertensor = _on_gloo(quantization_hooks.quantization_pertensor_hook)


def torch_perchannel(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> Result:
    return _theirs(process_group, bucket)


def torch_perchannel_11(process_group: dist.ProcessGroup, bucket: dist.GradBucket) -> Result:
    return _theirs(process_group, bucket, bucket_size=11)
