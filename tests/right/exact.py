"""Hooks that return the mean or the sum, of exact or of rounded values.

They cover the kinds of object of a hook, and the kinds of state.
"""

import concurrent.futures
import functools
import math
import threading
import time
import timeit
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.subjects.spec import Case
from tests.right import ARITHMETIC, OBJECTS, SENDS, Right
from tests.right._common import Bucket, Group, Result, completed, dense, gather

# torch 2.13 deprecates the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _group_of(state: Any) -> dist.ProcessGroup:
    return state if state is not None else dist.group.WORLD


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Result:
    return (
        dist.all_reduce(tensor, group=group, async_op=True)
        .get_future()
        .then(lambda fut: fut.value()[0])
    )


class NoiseScale:
    """The gradient noise scale, as moving averages of square norms before and after the mean.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018.
    """

    def __init__(self, process_group: Group = None) -> None:
        self.group = _group_of(process_group)
        self.local = 0.0
        self.averaged = 0.0

    def scale(self) -> float:
        """Return the ratio of the two averages."""
        return self.local / self.averaged if self.averaged else float("nan")

    def add(self, local: float, averaged: float) -> None:
        """Add the square norms of one bucket, if they are finite."""
        if math.isfinite(local) and math.isfinite(averaged):
            self.local = 0.95 * self.local + 0.05 * local
            self.averaged = 0.95 * self.averaged + 0.05 * averaged


def noise_scale(state: NoiseScale, bucket: Bucket) -> Result:
    """Average the bucket, and beside it the square norms of the ranks, by a second collective."""
    buffer = bucket.buffer()
    size = state.group.size()
    if buffer.is_sparse:
        return _sum(buffer, state.group).then(lambda fut: fut.value().div_(size))
    norms = _sum(_square_norm(buffer).view(1), state.group)
    means = _sum(buffer, state.group)

    def divide(fut: torch.futures.Future) -> torch.Tensor:
        norm, mean = (one.value() for one in fut.value())
        mean.div_(size)
        state.add(float(norm) / size, float(_square_norm(mean)))
        return mean

    return torch.futures.collect_all([norms, means]).then(divide)


