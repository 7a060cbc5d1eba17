"""The compression hook on gradients of its own."""

import torch
import torch.distributed as dist

from conformance import Case
from examples import states
from hooks_ref import CompressionState, compression_hook


def fed_49152(state: str) -> Case:
    """Return the compression hook with a named state, fed with gradients of 49,152."""

    def hook(made: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket.buffer().fill_(49_152)
        return compression_hook(made, bucket)

    return Case(getattr(states, state)(), hook)
