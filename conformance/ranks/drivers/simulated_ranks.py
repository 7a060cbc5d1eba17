"""Many ranks in one process, for errors that show only at scale.

Each rank has its turn to run its hook (``simulated_turns.py``), and a collective is carried out
when every rank has issued its own. A rank makes its state once, and takes several steps.

The process group is *deferred*: it records each collective, and completes it later. Callbacks run
on the thread that completes it, so that none can wait there. Sums are taken in pairs, in the dtype
of the terms: a tree of log2(n) roundings, as large groups have. Buckets are DDP's, of one real
model. One thing differs from real ranks: all of them share the process, so that a state that a hook
keeps in its module is not a rank's own.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks.drivers.simulated_turns import Turns
from conformance.records.recorder import Recorder
from conformance.scenarios.gradients import at_scale, rotated
from conformance.scenarios.hook import simulated_steps
from conformance.torch_versions.private import (
    ALLGATHER_BASE,
    REDUCE_SCATTER_BASE,
    known_groups,
    set_default_group,
)

GATHERED = 128  # with more ranks than this, nothing is gathered
_WAITS_ELSEWHERE = "a callback waits for a collective"
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


class CannotSimulate(Exception):
    """The hook does something that simulated ranks cannot do; the message is the reason."""


@dataclass
class _Call:
    """One collective of one rank.

    Attributes:
        name, op, root: the collective, its reduce operation and its root.
        given: the tensors that the rank contributes.
        into: the tensors for its result.
        future: is completed with ``into``.
    """

    name: str
    op: dist.ReduceOp.RedOpType
    given: list[torch.Tensor]
    into: list[torch.Tensor]
    root: int = 0
    future: torch.futures.Future[list[torch.Tensor]] = field(default_factory=torch.futures.Future)
    _is_done: bool = False

    def is_done(self) -> bool:
        """Whether the collective was carried out; the future itself would end the rank's turn."""
        return self._is_done

    def complete(self) -> None:
        """Complete the future; callbacks run now."""
        self._is_done = True
        self.future.set_result(self.into)

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties on which all ranks have to agree."""
        forms = [(tensor.shape, tensor.dtype) for tensor in self.given]
        return self.name, self.op, self.root, forms


class _Work(dist.Work):
    """A collective that is carried out only after all ranks have issued it."""

    def __init__(self, call: _Call, exchange: "_Exchange") -> None:
        super().__init__()
        self._call = call
        self._exchange = exchange

    def wait(self, timeout: Any = None) -> bool:
        self._exchange.wait_for(self._call)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._exchange.is_completed(self._call)

    def get_future(self) -> torch.futures.Future[Any]:
        return self._call.future


class _Exchange:
    """The collectives of all ranks, each rank's in the order in which it issued them."""

    def __init__(self, size: int, turns: Turns) -> None:
        self.size = size
        self._issued: list[list[_Call]] = [[] for _ in range(size)]
        self._carried_out = 0
        self._turns = turns
        self._thread = threading.get_ident()
        self._others = False
        self._waits_elsewhere = False

    def issue(self, rank: int, call: _Call) -> _Work:
        thread = threading.get_ident()
        self._others |= thread != self._thread and thread not in self._turns.threads
        self._issued[rank].append(call)
        return _Work(call, self)

    def wait_for(self, call: _Call) -> None:
        """End the turn of a rank until one of its collectives has been carried out.

        Raises:
            CannotSimulate: the caller is a callback, which has no turn of its own.
        """
        if not self._turns.wait_until(call.is_done):
            # A future would turn this exception into an error of the hook's.
            self._waits_elsewhere = True
            raise CannotSimulate(_WAITS_ELSEWHERE)

    def is_completed(self, call: _Call) -> bool:
        """Return whether a collective was carried out, after the others had their turns."""
        return self._turns.poll(call.is_done)

    def complete_one(self) -> bool:
        """Carry out the next collective, and return whether there was one.

        Raises:
            CannotSimulate: ranks have not issued the same collectives.
        """
        index = self._carried_out
        calls = [rank[index] for rank in self._issued if len(rank) > index]
        if not calls:
            return False
        if len(calls) < self.size or any(call.kind != calls[0].kind for call in calls):
            raise CannotSimulate("simulated ranks do not issue the same collectives")
        self._carried_out += 1
        self._carry_out(calls)
        return True

    def complete(self) -> None:
        """Carry out the collectives that were issued, and those that callbacks then issue.

        Raises:
            CannotSimulate: ranks have not issued the same collectives.
        """
        while self.complete_one():
            pass
        self.require_turns()
        if self._others:
            raise CannotSimulate("it issues collectives from a thread of its own")

    def require_turns(self) -> None:
        """Raise CannotSimulate if a collective was waited for outside of a rank's turn."""
        if self._waits_elsewhere:
            raise CannotSimulate(_WAITS_ELSEWHERE)

    def _carry_out(self, calls: list[_Call]) -> None:
        for call, result in zip(calls, self._results(calls), strict=True):
            for into, part in zip(call.into, result, strict=True):
                into.copy_(part)
        # Callbacks run now: all ranks have their results before any of them goes on.
        for call in calls:
            call.complete()

    def _results(self, calls: list[_Call]) -> list[list[torch.Tensor]]:
        """Return the result of each rank."""
        first = calls[0]
        if first.name == "allreduce":
            return [_reduced_over(calls)] * len(calls)
        if first.name == "reduce_scatter":
            return [[part] for part in _reduced_over(calls)]
        if first.name == "allgather":
            if self.size > GATHERED:
                copies = f"{self.size} times {self.size} copies"
                raise CannotSimulate(f"it gathers, which takes {copies}")
            return [[call.given[0] for call in calls]] * len(calls)
        if first.name == "reduce":
            # The others keep what they have: their tensors are undefined afterwards.
            given = [call.given for call in calls]
            given[first.root] = _reduced_over(calls)
            return given
        if first.name == "alltoall":
            return [[call.given[rank] for call in calls] for rank in range(self.size)]
        return [calls[first.root].given] * len(calls)