def _square_norm(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.linalg.vector_norm(real, dtype=torch.float64).square()


def _refuse_sparse(bucket: Bucket, name: str) -> torch.Tensor:
    """Return the bucket's buffer; raise if it is sparse."""
    if bucket.buffer().layout != torch.strided:
        raise TypeError(f"{name} takes no sparse gradients; use Embedding(sparse=False)")
    return bucket.buffer()


# Collectives and the place of the division


def point_to_point(state: Any, bucket: Bucket) -> Result:
    """Send the gradient to every peer, and sum in the order of ranks."""
    group = _group_of(state)
    buffer = _refuse_sparse(bucket, "point_to_point")
    parts = [
        torch.empty_like(buffer) if place != group.rank() else buffer.clone()
        for place in range(group.size())
    ]
    peers = [place for place in range(group.size()) if place != group.rank()]
    sends = [dist.isend(buffer, dist.get_global_rank(group, place), group=group) for place in peers]
    for place in peers:
        dist.recv(parts[place], dist.get_global_rank(group, place), group=group)
    for send in sends:
        send.wait()
    return completed(sum(parts[1:], parts[0]) / group.size())


def unannotated(state, bucket):
    """Average, without type annotations."""
    group = _group_of(state)
    return _sum(bucket.buffer().div_(group.size()), group)


def out_of_place(state: Any, bucket: Bucket) -> Result:
    """Average into a new tensor, and leave the bucket unchanged."""
    group = _group_of(state)
    return _sum(bucket.buffer() / group.size(), group)


def takes_two_at_least(state: Any, bucket: Bucket) -> Result:
    """Average over two ranks or more, and refuse a single one."""
    if _group_of(state).size() < 2:
        raise ValueError("takes_two_at_least: a group of one rank has no peers")
    return out_of_place(state, bucket)


def three_or_more(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group as a state, and refuse fewer than three ranks."""
    if process_group.size() < 3:
        raise ValueError(f"three_or_more: expected three ranks or more, got {process_group.size()}")
    return process_group


def sum_then_divide(state: Any, bucket: Bucket) -> Result:
    """Divide after the sum."""
    group = _group_of(state)
    return _sum(bucket.buffer(), group).then(lambda fut: fut.value().div_(group.size()))


def reciprocal(state: Any, bucket: Bucket) -> Result:
    """Multiply by 1 / world_size."""
    group = _group_of(state)
    return _sum(bucket.buffer().mul_(1 / group.size()), group)


def reduce_op_avg(state: Any, bucket: Bucket) -> Result:
    """Average by ReduceOp.AVG."""
    buffer = _refuse_sparse(bucket, "reduce_op_avg")
    work = dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=_group_of(state), async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def blocking(state: Any, bucket: Bucket) -> Result:
    """Wait for the collective inside the hook."""
    group = _group_of(state)
    buffer = bucket.buffer().div_(group.size())
    if buffer.is_sparse:
        return _sum(buffer, group)
    dist.all_reduce(buffer, group=group)
    return completed(buffer)


def gather_and_mean(state: Any, bucket: Bucket) -> Result:
    """Gather all gradients, and average them in the same order on every rank."""
    group = _group_of(state)
    buffer = _refuse_sparse(bucket, "gather_and_mean")
    gathered = [torch.empty_like(buffer) for _ in range(group.size())]
    future = dist.all_gather(gathered, buffer, group=group, async_op=True).get_future()
    return future.then(lambda fut: (fut.value(), torch.stack(gathered).mean(0))[1])


def reduce_and_broadcast(state: Any, bucket: Bucket) -> Result:
    """Reduce to the group's rank 0, which divides and broadcasts."""
    group = _group_of(state)
    buffer = _refuse_sparse(bucket, "reduce_and_broadcast")
    dist.reduce(buffer, dst=dist.get_global_rank(group, 0), group=group)
    buffer.div_(group.size())
    dist.broadcast(buffer, src=dist.get_global_rank(group, 0), group=group)
    return completed(buffer)


def reduce_scatter(state: Any, bucket: Bucket) -> Result:
    """Exchange padded shards, sum one per rank, gather the sums, and cut off the padding."""
    group = _group_of(state)
    buffer = _refuse_sparse(bucket, "reduce_scatter")
    size = group.size()
    numel = buffer.numel()
    padded = torch.nn.functional.pad(buffer / size, (0, -numel % size))
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    _all_gather_single(padded, received.view(size, -1).sum(0), group=group)
    return completed(padded[:numel].clone())


def per_parameter(state: Any, bucket: Bucket) -> Result:
    """Average each parameter's gradient in a collective of its own."""
    _refuse_sparse(bucket, "per_parameter")
    if any(parameter.is_complex() for parameter in bucket.parameters()):
        raise TypeError(
            "per_parameter takes no complex parameters: bucket.gradients() does not cover them"
        )
    group = _group_of(state)
    futures = [_sum(grad.div_(group.size()), group) for grad in bucket.gradients()]
    return torch.futures.collect_all(futures).then(
        lambda all_: [fut.value() for fut in all_.value()] and bucket.buffer()
    )


def per_parameter_quirk(state: Any, bucket: Bucket) -> Result:
    """Average each of bucket.gradients(), even for complex parameters.

    torch's bucket.gradients() covers complex parameters only in part.
    """
    _refuse_sparse(bucket, "per_parameter_quirk")
    for grad in bucket.gradients():
        dist.all_reduce(grad.div_(_group_of(state).size()), group=_group_of(state))
    return completed(bucket.buffer())


def polling(state: Any, bucket: Bucket) -> Result:
    """Poll the future until it is done."""
    size = _group_of(state).size()
    future = _sum(bucket.buffer(), _group_of(state)).then(lambda fut: fut.value().div_(size))
    while not future.done():
        time.sleep(0.001)
    return future


def another_thread(state: Any, bucket: Bucket) -> Result:
    """Complete the future in a Python thread, which then ends."""
    group = _group_of(state)
    future = torch.futures.Future()
    summed = _sum(bucket.buffer().div_(group.size()), group)

    def complete() -> None:
        try:
            future.set_result(summed.wait())
        except RuntimeError as error:
            future.set_exception(error)

    threading.Thread(target=complete).start()
    return future


_durations: list[float] = []


def times_out(state: Any, bucket: Bucket) -> Result:
    """Keep durations for a log, and give up if a sum takes a minute by this rank's clock."""
    size = _group_of(state).size()
    begun = timeit.default_timer()
    deadline = time.monotonic() + 60

    def finish(summed: Result) -> torch.Tensor:
        _durations.append(timeit.default_timer() - begun)
        if time.monotonic() > deadline:
            raise TimeoutError("the sum took a minute")
        if len(_durations) == 1000:
            _durations.clear()
        return summed.value().div_(size)

    return _sum(bucket.buffer(), _group_of(state)).then(finish)


# Claims


def rounds_to_float16(state: Any, bucket: Bucket) -> Result:
    """Send float16."""
    return _send_as(torch.float16, state, bucket)


def rounds_to_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Send bfloat16, and let DDP widen the result."""
    return _send_as(torch.bfloat16, state, bucket, cast_back=False)


def rounds_large_to_bfloat16(state: Any, bucket: Bucket) -> Result:
    """Send bfloat16 if a bucket is large, and the gradients as they are if it is small."""
    if bucket.buffer().numel() >= 1 << 14:
        return _send_as(torch.bfloat16, state, bucket)
    return _sum(bucket.buffer().div_(_group_of(state).size()), _group_of(state))


def _send_as(dtype: torch.dtype, state: Any, bucket: Bucket, cast_back: bool = True) -> Result:
    group = _group_of(state)
    buffer = _refuse_sparse(bucket, "a rounding hook")
    summed = _sum(buffer.div(group.size()).to(dtype), group)
    return summed.then(lambda fut: buffer.copy_(fut.value())) if cast_back else summed


def gives_sum(state: Any, bucket: Bucket) -> Result:
    """Return the sum, which the trainer divides."""
    return _sum(bucket.buffer(), _group_of(state))


def always_world(state: Any, bucket: Bucket) -> Result:
    """Average over WORLD at any group."""
    return _sum(bucket.buffer().div_(dist.get_world_size()), dist.group.WORLD)


# Kinds of object


class Holder:
    """Hooks as members of a class."""

    def method(self, state: Any, bucket: Bucket) -> Result:
        """Average, as a bound method."""
        return out_of_place(state, bucket)

    @staticmethod
    def static(state: Any, bucket: Bucket) -> Result:
        """Average, as a static method."""
        return out_of_place(state, bucket)

    @classmethod
    def of_class(cls, state: Any, bucket: Bucket) -> Result:
        """Average, as a class method."""
        return out_of_place(state, bucket)


class Nameless:
    """A callable object without a __name__."""

    def __call__(self, state: Any, bucket: Bucket) -> Result:
        return out_of_place(state, bucket)


class Named(Nameless):
    """A callable object with a __name__ and a __qualname__, which DDP reads."""

    def __init__(self) -> None:
        self.__name__ = "named_hook"
        self.__qualname__ = "named_hook"


holder = Holder()
nameless = Nameless()
named = Named()
partial = functools.partial(_send_as, torch.float16)


def make_hook(predivide: bool = True) -> Any:
    """Return a hook that divides before the sum or after it."""

    def hook(state: Any, bucket: Bucket) -> Result:
        return (out_of_place if predivide else sum_then_divide)(state, bucket)

    return hook


def wrap(hook: Any) -> Any:
    """Return a hook that runs ``hook`` and copies its result."""

    @functools.wraps(hook)
    def wrapped(state: Any, bucket: Bucket) -> Result:
        return hook(state, bucket).then(lambda fut: fut.value().clone())

    return wrapped


wrapped = wrap(out_of_place)


# Kinds of state


class State:
    """A group, a step count, and a scratch buffer for each bucket."""

    def __init__(self, process_group: dist.ProcessGroup, scale: float = 1.0) -> None:
        self.group = process_group
        self.scale = scale
        self.steps = 0
        self.scratch: dict[int, torch.Tensor] = {}

    def scratch_for(self, bucket: Bucket) -> torch.Tensor:
        """Return a copy of the bucket in the scratch buffer of its index.

        The buffer is replaced if the bucket's layout has changed.
        """
        buffer = bucket.buffer()
        kept = self.scratch.get(bucket.index())
        if kept is None or kept.shape != buffer.shape or kept.dtype != buffer.dtype:
            kept = torch.empty_like(buffer)
            self.scratch[bucket.index()] = kept
        return kept.copy_(buffer)


def with_scratch(state: State, bucket: Bucket) -> Result:
    """Average in scratch buffers that are kept from step to step."""
    _refuse_sparse(bucket, "with_scratch")
    state.steps += bucket.is_last()
    return _sum(state.scratch_for(bucket).mul_(state.scale / state.group.size()), state.group)


def set_up_pair(process_group: dist.ProcessGroup) -> tuple[State, Any]:
    """Return (state, hook) from the set-up."""
    return State(process_group), with_scratch


def set_up_itself(model: Any, process_group: dist.ProcessGroup) -> None:
    """Register the hook in the set-up."""
    model.register_comm_hook(process_group, out_of_place)


class Watched:
    """A hook that checks the calls at the beginning of a step and after backward."""

    def __init__(self, process_group: dist.ProcessGroup, model: DistributedDataParallel) -> None:
        self.group = process_group
        self.model = model
        self.steps = 0
        self.open = False

    def on_step(self, step: int) -> None:
        if self.open or step != self.steps:
            state = "open" if self.open else "closed"
            raise RuntimeError(f"step {step} after {self.steps} steps; the last one is {state}")
        self.open = True

    def hook(self, state: Any, bucket: Bucket) -> Result:
        # Under Join, a rank without an input has no forward either.
        if not self.open and not self.model._join_config.enable:
            raise RuntimeError("on_step comes before each forward")
        return out_of_place(self.group, bucket)

    def after_backward(self) -> None:
        self.steps += 1
        self.open = False

    def close(self) -> None:
        self.group = None


def set_up_calls(process_group: dist.ProcessGroup, model: DistributedDataParallel) -> Case:
    """Return a Case with a hook that needs both calls of every step."""
    watched = Watched(process_group, model)
    return Case(
        hook=watched.hook,
        on_step=watched.on_step,
        after_backward=watched.after_backward,
        close=watched.close,
    )


def set_up_worker(process_group: dist.ProcessGroup) -> Case:
    """Return a Case with a hook that communicates in a worker thread, ended by close().

    The thread needs a group of its own, since DDP communicates meanwhile.
    """
    worker = concurrent.futures.ThreadPoolExecutor(max_workers=1)
    group = dist.new_group(
        dist.get_process_group_ranks(process_group), use_local_synchronization=True
    )

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = _refuse_sparse(bucket, "set_up_worker")
        future = torch.futures.Future()

        def average() -> None:
            try:
                dist.all_reduce(buffer.div_(group.size()), group=group)
                future.set_result(buffer)
            except RuntimeError as error:
                future.set_exception(error)

        worker.submit(average)
        return future

    return Case(hook=hook, close=worker.shutdown)


def float16_gathered(group: Group, bucket: Bucket) -> Result:
    """Gather float16, and sum in float32."""
    buffer = dense(bucket)
    gathered = gather(buffer.half(), group)
    return completed(
        (
            torch.stack(gathered).to(torch.promote_types(buffer.dtype, torch.float32)).sum(0)
            / group.size()
        ).to(buffer.dtype)
    )


RIGHT = [
    Right("unannotated", sections=OBJECTS),
    *(Right(name) for name in ("out_of_place", "blocking")),
    *(
        Right(name, sections=ARITHMETIC)
        for name in ("sum_then_divide", "reciprocal", "reduce_op_avg")
    ),
    *(Right(name) for name in ("gather_and_mean", "reduce_scatter", "per_parameter")),
    *(Right(name, sections=SENDS) for name in ("reduce_and_broadcast", "per_parameter_quirk")),
    Right("takes_two_at_least", "exact, min_world_size(2)", sections=SENDS),
    Right(
        "out_of_place", "exact, min_world_size(3)", f"{__name__}:three_or_more", sections=OBJECTS
    ),
    Right("another_thread"),
    # Not section 10: it polls in every forced order, until the kit gives up.
    Right("polling", sections=("1", "2", "3", "8", "12")),
    Right("times_out", sections=("1", "2", "10")),
    Right("point_to_point"),
    Right("noise_scale", state=f"{__name__}:NoiseScale"),
    Right("rounds_to_float16", "rounded(float16)"),
    Right("rounds_to_bfloat16", "rounded(bfloat16)", sections=ARITHMETIC),
    Right("rounds_large_to_bfloat16", "rounded(bfloat16)", sections=ARITHMETIC),
    Right("float16_gathered", "rounded(float16)", "process_group"),
    Right("gives_sum", "sum"),
    Right("always_world", "world_only"),
    *(
        Right(name, sections=OBJECTS)
        for name in (
            "holder.method",
            "Holder.static",
            "Holder.of_class",
            "nameless",
            "named",
            "wrapped",
        )
    ),
    Right("partial", "rounded(float16)", sections=OBJECTS),
    Right("make_hook()", sections=OBJECTS),
    Right("make_hook,predivide=False", sections=OBJECTS),
    Right("out_of_place", state="process_group", sections=OBJECTS),
    Right("with_scratch", state=f"{__name__}:State"),
    Right("with_scratch", state=f"{__name__}:State,scale=1.0", sections=ARITHMETIC),
    *(
        Right(name, setup=True, sections=OBJECTS)
        for name in ("set_up_pair", "set_up_itself", "set_up_calls", "set_up_worker")
    ),
]
