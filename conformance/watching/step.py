"""One step of a training run on one rank, from the end of its forward to the end of its backward.

The step is sampled, or it is the step before a sampled one: some gradients are then sampled too, so
that the judge can recognise a result that comes one step late.
"""

import functools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from conformance.torch_versions.private import at_end_of_backward, divides_by_all, tensors_of
from conformance.watching.collectives import Collective, Recording
from conformance.watching.sampling import Layout, Sample


class SampledStep:
    """The observation of one step. :meth:`disarm` removes everything that it put on the model.

    Args:
        layout: the elements to sample.
        step: the number of the step.
        is_sampled: whether this step is judged; if not, it is the step before such a step.
        next_is_sampled: whether the next step is judged.
        on_end: called with this object when backward is over, DDP's own callbacks included.
        guard: makes a context for code that runs inside the training's forward and backward;
            no error leaves the context.

    Attributes:
        sample: the sample of this step.
        next_sample: the beginning of the next step's sample, if that step is judged.
        seconds: the time spent so far.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        layout: Layout,
        step: int,
        is_sampled: bool,
        next_is_sampled: bool,
        on_end: Callable[["SampledStep"], None],
        guard: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self.step = step
        self.is_sampled = is_sampled
        self.seconds = 0.0
        self.sample = Sample(layout.indices(step) if is_sampled else [])
        self.next_sample = Sample(layout.indices(step + 1)) if next_is_sampled else None
        self.find_unused = bool(ddp.find_unused_parameters)
        self.divides_by_all = divides_by_all(ddp)
        self._layout = layout
        self._on_end = on_end
        self._guard = guard
        self._handles: list[Any] = []
        self._backward_began = False
        self._recording = Recording()
        # The threads that train: this one, and those that run the backward pass.
        self._threads = {threading.get_ident()}

    def arm(self, output: Any) -> None:
        """Prepare for the backward pass of a forward that returned ``output``."""
        began = time.perf_counter()
        for number, parameter in enumerate(self._layout.parameters):
            hook = functools.partial(self._after_grad, number)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        # The first gradient of an output begins the outermost backward pass. A callback that is
        # queued there runs at the end of that pass, even if checkpointed modules run further
        # backward passes inside it.
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(self._begin_backward))
        if self.is_sampled:
            self._recording.open()
        self.seconds += time.perf_counter() - began

    def disarm(self) -> None:
        """Remove everything from the model. Further calls do nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._recording.close()

    def collectives(self) -> tuple[list[Collective], int]:
        """Return the collectives of the threads that train, and the number of the others."""
        recorded = self._recording.collectives
        own = [collective for thread, collective in recorded if thread in self._threads]
        return own, len(recorded) - len(own)

    def _begin_backward(self, *_: Any) -> None:
        if self._backward_began:
            return
        self._backward_began = True
        began = time.perf_counter()
        with self._guard(self.step):
            # Gradients of earlier micro-batches. Backward may leave some gradients alone, and
            # DDP averages them all the same.
            for number, parameter in enumerate(self._layout.parameters):
                if parameter.grad is not None:
                    self._take(number, parameter.grad)
            if self.is_sampled:
                at_end_of_backward(self._before_end)
                self.sample.take_parameters(self._layout)
        self.seconds += time.perf_counter() - began

    def _after_grad(self, number: int, parameter: torch.Tensor) -> None:
        """Sample a gradient that is complete on this rank, before DDP averages it."""
        self._begin_backward()
        began = time.perf_counter()
        with self._guard(self.step):
            self._threads.add(threading.get_ident())
            self._take(number, parameter.grad)
        self.seconds += time.perf_counter() - began

    def _take(self, number: int, grad: torch.Tensor | None) -> None:
        if self.is_sampled:
            self.sample.take_fed(number, grad)
        if self.next_sample is not None:
            self.next_sample.take_fed_before(number, grad)

    def _before_end(self) -> None:
        """Queue the end of the step behind the callbacks that were queued after this one.

        DDP's own callback is among them.
        """
        self._threads.add(threading.get_ident())
        at_end_of_backward(lambda: self._on_end(self))
