"""Right gradients after a step under a sync strategy, and how far off they may be.

Let x_q(b) be the values that micro-batch b adds to the gradient of a parameter on rank q, zeros if
the micro-batch does not use the parameter. Gradients accumulate over the n micro-batches since they
were last cleared, which may include those of earlier steps. Let W be the number of ranks that DDP
averages over; without DDP it is 1. After the step every one of these ranks holds

    sum_b (1 / W) sum_q x_q(b)

A parameter that no rank has used has no gradient, or zeros. A parameter without elements may have
none either.

A value that is not finite has to be the same: NaN if the sum is NaN, otherwise the same infinity.

Bounds. Crafted values are multiples of W^n, so that all quotients are exact, also if the
accumulated gradient is averaged again in each micro-batch. Let g be the largest power of two that
divides every quotient x_q(b) / W^n, and p the bits of the dtype's significand. If

    sum_b sum_q |x_q(b)| <= 2^p g

the sums are exact as well, whatever is added and divided first: the bound is 0, unless W is 7
(``EXACT_SIZES``). If the left side is beyond the range of the dtype, a right result is divided
first, and the left side is a W-th of it.

With more bits (half precision on five ranks, for example), with 7 ranks, and with random values,
each x_q(b) takes part in at most n accumulations and n averages. An average over W ranks takes
W - 1 additions and a product with a rounded quotient. Together with the accumulation these are at
most W + 2 roundings of half an epsilon in each of the n micro-batches, relative to the magnitude of
everything that was added. The bound is twice as much:

    n (W + 2) eps sum_b sum_q |x_q(b)| / W
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from conformance.judging.oracles.averager_records import same
from conformance.judging.oracles.kept_by_run import MOST_KEPT, KeptByRun
from conformance.judging.oracles.mean import EXACT_SIZES
from conformance.judging.verdict import Failure, Found
from conformance.records.run import Run, fed
from conformance.scenarios.arrival import arrival_order
from conformance.scenarios.averager_training import special_source
from conformance.scenarios.averager_values import Source, values_of
from conformance.scenarios.strategy import NO_DDP
from conformance.scenarios.strategy_dtypes import gradient_spec, has_halves, held_in
from conformance.scenarios.strategy_passes import passes_of
from conformance.scenarios.strategy_schedule import (
    batches,
    clears,
    is_judged,
    multiple_in,
    raises_in,
    uses,
)
from conformance.scenarios.strategy_step_ends import cleared_parts

ALL_USED = "the subject claims all_used; 16.16 judges that claim"  # why a rule does not apply

# Looking for causes takes longer than judging, so that only the first failures of a run have one.
MAX_EXPLAINED = 50
_TRIED = 6  # micro-batches: every subset of so many is tried for a cause
_LARGE = 2**16
_NO_GRADIENT = ": there is no gradient"

Part = tuple[int, int]  # a step, and a micro-batch in it


# All ranks that a gradient is averaged over have the same one.
_kept = KeptByRun[torch.Tensor]()


def right(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the right gradient of a parameter after a step, flat in float64."""
    compute = functools.partial(_right, run, rank, step, index)
    if math.prod(run.scenario.params[index].shape) > MOST_KEPT:
        return compute()
    return _kept.get(run, (averaged_ranks(run, rank), step, index), compute)


