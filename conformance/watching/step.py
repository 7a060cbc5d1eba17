"""One step of a training run on one rank, from the end of its forward until backward is over: one that is sampled, or the one
before it, of which it is known then what a result would be that comes a step late."""

import functools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from conformance.watching.collectives import Listener
from conformance.watching.sampling import Layout, Taken

Heard = list[tuple[str, list[int], str]]  # what, ranks of the group, its name


class Look:
    """What is seen of one step. Everything that it puts on the model comes off with :meth:`disarm`.

    Args:
        layout: what is taken of it.
        step: its number.
        sampled: it is looked at; if not, it is only the one before such a step.
        ahead: the next step's turn comes.
        over: called with this when backward is over, DDP's own callbacks too.
        harmless: a context for what is done inside of the training's own forward and backward: nothing is raised out of it.

    Attributes:
        taken: what is taken.
        ahead: what is taken for the step after this one, if that is to be sampled.
        seconds: spent so far.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        layout: Layout,
        step: int,
        sampled: bool,
        ahead: bool,
        over: Callable[["Look"], None],
        harmless: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self.step, self.sampled, self.seconds = step, sampled, 0.0
        self.taken = Taken(layout.indices(step) if sampled else [])
        self.ahead = Taken(layout.indices(step + 1)) if ahead else None
        self.find_unused = bool(ddp.find_unused_parameters)
        # Of ranks that have joined, DDP's own allreduce can be told not to count them; a hook is not asked.
        self.divides_by_all = bool(getattr(ddp, "_divide_by_initial_world_size", True) or ddp._comm_hooks)
        self._layout, self._over, self._harmless = layout, over, harmless
        self._handles: list[Any] = []
        self._begun = False
        self._listener, self._threads = Listener(), {threading.get_ident()}

    def arm(self, output: Any) -> None:
        """Get ready for the backward of a forward that gave ``output``."""
        began = time.perf_counter()
        for number, parameter in enumerate(self._layout.parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(functools.partial(self._complete, number)))
        # The first gradient of an output begins the outermost backward: what is queued there comes when all of it is over,
        # also where checkpointed modules run backward passes inside of it.
        self._handles += [tensor.register_hook(self._begin) for tensor in _tensors(output) if tensor.requires_grad]
        if self.sampled:
            self._listener.open()
        self.seconds += time.perf_counter() - began

    def disarm(self) -> None:
        """Take everything off the model; may be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._listener.close()

    def heard(self) -> tuple[Heard, int]:
        """Return the collectives of the threads that train, and how many others there were."""
        own = [(what, ranks, named) for thread, what, ranks, named in self._listener.heard if thread in self._threads]
        return own, len(self._listener.heard) - len(own)

    def _begin(self, *_: Any) -> None:
        """Backward begins: of gradients that are there already some may not be touched by it, and are averaged all the same."""
        if self._begun:
            return
        began, self._begun = time.perf_counter(), True
        with self._harmless(self.step):
            for number, parameter in enumerate(self._layout.parameters):
                if parameter.grad is not None:
                    self._feed(number, parameter.grad)
            if self.sampled:
                torch.autograd.Variable._execution_engine.queue_callback(self._nearly_over)
                self.taken.hold(self._layout)
        self.seconds += time.perf_counter() - began

    def _complete(self, number: int, parameter: torch.Tensor) -> None:
        """A gradient is complete on this rank, and DDP has not had it yet."""
        self._begin()
        began = time.perf_counter()
        with self._harmless(self.step):
            self._threads.add(threading.get_ident())
            self._feed(number, parameter.grad)
        self.seconds += time.perf_counter() - began

    def _feed(self, number: int, grad: torch.Tensor | None) -> None:
        if self.sampled:
            self.taken.feed(number, grad)
        if self.ahead is not None:
            self.ahead.feed_before(number, grad)

    def _nearly_over(self) -> None:
        """Backward is over, but for the callbacks that were queued after this one; DDP's is one of them."""
        self._threads.add(threading.get_ident())
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._over(self))


def _tensors(output: Any) -> Any:
    """Return the tensors of an output, as DDP finds them."""
    from torch.nn.parallel.distributed import _find_tensors

    return _find_tensors(output)
