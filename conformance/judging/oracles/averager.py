"""TODO: conformance/judging/oracles/averager.py."""

from collections.abc import Iterator

import torch

from conformance.judging.verdict import INSTEAD, Found
from conformance.records.run import Run, fed
from conformance.scenarios.gradients import uses
from conformance.subjects.claims import Claims

LIKE = f"it is like a reference: 14.12 {INSTEAD}"


def _as_alike(run: Run, reference: Run, found: Found) -> None:
    """Require that ranks hold the same bits of a parameter where those of the reference do."""
    for first in run.ranks:
        for rank in run.ranks[first.rank + 1 :]:
            for key, right in reference.ranks[first.rank].tensors.items():
                if torch.equal(right, reference.ranks[rank.rank].tensors[key]):
                    alike = torch.equal(first.tensors[key], rank.tensors[key])
                    what = f"ranks {first.rank} and {rank.rank} hold other bits of {key} in {run.name}"
                    found.require(alike, "replicas that agree where those of the reference do", what)


def due(run: Run, rank: int, step: int, claims: Claims) -> tuple[int, ...]:
    """Return the global ranks that ``rank`` is averaged with at ``step``; () where it is with none."""
    group = run.group(rank)
    if said := claims.options.get("periodic"):
        since = step - said["warmup_steps"]
        return group if since >= 0 and since % said["period"] == 0 else ()
    if said := claims.options.get("hierarchical"):
        sizes = [min(size, len(group)) for period, size in said["period_group_size_dict"].items() if step % period == 0]
        size = max(sizes, default=0) if step >= said["warmup_steps"] else 0
        first = group.index(rank) // size * size if size else 0
        return group[first : first + size]
    return ()


def _means(run: Run, claims: Claims, found: Found, must_change: bool = False) -> None:
    """Require the mean at every step that is due, and at which something changed or has to; and no change at the others."""
    if claims.has("like"):
        found.does_not_apply(LIKE)
        return
    due_steps = 0
    for rank, step in _calls(run):
        group = due(run, rank, step, claims)
        due_steps += bool(group)
        if not (must_change or (group and (_changed(run, rank, step) or len(group) == 1))):
            continue
        for index, spec in enumerate(run.scenario.params):
            fed_by = torch.stack([_fed(run, other, step, index) for other in group or (rank,)])
            right, got = fed_by.mean(0), _got(run, rank, step, index)
            exact = run.scenario.steps[step] == "crafted"
            scale = 0.0 if exact else (len(group) + 2) * torch.finfo(getattr(torch, spec.dtype)).eps
            error, bound = (got - right).abs(), scale * fed_by.abs().mean(0)
            wrong = (~(error <= bound)).nonzero()  # not a number is no mean either
            if group and not _has_gradient(run, group, step, index) and torch.equal(got, _fed(run, rank, step, index)):
                continue
            if found.require(not len(wrong), "", ""):
                continue
            at = int(wrong[0])
            found.failures[-1].expected = f"the mean over ranks {list(group)}: {right[at].item():.9g}" if group else "what it was"
            found.failures[
                -1
            ].actual = f"rank {rank}, step {step}, p{index}, index {at}: {got[at].item():.9g} ({len(wrong)} of {len(got)} elements differ)"
            found.failures[-1].cause = _cause(run, rank, got, fed_by, group)
    if not due_steps and not found.failures:
        found.does_not_apply(_never(run))


def _cause(run: Run, rank: int, got: torch.Tensor, fed_by: torch.Tensor, group: tuple[int, ...]) -> str:
    """Name the mistake that makes this of these values, where it is a known one."""
    if not group:
        return "averaged at a step that is not due"
    size, total = len(group), fed_by.sum(0)
    if torch.equal(got, fed_by[group.index(rank)]):
        return "left as it was"
    known = {
        "the sum, not divided": total,
        f"divided by {run.world}, the size of WORLD": total / run.world if run.world > size else total,
        "divided twice": total / size**2,
        f"divided by {size + 1}": total / (size + 1),
    }
    if len(got) > 4 and torch.allclose(got, total / size, rtol=1e-2, atol=0.0):
        return "the mean, rounded more coarsely than the parameter's dtype"
    return next((name for name, value in known.items() if len(got) > 4 and torch.allclose(got, value, rtol=1e-6, atol=0.0)), "")


def _never(run: Run) -> str:
    return f"none of its {len(run.scenario.steps)} steps averages"


def _calls(run: Run) -> Iterator[tuple[int, int]]:
    """Yield (rank, step) of every call on record."""
    for rank in run.ranks:
        for event in rank.all("averaged"):
            yield rank.rank, event["step"]


def _fed(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return what a rank's parameter was set to; what no rank has a gradient for is what the group's first rank is fed."""
    spec, group = run.scenario.params[index], run.group(rank)
    used = run.scenario.variant != "unused" or any(uses(len(group), place, step, index) for place in range(len(group)))
    of = rank if used and not spec.frozen else group[0]
    return fed(run.scenario.steps[step], spec, len(group), of, 0 if spec.frozen else step, index)


def _has_gradient(run: Run, ranks: tuple[int, ...], step: int, index: int) -> bool:
    """Whether any of these ranks has a gradient for a parameter; one that none has may be left out of their average."""
    if run.scenario.params[index].frozen:
        return False
    places = [(run.group(rank), rank) for rank in ranks]
    return run.scenario.variant != "unused" or any(uses(len(group), group.index(rank), step, index) for group, rank in places)


def _got(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    return run.ranks[rank].tensors[f"{step}/parameter/p{index}"].reshape(-1).double()


def _changed(run: Run, rank: int, step: int) -> list[str]:
    """Return the parameters that are no longer what they were set to."""
    indices = range(len(run.scenario.params))
    return [f"p{index}" for index in indices if not torch.equal(_got(run, rank, step, index), _fed(run, rank, step, index))]