def _right(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    total = torch.zeros_like(fed_part(run, rank, (step, 0), index))
    for part in parts(run, step):
        total += _mean(run, rank, part, index)
    return total


def rounding_bound(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return how far a right result of random values may be from the sum of means."""
    all_parts = list(parts(run, step))
    ranks = averaged_ranks(run, rank)
    magnitudes = [fed_part(run, q, part, index).abs() for part in all_parts for q in ranks]
    eps = torch.finfo(_dtype(run, step, index)).eps
    total = torch.stack(magnitudes).sum(0) / len(ranks)
    return total * len(all_parts) * (len(ranks) + 2) * eps


def require_means(run: Run, found: Found) -> None:
    """Require the right gradients after every step, except steps with an injected exception.

    Gradients that were set aside keep their values.
    """
    _require_set_aside(run, found)
    # By the place of a failure in the list: the known mistakes that give its value.
    causes: dict[int, list[str]] = {}
    for rank, step in steps(run):
        if not is_judged(run.scenario, step):
            continue
        for index in range(len(run.scenario.params)):
            got = result(run, rank, step, index)
            if got is None:
                _require_unused(run, found, rank, step, index)
                continue
            is_right = _require_mean(run, found, rank, step, index, got)
            if not is_right and len(causes) < MAX_EXPLAINED:
                place = len(found.failures) - 1
                causes[place] = _causes(run, rank, step, index, got)
    # Several mistakes can give one value: the likeliest explains the most failures of the run.
    frequency = Counter(name for names in causes.values() for name in names)
    for place, names in causes.items():
        found.failures[place].cause = max(names, key=frequency.__getitem__, default="")


def _require_set_aside(run: Run, found: Found) -> None:
    """Require that no step has changed the gradients of earlier steps, which were set aside."""
    for rank in run.ranks:
        for event in rank.all("aside_changed"):
            names = ", ".join(f"p{index}" for index in event["parameters"])
            found.require(
                False,
                "gradients of earlier steps, which the trainer has set aside, with the same bits",
                f"rank {rank.rank}, step {event['step']}: those of {names} have changed",
                "a tensor that the strategy keeps was given as a gradient, and is written again",
            )


def require_ddp_restored(run: Run, rank: int, step: int, found: Found) -> None:
    """Require that DDP synchronises by itself again after the context of a last micro-batch."""
    raising = raises_in(run.scenario, step)
    if raising is not None and raising != batches(run.scenario, step) - 1:
        return
    synchronises = record(run, rank, step)["synchronises"]
    cause = "a setting of the context was not restored"
    if raising is not None or (step and raises_in(run.scenario, step - 1) is not None):
        cause += " after an error"
    found.require(
        synchronises,
        "True, as before",
        f"rank {rank}, step {step}: model.require_backward_grad_sync is {synchronises} after the "
        "last context",
        cause,
    )


def require_hooks_of_trainer(run: Run, found: Found) -> None:
    """Require the hooks of the trainer to run once for each micro-batch."""
    for rank, step in steps(run):
        calls = record(run, rank, step)["hook_calls"]
        wanted = batches(run.scenario, step)
        wrong = [index for index, count in enumerate(calls) if count != wanted]
        found.require(
            not wrong,
            f"{wanted} calls of a hook by register_post_accumulate_grad_hook, one in each backward",
            f"rank {rank}, step {step}: {calls[wrong[0]] if wrong else wanted} for "
            f"{', '.join(f'p{index}' for index in wrong)}",
            "hooks of others are removed with the strategy's own" if wrong else "",
        )
        found.checked(len(calls))


def is_missing_gradient(failure: Failure) -> bool:
    """Return whether a failure is a missing gradient and not a wrong one."""
    return failure.actual.endswith(_NO_GRADIENT)


def steps(run: Run) -> Iterator[tuple[int, int]]:
    """Yield (rank, step) of every recorded step."""
    for rank in run.ranks:
        for event in rank.all("synchronised"):
            yield rank.rank, event["step"]


def record(run: Run, rank: int, step: int) -> dict[str, Any]:
    """Return the values that a rank recorded after a step, beside its gradients."""
    return run.ranks[rank].one("synchronised", step=step)


def result(run: Run, rank: int, step: int, index: int) -> torch.Tensor | None:
    """Return a recorded gradient, flat in float64, or None if there was none."""
    tensor = run.ranks[rank].tensors.get(f"{step}/grad/p{index}")
    return None if tensor is None else tensor.reshape(-1).double()


def parts(run: Run, step: int) -> Iterator[Part]:
    """Yield the micro-batches that have accumulated after a step."""
    first = step
    while not clears(run.scenario, first):
        first -= 1
    for earlier in range(first, step + 1):
        for batch in range(batches(run.scenario, earlier)):
            yield earlier, batch


def averaged_ranks(run: Run, rank: int) -> tuple[int, ...]:
    """Return the ranks that the gradients of ``rank`` are averaged over; without DDP, itself."""
    return (rank,) if run.scenario.name == NO_DDP.name else run.group(rank)


def fed_part(run: Run, rank: int, part: Part, index: int) -> torch.Tensor:
    """Return the values that a micro-batch of a rank adds to a gradient, in float64."""
    scenario = run.scenario
    group = run.group(rank)
    size = len(group)
    step, batch = part
    spec = gradient_spec(scenario, step, index)
    kind = scenario.steps[step]
    source = group[special_source(scenario, step, group.index(rank), size)]
    if kind == "limit" and spec.dtype == "float16":
        values = values_of(Source(kind, source, step), spec, size, index).reshape(-1).double()
    else:
        values = fed("crafted" if kind == "limit" else kind, spec, size, source, step, index)
    if not uses(scenario, size, group.index(rank), step, batch, index, group[0]):
        return torch.zeros_like(values)
    values = values * multiple_in(scenario, size, step, batch)
    dtype = getattr(torch, spec.dtype)
    # The rank multiplies in the dtype of the gradient, which may round.
    values = values.to(dtype.to_real()).double()
    return values * passes_of(scenario, step, batch).times(index)


def _require_unused(run: Run, found: Found, rank: int, step: int, index: int) -> None:
    """Require that a parameter without a gradient was used by no rank."""
    cause = "this rank has not used the parameter, and was not given the mean of the others"
    if _has_used(run, rank, step, index):
        cause = "it was lost"
    ranks = averaged_ranks(run, rank)
    is_used = any(_has_used(run, other, step, index) for other in ranks)
    actual = f"rank {rank}, step {step}, p{index}{_NO_GRADIENT}"
    # A gradient without elements has no effect.
    has_elements = math.prod(run.scenario.params[index].shape) > 0
    found.require(not (is_used and has_elements), "the mean", actual, cause)


def _require_mean(
    run: Run, found: Found, rank: int, step: int, index: int, got: torch.Tensor
) -> bool:
    """Require one right gradient; return whether it is right."""
    wanted = right(run, rank, step, index)
    is_right = same(got, wanted)
    if not is_right.all():
        bound = largest_error(run, rank, step, index)
        is_right |= ((got - wanted).abs() <= bound) & wanted.isfinite()
    wrong = (~is_right).nonzero()
    if not len(wrong):
        found.checked(1)
        return True
    at = int(wrong[0])
    expected = "no gradient, or zeros"
    if any(_has_used(run, other, step, index) for other in averaged_ranks(run, rank)):
        expected = f"the sum over micro-batches of the means: {wanted[at].item():.9g}"
    return found.require(
        False,
        expected,
        f"rank {rank}, step {step}, p{index}, index {at}: {got[at].item():.9g} "
        f"({len(wrong)} of {len(got)} elements differ)",
    )


def largest_error(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return how far each element of a right result may be from the sum of means."""
    bound = rounding_bound(run, rank, step, index)
    if run.scenario.steps[step] == "normal" or len(averaged_ranks(run, rank)) not in EXACT_SIZES:
        return bound
    return torch.where(_sums_are_exact(run, rank, step, index), torch.zeros_like(bound), bound)


def _sums_are_exact(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return at which elements the sums of crafted values are exact, whatever their order."""
    ranks = averaged_ranks(run, rank)
    values, quotients = [], []
    for part in parts(run, step):
        of_ranks = torch.stack([fed_part(run, q, part, index) for q in ranks])
        values.append(of_ranks.abs().sum(0))
        quotients.append(of_ranks / len(ranks) ** batches(run.scenario, part[0]))
    limits = torch.finfo(_dtype(run, step, index))
    largest = torch.stack(values).sum(0)
    largest = torch.where(largest > limits.max, largest / len(ranks), largest)
    return largest <= 2 / limits.eps * _common_powers_of_two(torch.cat(quotients))


def _common_powers_of_two(values: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two that divides all values of a column.

    It is infinite if all of them are zeros, and for values that are not finite.
    """
    significands, exponents = values.frexp()
    integers = (significands.nan_to_num(0.0, 0.0, 0.0) * 2.0**53).long()
    powers = (integers & -integers).double() * 2.0**-53
    powers = torch.where(integers == 0, math.inf, torch.ldexp(powers, exponents))
    return powers.amin(0)


def _causes(run: Run, rank: int, step: int, index: int, got: torch.Tensor) -> list[str]:
    """Return the known mistakes that give these values, the likeliest first."""
    dtype = gradient_spec(run.scenario, step, index).dtype
    # Different mistakes round to one value in narrower dtypes, unless values are crafted for few
    # micro-batches.
    if dtype not in ("float32", "float64") and not has_halves(run.scenario):
        return []
    held = held_in(run.scenario, index)
    if held and torch.equal(got, got.to(getattr(torch, held.dtype)).double()):
        return [f"it went through {held.dtype}, the dtype of the parameter"]
    # The other mistakes take long to try on large parameters.
    if len(got) > _LARGE:
        return []
    wanted = right(run, rank, step, index)
    own_of_all = [_own(run, other, step, index) for other in range(run.world)]
    over_world = torch.stack(own_of_all).mean(0)
    if run.scenario.name == NO_DDP.name:
        cause = "it was averaged over ranks, although there is no DDP"
        return [cause] if _are_close(got, over_world) else []
    known: dict[str, torch.Tensor | None] = {}
    if run.scenario.groups:
        size = len(averaged_ranks(run, rank))
        known["averaged over WORLD"] = over_world
        known["divided by the size of WORLD"] = wanted * size / run.world
    known.update(_mistakes_with_ranks(run, rank, step, index))
    known.update(_mistakes_with_parts(run, rank, step, index))
    name = "the k-th gradients of all ranks were averaged together, whatever their parameters are"
    known[name] = _mixed_up(run, rank, step, index)
    names = [
        name
        for name, value in known.items()
        if value is not None and _are_close(got, value) and not _are_close(wanted, value)
    ]
    if not names and dtype == "float64" and torch.equal(got, got.float().double()):
        return ["it went through float32"]
    return names


def _mistakes_with_ranks(run: Run, rank: int, step: int, index: int) -> dict[str, torch.Tensor]:
    """Return the results of mistakes in the sum over ranks and in the divisor."""
    wanted = right(run, rank, step, index)
    own = _own(run, rank, step, index)
    ranks = averaged_ranks(run, rank)
    size = len(ranks)
    users = sum(_has_used(run, other, step, index) for other in ranks)
    return {
        "averaged over only the ranks that used the parameter: divide by the number of all ranks": (
            wanted * size / max(users, 1)
        ),
        "each rank keeps its own accumulated gradient: it was not averaged over the ranks": own,
        "each rank has its own, divided: it was not summed, or not yet": own / size,
        "the sum, not divided": wanted * size,
        "divided twice": wanted / size,
    }


def _mistakes_with_parts(run: Run, rank: int, step: int, index: int) -> dict[str, torch.Tensor]:
    """Return the results of mistakes that leave out, or do not average, some micro-batches."""
    all_parts = list(parts(run, step))
    earlier = [part for part in all_parts if part[0] < step]
    now = [part for part in all_parts if part[0] == step]
    means = {part: _mean(run, rank, part, index) for part in all_parts}
    own = {part: fed_part(run, rank, part, index) for part in all_parts}
    total = torch.stack(list(means.values())).sum(0)
    known = {"divided by the number of micro-batches": total / len(now)}
    last = now[-1]
    times = passes_of(run.scenario, *last).times(index)
    if times > 1:
        name = "the last backward pass of the step was not averaged: each rank keeps its own"
        known[name] = total + (own[last] - means[last]) / times
    if earlier:
        of_earlier = torch.stack([means[part] for part in earlier]).sum(0)
        known["gradients from before the step are missing"] = total - of_earlier
    elif before := cleared_parts(run.scenario, step):
        of_before = torch.stack([_mean(run, rank, part, index) for part in before]).sum(0)
        known["the gradients of the step before count again, although they were cleared"] = (
            total + of_before
        )
    # Subsets of many micro-batches are too many to try.
    most = len(now) - 1 if len(now) <= _TRIED else 1
    for number in range(1, most + 1):
        for some in itertools.combinations(now, number):
            names = ", ".join(str(batch) for _, batch in some)
            rest = total - torch.stack([means[part] for part in some]).sum(0)
            own_of_some = torch.stack([own[part] for part in some]).sum(0)
            known[f"micro-batch {names} is missing"] = rest
            name = f"each rank keeps its own gradient of micro-batch {names}: it was not averaged"
            known[name] = rest + own_of_some
    return known


def _mixed_up(run: Run, rank: int, step: int, index: int) -> torch.Tensor | None:
    """Return the mean of this gradient, the k-th of its rank, and the k-th of the other ranks.

    They are in the order in which they arrive if the scenario has one, and else in the model's.
    Return None if a rank has no k-th gradient, or one of another size.
    """
    indices = range(len(run.scenario.params))
    used = {
        other: [
            i
            for i in arrival_order(run.scenario, step, other) or indices
            if _has_used(run, other, step, i)
        ]
        for other in averaged_ranks(run, rank)
    }
    if index not in used[rank]:
        return None
    place = used[rank].index(index)
    if any(place >= len(of_rank) for of_rank in used.values()):
        return None
    values = [_own(run, other, step, of_rank[place]) for other, of_rank in used.items()]
    if len({len(value) for value in values}) != 1:
        return None
    return torch.stack(values).mean(0)


def _dtype(run: Run, step: int, index: int) -> torch.dtype:
    """Return the dtype of a gradient in a step."""
    name = gradient_spec(run.scenario, step, index).dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(len(one)) and torch.allclose(one, other, rtol=1e-5, atol=0.0)


def _mean(run: Run, rank: int, part: Part, index: int) -> torch.Tensor:
    values = [fed_part(run, other, part, index) for other in averaged_ranks(run, rank)]
    return torch.stack(values).mean(0)


def _own(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the sum of a rank's own values since gradients were cleared."""
    return torch.stack([fed_part(run, rank, part, index) for part in parts(run, step)]).sum(0)


def _has_used(run: Run, rank: int, step: int, index: int) -> bool:
    """Return whether a rank has used a parameter since gradients were cleared."""
    group = run.group(rank)
    place = group.index(rank)
    return any(
        uses(run.scenario, len(group), place, earlier, batch, index, group[0])
        for earlier, batch in parts(run, step)
    )
