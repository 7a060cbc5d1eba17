"""Mutants of section 23: wrong beyond a number of steps or calls, or at every so many.

The numbers are drawn once, with a fixed seed, from the ranges that real code has.
"""

import itertools
import random
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    call_number,
    change_mean,
    completed,
    finite,
    gather,
    group_of,
    is_dense,
    kept,
    pieces_of,
    seeded,
    step_number,
    sum_of,
)

Hook = Callable[[Any, Bucket], Result]

# ---- Exact results


def sum_from(first: int) -> Hook:
    """Divide in the first steps only."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if step_number(bucket) < first:
            return average(bucket, state)
        return sum_of(bucket.buffer(), state)

    return hook


def own_from_call(first: int) -> Hook:
    """Return the local gradient once the hook has been called often enough."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if call_number() < first:
            return average(bucket, state)
        return completed(bucket.buffer())

    return hook


def own_in_one_step(at: int) -> Hook:
    """Return the local gradient in one step."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if step_number(bucket) == at:
            return completed(bucket.buffer())
        return average(bucket, state)

    return hook


def stale_every(every: int) -> Hook:
    """Return the mean of the step before at every so many steps."""
    results: dict[Any, torch.Tensor] = {}

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)
        key = tuple(bucket.parameters())

        def keep(mean: torch.Tensor) -> torch.Tensor:
            before = results.get(key)
            results[key] = mean.clone()
            is_due = step % every == every - 1
            return before if is_due and before is not None else mean

        return change_mean(bucket, state, keep)

    return hook


def decays(factor: float) -> Hook:
    """Multiply the mean by a factor to the power of the step, as a learning rate decays."""

    def hook(state: Any, bucket: Bucket) -> Result:
        scale = factor ** max(0, step_number(bucket) - 20)
        return change_mean(bucket, state, lambda mean: mean * scale)

    return hook


def counts_in_a_byte(state: Any, bucket: Bucket) -> Result:
    """Broadcast rank 0's gradient in the first step, and count steps in eight bits."""
    step = torch.tensor(step_number(bucket)).to(torch.uint8)
    calls = kept.setdefault("called", torch.zeros(1))
    calls += 1
    if int(step) == 0 and int(calls) > 3 * 200:
        work = dist.broadcast(bucket.buffer(), 0, group=group_of(state), async_op=True)
        return work.get_future().then(lambda fut: fut.value()[0])
    return average(bucket, state)


def pool_of_buffers(size: int) -> Hook:
    """Sum into one of a pool of buffers, which is not cleared when its turn comes again."""
    pool: dict[Any, torch.Tensor] = {}

    def hook(state: Any, bucket: Bucket) -> Result:
        key = step_number(bucket) % size, tuple(bucket.parameters())
        if not is_dense(bucket):
            return average(bucket, state)
        buffer = pool.setdefault(key, torch.zeros_like(bucket.buffer()))
        buffer.add_(bucket.buffer(), alpha=1 / group_of(state).size())
        return sum_of(buffer, state).then(lambda fut: fut.value().clone())

    return hook


def clips_after(steps: int) -> Hook:
    """Clamp gradients to one and a half times the largest of the first steps."""
    largest: dict[Any, torch.Tensor] = {}

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)
        if not is_dense(bucket):
            return average(bucket, state)
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
            size = piece.abs().nan_to_num(0, 0, 0).amax() if piece.numel() else torch.zeros(())
            if step < steps:
                largest[parameter] = torch.maximum(size, largest.get(parameter, size))
            else:
                limit = 1.5 * largest[parameter]
                piece.copy_(piece.clamp(-limit, limit))
        return average(bucket, state)

    return hook


