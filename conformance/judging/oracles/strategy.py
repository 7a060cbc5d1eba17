"""TODO: conformance/judging/oracles/strategy.py."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from conformance.judging.verdict import Found
from conformance.records.run import Run, fed
from conformance.scenarios.strategy import NO_DDP, batches, clears, multiple, raises_in, uses

EXPLAINED = 50  # failures of a run whose causes are looked for


NO_GRADIENT = ": there is no gradient"


def _as_before(run: Run, rank: int, step: int, found: Found) -> None:
    """Require that DDP synchronises by itself, as it did before, when the context of a last micro-batch has been left."""
    batch = raises_in(run.scenario, step)
    if batch is None or batch == batches(run.scenario, step) - 1:
        on = _said(run, rank, step)["synchronises"]
        left = f"rank {rank}, step {step}: model.require_backward_grad_sync is {on} when the last context is left"
        found.require(
            on, "it is True, as before", left, "what was set for the context was not put back" + " after an error" * (batch is not None)
        )


def right(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return what the gradient of a parameter is to be after a step, flat in float64: zeros where no rank has used it."""
    total = torch.zeros_like(_fed(run, rank, step, 0, index))
    for at, batch in _parts(run, step):
        total += _mean(run, rank, at, batch, index)
    return total


def _means(run: Run, found: Found) -> None:
    """Require the right gradients after every step that was not cut short."""
    alike: dict[int, list[str]] = {}  # by the place of a failure, the mistakes that make such a value
    for rank, step in _steps(run):
        if raises_in(run.scenario, step) is not None:
            continue
        for index in range(len(run.scenario.params)):
            wanted, got = right(run, rank, step, index), _got(run, rank, step, index)
            where, used = f"rank {rank}, step {step}, p{index}", _is_used(run, rank, step, index)
            if got is None:
                found.require(not used, "the mean", f"{where}{NO_GRADIENT}", _none(run, rank, step, index))
                continue
            bound = 0.0 * wanted if run.scenario.steps[step] == "crafted" else _roundings(run, rank, step, index)
            wrong = (~((got - wanted).abs() <= bound)).nonzero()
            if not len(wrong):
                found.checked(1)
                continue
            at = int(wrong[0])
            expected = f"the sum over micro-batches of the means: {wanted[at].item():.9g}" if used else "no gradient, or zeros"
            actual = f"{where}, index {at}: {got[at].item():.9g} ({len(wrong)} of {len(got)} elements differ)"
            found.require(False, expected, actual)
            if len(alike) < EXPLAINED:
                alike[len(found.failures) - 1] = _causes(run, rank, step, index, got)
    often = Counter(name for names in alike.values() for name in names)
    for place, names in alike.items():
        found.failures[place].cause = max(names, key=often.__getitem__, default="")


