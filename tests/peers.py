"""torch's own hooks and ours, in the shapes that a target on the command line cannot spell."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import hooks_ref
from hooks_ref.default_hooks import Hook

torch_bf16 = functools.partial(default_hooks.bf16_compress_hook)
torch_fp16_wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
torch_bf16_wrapped = functools.partial(
    default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
)
ours_fp16_wrapped = hooks_ref.fp16_compress_wrapper(hooks_ref.allreduce_hook)
ours_bf16_wrapped = hooks_ref.bf16_compress_wrapper(hooks_ref.allreduce_hook)


def _fed_1e5(hook: Hook) -> Hook:
    """Put 1e5 into the bucket on rank 0 and 0 on the others before ``hook`` sees it."""

    def fed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket.buffer().fill_(1e5 if dist.get_rank() == 0 else 0.0)
        return hook(state, bucket)

    return fed


ours_fed_1e5 = _fed_1e5(hooks_ref.fp16_compress_hook)
torch_fed_1e5 = _fed_1e5(default_hooks.fp16_compress_hook)