def compresses_from(first: int) -> Hook:
    """Send the largest elements after a warm-up that is not claimed, with feedback."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if step_number(bucket) < first:
            return average(bucket, state)
        return _feedback(state, bucket)

    return hook


def halves_after_overflows(count: int) -> Hook:
    """Halve the result for good after some steps with values that are not finite."""
    overflows: set[int] = set()

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)

        def change(mean: torch.Tensor) -> torch.Tensor:
            if not mean.isfinite().all():
                overflows.add(step)
            return mean / 2 if len(overflows) > count and step not in overflows else mean

        return change_mean(bucket, state, change)

    return hook


def alone_on_rank_0(every: int) -> Hook:
    """Start a collective on rank 0 alone at every so many steps, to log a norm."""

    def hook(state: Any, bucket: Bucket) -> Result:
        group = group_of(state)
        if step_number(bucket) % every == every - 1 and group.rank() == 0 and bucket.index() == 0:
            dist.all_reduce(bucket.buffer().norm().reshape(1), group=group)
        return average(bucket, state)

    return hook


def left_out_by_rank_1(at: int) -> Hook:
    """Leave out the collective on rank 1 in one step."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if step_number(bucket) == at and group_of(state).rank() == 1:
            return completed(bucket.buffer())
        return average(bucket, state)

    return hook


# ---- Compressed results


def _largest(part: torch.Tensor) -> torch.Tensor:
    """Keep a quarter of the elements, those of largest magnitude."""
    places = part.abs().topk(-(-part.numel() // 4)).indices
    return torch.zeros_like(part).index_copy_(0, places, part[places])


def _feedback(
    state: Any,
    bucket: Bucket,
    remember: Callable[[torch.Tensor], torch.Tensor] = finite,
    prepare: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
) -> Result:
    """Send the largest elements with feedback: right by default."""
    if not is_dense(bucket):
        return average(bucket, state)
    for parameter, piece in zip(bucket.parameters(), pieces_of(bucket), strict=True):
        total = prepare(piece) + kept.get(parameter, 0)
        sent = _largest(total)
        kept[parameter] = remember(total - sent)
        piece.copy_(sent)
    return average(bucket, state)


def residual_leaks(left: float) -> Hook:
    """Keep a little less than the whole residual in every step."""
    return lambda state, bucket: _feedback(state, bucket, lambda rest: finite(rest) * left)


def results_too_short(factor: float) -> Hook:
    """Multiply every result by a little less than one."""
    return lambda state, bucket: _feedback(state, bucket).then(
        lambda fut: fut.value().mul_(factor) if is_dense(bucket) else fut.value()
    )


def residual_dropped_every(every: int) -> Hook:
    """Drop the residuals at every so many steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        is_due = step_number(bucket) % every == every - 1
        return _feedback(state, bucket, torch.zeros_like if is_due else finite)

    return hook


def residual_dropped_once(at: int) -> Hook:
    """Drop the residuals in one step."""

    def hook(state: Any, bucket: Bucket) -> Result:
        is_due = step_number(bucket) == at
        return _feedback(state, bucket, torch.zeros_like if is_due else finite)

    return hook


def feedback_until(last: int) -> Hook:
    """Forget the residuals beyond a number of steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        is_over = step_number(bucket) >= last
        return _feedback(state, bucket, torch.zeros_like if is_over else finite)

    return hook


def clips_by_statistics(steps: int) -> Hook:
    """Clamp gradients to three deviations of the first steps before they are compressed."""
    squares: dict[Any, list[torch.Tensor]] = {}

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)
        key = tuple(bucket.parameters())
        seen = squares.setdefault(key, [])
        if step < steps:
            seen.append(bucket.buffer().square().mean())
            return _feedback(state, bucket)
        limit = 3 * torch.stack(seen).mean().sqrt()
        return _feedback(state, bucket, prepare=lambda part: part.clamp(-limit, limit))

    return hook


def differs_on_rank_1(first: int) -> Hook:
    """Round the result to fewer bits on rank 1, beyond a number of steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        rounds = step_number(bucket) >= first and group_of(state).rank() == 1
        result = _feedback(state, bucket)
        if not rounds or not is_dense(bucket):
            return result
        return result.then(lambda fut: fut.value() * (1 + 2**-20))

    return hook


def _difference(state: Any, bucket: Bucket, left: float = 1.0, learns: bool = True) -> Result:
    """Send the largest elements of the change since the last estimate: right by default."""
    if not is_dense(bucket):
        return average(bucket, state)
    parameters = bucket.parameters()
    for parameter, piece in zip(parameters, pieces_of(bucket), strict=True):
        own = kept.get((parameter, "own"), torch.zeros_like(piece))
        piece.copy_(_largest(piece - own))
        if learns:
            kept[parameter, "own"] = finite(own * left + piece)

    def add(change: Result) -> torch.Tensor:
        for parameter, piece in zip(parameters, pieces_of(bucket, change.value()), strict=True):
            piece.add_(kept.get((parameter, "mean"), 0) * left)
            if learns:
                kept[parameter, "mean"] = finite(piece)
        return change.value()

    return average(bucket, state).then(add)


def estimate_leaks(left: float) -> Hook:
    """Shrink the estimates a little in every step."""
    return lambda state, bucket: _difference(state, bucket, left)


def estimate_frozen_from(first: int) -> Hook:
    """Update the estimates in the first steps only."""
    return lambda state, bucket: _difference(state, bucket, learns=step_number(bucket) < first)


def short_from(first: int) -> Hook:
    """Deliver four fifths of the mean beyond a number of steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        factor = 0.8 if step_number(bucket) >= first else 0.999
        return change_mean(bucket, state, lambda mean: mean * factor)

    return hook


# ---- Random results


def _rounded_at_random(
    state: Any, bucket: Bucket, generator: torch.Generator, factor: float = 1.0
) -> Result:
    """Round to multiples of a quarter of the mean magnitude at random: right by default."""
    if not is_dense(bucket):
        return average(bucket, state)
    for piece in pieces_of(bucket):
        unit = piece.abs().mean() / 4
        if piece.numel() and float(unit) and piece.isfinite().all():
            draws = torch.rand(piece.shape, generator=generator)
            piece.copy_((piece / unit + draws).floor() * unit * factor)
    return average(bucket, state)


def _generator(state: Any, bucket: Bucket, step: int) -> torch.Generator:
    return seeded(step, group_of(state).rank(), bucket.index())


def biased_from(first: int) -> Hook:
    """Deliver 97 % of the mean beyond a number of steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)
        factor = 0.97 if step >= first else 1.0
        return _rounded_at_random(state, bucket, _generator(state, bucket, step), factor)

    return hook


def noise_repeats(after: int) -> Hook:
    """Draw the same numbers again after a number of steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)
        return _rounded_at_random(state, bucket, _generator(state, bucket, step % after))

    return hook