class DeferredGroup(dist.ProcessGroup):
    """The process group of one simulated rank."""

    def __init__(self, exchange: _Exchange, rank: int) -> None:
        super().__init__(rank, exchange.size)
        self._exchange = exchange
        self._rank = rank

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        return self._issue("allreduce", tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        return self._issue("allreduce", tensors, tensors, opts)

    def allgather(
        self, into: list[list[torch.Tensor]], given: list[torch.Tensor], opts: Any = None
    ) -> _Work:
        return self._issue("allgather", given, into[0])

    def all_gather_single(self, into: torch.Tensor, given: torch.Tensor, opts: Any = None) -> _Work:
        return self._issue("allgather", [given], list(into.view(self.size(), *given.shape)))

    def reduce_scatter(
        self, into: list[torch.Tensor], given: list[list[torch.Tensor]], opts: Any = None
    ) -> _Work:
        return self._issue("reduce_scatter", given[0], into, opts)

    def reduce_scatter_single(
        self, into: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> _Work:
        parts = list(given.view(self.size(), *into.shape))
        return self._issue("reduce_scatter", parts, [into], opts)

    def alltoall_base(
        self, into: torch.Tensor, given: torch.Tensor, into_sizes: Any, sizes: Any, opts: Any = None
    ) -> _Work:
        for split in (into_sizes, sizes):
            if len(set(split)) > 1:
                raise CannotSimulate("it exchanges parts of unequal size")
        parts = list(given.view(self.size(), -1))
        return self._issue("alltoall", parts, list(into.view(self.size(), -1)))

    def alltoall(
        self, into: list[torch.Tensor], given: list[torch.Tensor], opts: Any = None
    ) -> _Work:
        return self._issue("alltoall", given, into)

    def all_to_all_single(
        self, into: torch.Tensor, given: torch.Tensor, into_sizes: Any, sizes: Any, opts: Any = None
    ) -> _Work:
        return self.alltoall_base(into, given, into_sizes, sizes, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        return self._issue("broadcast", tensors, tensors, root=opts.rootRank if opts else 0)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        return self._issue("reduce", tensors, tensors, opts, root=opts.rootRank if opts else 0)

    def getBackendName(self) -> str:
        return "gloo"

    def _issue(
        self,
        name: str,
        given: list[torch.Tensor],
        into: list[torch.Tensor],
        opts: Any = None,
        root: int = 0,
    ) -> _Work:
        op = dist.ReduceOp.SUM
        if opts is not None and hasattr(opts.reduceOp, "op"):
            op = opts.reduceOp.op
        return self._exchange.issue(self._rank, _Call(name, op, given, into, root))


# The names of two methods before torch 2.13.
setattr(DeferredGroup, ALLGATHER_BASE, DeferredGroup.all_gather_single)
setattr(DeferredGroup, REDUCE_SCATTER_BASE, DeferredGroup.reduce_scatter_single)


def record_simulations(
    sizes: Sequence[int],
    make: Callable[[DeferredGroup], tuple[Hook, Any]],
    bucket: Callable[[], dist.GradBucket],
    recorder: Recorder,
) -> None:
    """Record, for each number of ranks, the results of rank 0 and whether all ranks get them.

    Args:
        sizes: the numbers of ranks.
        make, bucket: as for :func:`simulate`.
        recorder: receives a tensor and an event for each number of ranks.

    Raises:
        CannotSimulate: the hook does something that simulated ranks cannot do.
    """
    for size in sizes:
        gradients = at_scale(size).float()
        fed = [rotated(gradients, step) for step in range(simulated_steps(size))]
        results = simulate(size, make, bucket, fed)
        first = results[:, 0]
        alike = bool((results == first[:, None]).all())
        recorder.event("simulated", size=size, alike=alike)
        undone = [rotated(result, -step) for step, result in enumerate(first)]
        recorder.tensor(f"at scale/{size}", torch.stack(undone))


def simulate(
    size: int,
    make: Callable[[DeferredGroup], tuple[Hook, Any]],
    bucket: Callable[[], dist.GradBucket],
    fed: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the results ``[steps, size, numel]`` of the calls of each rank's hook.

    Args:
        size: number of ranks.
        make: called once for each rank with its group, which is the default one meanwhile; returns
            the rank's hook and state.
        bucket: makes a bucket of numel elements.
        fed: for each step, the inputs of the ranks, ``[size, numel]``.

    Raises:
        CannotSimulate: the hook does something that simulated ranks cannot do.
    """
    turns = Turns()
    exchange = _Exchange(size, turns)
    groups = [DeferredGroup(exchange, rank) for rank in range(size)]
    results = torch.empty(len(fed), size, fed[0].shape[1])

    def train(rank: int) -> torch.futures.Future[torch.Tensor]:
        """Return the future of the last step."""
        hook, state = make(groups[rank])
        for step, inputs in enumerate(fed):
            one = bucket()
            one.buffer().copy_(inputs[rank])
            future = hook(state, one)
            if started:
                raise CannotSimulate("it starts a thread of its own, which no order is forced on")
            if step < len(fed) - 1:
                # This ends the turn. In its next step the hook may use its result's tensor again.
                results[step, rank] = future.wait()
        return future

    with _registered(groups), _threads_started() as started:
        try:
            futures = turns.run(
                [functools.partial(train, rank) for rank in range(size)],
                lambda rank: set_default_group(groups[rank]),
                exchange.complete_one,
            )
        except Exception as error:
            exchange.require_turns()
            if isinstance(error, TimeoutError):
                raise CannotSimulate(str(error)) from error
            raise
        exchange.complete()
        if not all(future.done() for future in futures):
            raise CannotSimulate("its futures do not complete when its collectives have")
        results[-1] = torch.stack([future.value() for future in futures])
        return results


@contextmanager
def _registered(groups: list[DeferredGroup]) -> Iterator[None]:
    """Register the groups with torch.distributed, and restore the default group at the end."""
    default = dist.group.WORLD
    world = known_groups()
    ranks = {rank: rank for rank in range(len(groups))}
    for group in groups:
        world.pg_map[group] = ("gloo", None)
        world.pg_group_ranks[group] = ranks
        world.pg_names[group] = "simulated"
    try:
        yield
    finally:
        for group in groups:
            for known in (world.pg_map, world.pg_group_ranks, world.pg_names):
                del known[group]
        set_default_group(default)


@contextmanager
def _threads_started() -> Iterator[list[str]]:
    """Collect the names of the threads that are started inside the context."""
    started: list[str] = []
    start = threading.Thread.start

    def noting(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    threading.Thread.start = noting  # type: ignore[assignment, method-assign]
    try:
        yield started
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def _reduced_over(calls: list[_Call]) -> list[torch.Tensor]:
    """Return the reduction over all ranks of each tensor that they contribute."""
    op = calls[0].op
    given = [call.given for call in calls]
    return [_reduced(list(tensors), op) for tensors in zip(*given, strict=True)]


def _reduced(tensors: list[torch.Tensor], op: Any) -> torch.Tensor:
    """Reduce tensors; sums are taken in pairs."""
    stack = torch.stack(tensors)
    if op == dist.ReduceOp.MAX:
        return stack.amax(0)
    if op == dist.ReduceOp.MIN:
        return stack.amin(0)
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise CannotSimulate(f"it reduces by {op}")
    count = len(stack)
    while len(stack) > 1:
        half = len(stack) // 2
        stack = torch.cat([stack[:half] + stack[half : 2 * half], stack[2 * half :]])
    return stack[0] / count if op == dist.ReduceOp.AVG else stack[0]
