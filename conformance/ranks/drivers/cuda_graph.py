"""Training under a CUDA graph: a step is captured once and replayed on other inputs each time.

The capture holds forward, hook and backward.

Source: torch documentation, CUDA semantics, Usage with DistributedDataParallel: DDP is made in the
context of a side stream, at least 11 eager iterations come before the capture, and NCCL's own
error handling is off. One stream serves for all of it: autograd accumulates gradients on the
stream on which DDP was made.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

WARM_UPS = 11
Grads = list[torch.Tensor | None]


def side_stream(captured: bool) -> Any:
    """Return the stream to capture, or None; called before there is a group."""
    if not captured:
        return None
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    return torch.cuda.Stream()


def on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a rank makes its groups and its DDP."""
    if stream is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


def train_captured(
    side: Any,
    ddp: Callable[[Grads], torch.Tensor],
    forget: Callable[[], None],
    feed: Callable[[int, str], Grads],
    steps: Sequence[tuple[int, str]],
    begin: Callable[[int, str], None],
    keep: Callable[[int], None],
) -> None:
    """Capture a step, and replay it for each of ``steps``.

    Args:
        side: the stream that :func:`side_stream` has made.
        ddp: the model; it is called with the gradients to script.
        forget: sets gradients to None.
        feed: returns the gradients of a step.
        steps: the numbers and kinds of the steps.
        begin: called before a step.
        keep: called when a step's gradients are there.
    """
    fed = feed(*steps[0])
    # A replay reads its inputs from the memory of the capture.
    static = [None if grad is None else grad.clone() for grad in fed]
    torch.cuda.synchronize()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            forget()
            ddp(static).backward()
        forget()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        ddp(static).backward()
    for step, kind in steps:
        begin(step, kind)
        for into, grad in zip(static, feed(step, kind), strict=True):
            if into is not None and grad is not None:
                into.copy_(grad)
        graph.replay()
        keep(step)