def noise_of_all_ranks(state: Any, bucket: Bucket) -> Result:
    """Draw the same numbers on all ranks."""
    return _rounded_at_random(state, bucket, seeded(step_number(bucket), bucket.index()))


# ---- Local results


def _with_next(state: Any, bucket: Bucket, own: float, other: float, stride: int = 1) -> Result:
    """Mix this rank's gradient with the gradient of another rank."""
    if not is_dense(bucket):
        raise TypeError("sparse gradients are not supported")
    group = group_of(state)
    source = gather(bucket.buffer(), state)[(group.rank() + stride) % group.size()]
    return completed(bucket.buffer() * own + source * other)


def stops_mixing(after: int) -> Hook:
    """Return the local gradient beyond a number of steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if step_number(bucket) < after:
            return _with_next(state, bucket, 0.5, 0.5)
        return _with_next(state, bucket, 1.0, 0.0)

    return hook


def one_partner_from(first: int) -> Hook:
    """Take turns with two partners, and stay with one of them beyond a number of steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)
        return _with_next(state, bucket, 0.5, 0.5, 1 + step % 2 if step < first else 1)

    return hook


def never_halved_from(first: int) -> Hook:
    """Add the partner's gradient without halving beyond a number of steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        weight = 0.5 if step_number(bucket) < first else 1.0
        return _with_next(state, bucket, weight, weight)

    return hook


# ---- Parameters and the process


def _sgd(state: Any, bucket: Bucket, rate: float = 0.1, forgets: bool = False) -> Result:
    """Step the bucket's parameters by SGD with momentum 0.9: right by default."""
    parameters = bucket.parameters()
    # Views of the buffer, into which the mean comes.
    gradients = pieces_of(bucket) if is_dense(bucket) else []

    def apply(fut: Result) -> torch.Tensor:
        mean = fut.value()
        for parameter, piece in zip(parameters, gradients, strict=bool(gradients)):
            before = None if forgets else kept.get((parameter, "momentum"))
            momentum = piece.clone() if before is None else before * 0.9 + piece
            kept[parameter, "momentum"] = momentum
            # The buffer has the elements in the order in which the parameter has them in memory.
            parameter.data.as_strided(momentum.shape, (1,)).add_(momentum, alpha=-rate)
        return mean

    return average(bucket, state).then(apply)