def _roundings(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return how far a right result can be from the sum of means.

    With n micro-batches, each value goes through at most n accumulations and n averages; an average over W ranks is W - 1 sums
    and a product with a rounded quotient: W + 2 roundings of half an eps each, relative to what has come together, in each of the
    n. The bound is twice that.
    """
    size, parts = _size(run, rank), list(_parts(run, step))
    together = torch.stack([_fed(run, other, at, b, index).abs() for at, b in parts for other in _ranks(run, rank)]).sum(0) / size
    return together * len(parts) * (size + 2) * torch.finfo(getattr(torch, run.scenario.params[index].dtype)).eps


def _causes(run: Run, rank: int, step: int, index: int, got: torch.Tensor) -> list[str]:
    """Name the known mistakes that make this of these values; of several, the first is the likeliest."""
    size, wanted, own = _size(run, rank), right(run, rank, step, index), _own(run, rank, step, index)
    dtype = run.scenario.params[index].dtype
    over_world = torch.stack([_own(run, other, step, index) for other in range(run.world)]).mean(0)
    if dtype not in ("float32", "float64"):
        return []  # where different mistakes round to the same
    if run.scenario.name == NO_DDP.name:
        return ["it was averaged over ranks, though there is no DDP"] if _alike(got, over_world) else []
    users = sum(_has_used(run, other, step, index) for other in _ranks(run, rank))
    known = {
        **({"averaged over WORLD": over_world, "divided by the size of WORLD": wanted * size / run.world} if run.scenario.groups else {}),
        "averaged over the ranks alone that have used it: the zeros of the others count too": wanted * size / max(users, 1),
        "each rank keeps its own: what has accumulated was not synchronised, a lost sync": own,
        "each rank has its own, divided: it was not summed, or not yet": own / size,
        "the sum, not divided": wanted * size,
        "divided twice": wanted / size,
        **_of_some(run, rank, step, index),
        "the k-th gradients of all ranks were averaged together, whatever parameters they belong to": _mixed(run, rank, step, index),
    }
    names = [name for name, value in known.items() if value is not None and _alike(got, value) and not _alike(wanted, value)]
    return names or ["it went through float32"] * (dtype == "float64" and torch.equal(got, got.float().double()))


def _of_some(run: Run, rank: int, step: int, index: int) -> dict[str, torch.Tensor]:
    """Return by their names the results of mistakes with some of the micro-batches."""
    parts = list(_parts(run, step))
    before, now = [part for part in parts if part[0] < step], [part for part in parts if part[0] == step]
    means, own = ({p: of(run, rank, *p, index) for p in parts} for of in (_mean, _fed))
    total = torch.stack(list(means.values())).sum(0)
    known = {"divided by the number of micro-batches": total / len(now)}
    if before:
        known["gradients that were there before the step are missing"] = total - torch.stack([means[p] for p in before]).sum(0)
    for number in range(1, len(now)):
        for some in itertools.combinations(now, number):
            names = ", ".join(str(batch) for _, batch in some)
            rest = total - torch.stack([means[p] for p in some]).sum(0)
            known[f"micro-batch {names} is missing"] = rest
            known[f"of micro-batch {names} each rank keeps its own"] = rest + torch.stack([own[p] for p in some]).sum(0)
    return known


def _mixed(run: Run, rank: int, step: int, index: int) -> torch.Tensor | None:
    """Return the mean of this gradient and those of other ranks that are as far down their lists of gradients, if shapes allow it."""
    lists = {other: [i for i in range(len(run.scenario.params)) if _has_used(run, other, step, i)] for other in _ranks(run, rank)}
    if index not in lists[rank]:
        return None
    place = lists[rank].index(index)
    if any(place >= len(those) for those in lists.values()):
        return None
    values = [_own(run, other, step, those[place]) for other, those in lists.items()]
    return torch.stack(values).mean(0) if len({len(value) for value in values}) == 1 else None


def _none(run: Run, rank: int, step: int, index: int) -> str:
    """Say why a gradient may be missing."""
    used = _has_used(run, rank, step, index)
    return "it was lost" if used else "this rank has not used the parameter, and was not given the mean of those that have"


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(len(one)) and torch.allclose(one, other, rtol=1e-5, atol=0.0)


def _steps(run: Run) -> Iterator[tuple[int, int]]:
    """Yield (rank, step) of every step on record."""
    for rank in run.ranks:
        for event in rank.all("synchronised"):
            yield rank.rank, event["step"]


def _said(run: Run, rank: int, step: int) -> dict[str, Any]:
    said = run.ranks[rank].first("synchronised", step=step)
    assert said is not None
    return said


def _parts(run: Run, step: int) -> Iterator[tuple[int, int]]:
    """Yield (step, micro-batch) of all that gradients hold after a step."""
    begin = step
    while not clears(run.scenario, begin):
        begin -= 1
    for at in range(begin, step + 1):
        for batch in range(batches(run.scenario, at)):
            yield at, batch


def _ranks(run: Run, rank: int) -> tuple[int, ...]:
    """Return the ranks that gradients of ``rank`` are averaged over: itself, where there is no DDP."""
    return (rank,) if run.scenario.name == NO_DDP.name else run.group(rank)


def _size(run: Run, rank: int) -> int:
    return len(_ranks(run, rank))


def _mean(run: Run, rank: int, step: int, batch: int, index: int) -> torch.Tensor:
    return torch.stack([_fed(run, other, step, batch, index) for other in _ranks(run, rank)]).mean(0)


def _own(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the sum of what a rank has fed of a parameter."""
    return torch.stack([_fed(run, rank, at, batch, index) for at, batch in _parts(run, step)]).sum(0)


def _fed(run: Run, rank: int, step: int, batch: int, index: int) -> torch.Tensor:
    """Return what a micro-batch of a rank adds to a gradient, in float64."""
    scenario, spec, group = run.scenario, run.scenario.params[index], run.group(rank)
    values = fed(scenario.steps[step], spec, len(group), rank, step, index)
    if not uses(scenario, len(group), group.index(rank), step, batch, index):
        return torch.zeros_like(values)
    # In the dtype of the parameter, as on the rank.
    return (values * multiple(len(group), batches(scenario, step), batch)).to(getattr(torch, spec.dtype)).double()


def _has_used(run: Run, rank: int, step: int, index: int) -> bool:
    group = run.group(rank)
    return any(uses(run.scenario, len(group), group.index(rank), at, batch, index) for at, batch in _parts(run, step))


def _is_used(run: Run, rank: int, step: int, index: int) -> bool:
    """Whether any rank has used a parameter since gradients were cleared."""
    return any(_has_used(run, other, step, index) for other in _ranks(run, rank))


def _got(run: Run, rank: int, step: int, index: int) -> torch.Tensor | None:
    got = run.ranks[rank].tensors.get(f"{step}/grad/p{index}")
    return None if got is None else got.reshape(-1).double()