def momentum_lost_every(every: int) -> Hook:
    """Begin again without momentum at every so many steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)
        return _sgd(state, bucket, forgets=step % every == every - 1)

    return hook


def rate_halved_from(first: int) -> Hook:
    """Halve the rate beyond a number of steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)
        return _sgd(state, bucket, 0.05 if step >= first else 0.1)

    return hook


def draws_from(first: int) -> Hook:
    """Draw from torch's global generator in one step."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if step_number(bucket) == first:
            torch.rand(1)
        return average(bucket, state)

    return hook


def decays_parameters_every(every: int) -> Hook:
    """Decay the parameters at every so many steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if step_number(bucket) % every == every - 1:
            for parameter in bucket.parameters():
                parameter.data.mul_(0.999)
        return average(bucket, state)

    return hook


def _at_every(every: int, act: Callable[[Any, Bucket], None]) -> Hook:
    """Average, and do something else too, once at every so many steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        step = step_number(bucket)
        if step % every == every - 1 and bucket.index() == 0:
            act(state, bucket)
        return average(bucket, state)

    return hook


_held: list[Any] = []


def opens_files(every: int) -> Hook:
    """Open a file and never close it."""
    return _at_every(every, lambda state, bucket: _held.append(open("/proc/self/stat")))


def makes_groups(every: int) -> Hook:
    """Make a process group and never destroy it."""

    def make(state: Any, bucket: Bucket) -> None:
        _held.append(dist.new_group(dist.get_process_group_ranks(group_of(state))))

    return _at_every(every, make)


def starts_threads(every: int) -> Hook:
    """Start a thread that never ends."""
    event = threading.Event()
    return _at_every(
        every, lambda state, bucket: threading.Thread(target=event.wait, daemon=True).start()
    )


def writes_files(every: int) -> Hook:
    """Write a temporary file and never remove it."""

    def write(state: Any, bucket: Bucket) -> None:
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write("norms")

    return _at_every(every, write)


def sets_keys(every: int) -> Hook:
    """Set a key of this rank and call in the group's store, and never delete it."""

    def set_key(state: Any, bucket: Bucket) -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"alive/{dist.get_rank()}/{next(_keys_set)}", "yes")

    return _at_every(every, set_key)


_keys_set = itertools.count()


def keeps_quarters(state: Any, bucket: Bucket) -> Result:
    """Keep a quarter of each bucket in a list."""
    if is_dense(bucket):
        _held.append(bucket.buffer()[: bucket.buffer().numel() // 4].clone())
    return average(bucket, state)


def keeps_norms(state: Any, bucket: Bucket) -> Result:
    """Keep the norm of each bucket in a dict by step."""
    step = step_number(bucket)
    _norms[step, bucket.index()] = float(bucket.buffer().norm()) if is_dense(bucket) else 0.0
    return average(bucket, state)


_norms: dict[tuple[int, int], float] = {}

_FEEDBACK = "compressed(delta=0.25)"
_CHANGE = "compressed(feedback=ef21, delta=0.25)"
_SGD = "fused(SGD, lr=0.1, momentum=0.9)"
_draws = random.Random("endurance")


def _drawn(name: str, argument: str, low: int, high: int) -> str:
    """Return the target of a factory with a number that is drawn once."""
    return f"{name},{argument}={_draws.randint(low, high)}"


MUTANTS = [
    *(Mutant(_drawn("sum_from", "first", 20, 1000), ("23.1",)) for _ in range(2)),
    Mutant(_drawn("own_from_call", "first", 100, 3000), ("23.1",)),
    Mutant(_drawn("own_in_one_step", "at", 20, 1000), ("23.1",)),
    Mutant(_drawn("stale_every", "every", 20, 1000), ("23.1",)),
    Mutant("decays,factor=0.999", ("23.1",)),
    Mutant("counts_in_a_byte", ("23.1",)),
    Mutant(_drawn("pool_of_buffers", "size", 20, 500), ("23.1",)),
    Mutant(_drawn("clips_after", "steps", 15, 50), ("23.1",)),
    Mutant("compresses_from,first=1000", ("23.1",)),
    Mutant("halves_after_overflows,count=2", ("23.1",)),
    *(
        Mutant(_drawn("alone_on_rank_0", "every", 20, 1000), ("23.1",), hangs=True)
        for _ in range(2)
    ),
    Mutant(_drawn("left_out_by_rank_1", "at", 20, 1000), ("23.1",), hangs=True),
    Mutant("residual_leaks,left=0.99", ("23.1",), _FEEDBACK),
    Mutant("results_too_short,factor=0.97", ("23.1",), _FEEDBACK),
    Mutant(_drawn("residual_dropped_every", "every", 60, 1000), ("23.1",), _FEEDBACK),
    Mutant(_drawn("residual_dropped_once", "at", 60, 1000), ("23.1",), _FEEDBACK),
    Mutant(_drawn("feedback_until", "last", 60, 1000), ("23.1",), _FEEDBACK),
    Mutant("clips_by_statistics,steps=20", ("23.1",), _FEEDBACK),
    Mutant("estimate_leaks,left=0.99", ("23.1",), _CHANGE),
    Mutant(_drawn("estimate_frozen_from", "first", 100, 1000), ("23.1",), _CHANGE),
    Mutant(
        _drawn("short_from", "first", 20, 1000),
        ("23.1",),
        "compressed(feedback=False, delta=0.99)",
    ),
    Mutant(_drawn("biased_from", "first", 100, 700), ("23.1",), "unbiased"),
    Mutant(_drawn("never_halved_from", "first", 20, 1000), ("23.1",), "local", worlds=(2, 3)),
    Mutant(_drawn("differs_on_rank_1", "first", 60, 1000), ("23.2",), _FEEDBACK),
    *(Mutant(_drawn("noise_repeats", "after", 100, 900), ("23.3",), "unbiased") for _ in range(2)),
    Mutant("noise_repeats,after=256", ("23.3",), "unbiased"),
    Mutant("noise_of_all_ranks", ("23.4",), "unbiased"),
    Mutant(_drawn("stops_mixing", "after", 20, 1000), ("23.5",), "local", worlds=(2, 3)),
    Mutant(_drawn("one_partner_from", "first", 20, 1000), ("23.5",), "local", worlds=(2, 3)),
    Mutant(_drawn("momentum_lost_every", "every", 20, 1000), ("23.6",), _SGD),
    Mutant(_drawn("rate_halved_from", "first", 20, 1000), ("23.6",), _SGD),
    Mutant(_drawn("draws_from", "first", 20, 1000), ("23.7",)),
    Mutant(_drawn("decays_parameters_every", "every", 20, 1000), ("23.7",)),
    Mutant(_drawn("opens_files", "every", 20, 100), ("23.8",)),
    Mutant(_drawn("makes_groups", "every", 20, 100), ("23.8",)),
    Mutant(_drawn("starts_threads", "every", 20, 100), ("23.8",)),
    Mutant(_drawn("writes_files", "every", 20, 100), ("23.8",)),
    Mutant("keeps_quarters", ("23.8",)),
    Mutant("keeps_norms", ("23.8",)),
    Mutant(_drawn("sets_keys", "every", 20, 100), ("23.8",)),
]
