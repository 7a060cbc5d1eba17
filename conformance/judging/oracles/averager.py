"""Right parameters after a call of an averager, and how far off they may be.

Before each step s the kit sets the parameters of every rank r to values x_r(s) of its own. Let G be
the process group of r. The claims determine the ranks that r is averaged with at step s:

    periodic(period=p, warmup_steps=w)
        all of G if s >= w and p divides s - w, and otherwise none
    hierarchical(period_group_size_dict={p_1: n_1, ...}, warmup_steps=w)
        if s >= w, with n the largest min(n_i, |G|) whose p_i divides s: the block of n neighbours
        of G that holds r, places k n to (k + 1) n - 1; otherwise none

After the call a parameter of r holds the mean over these W ranks, sum_q x_q(s) / W. If r is
averaged with no rank, it holds x_r(s) as before.

A parameter without a gradient on any of these ranks may be left out of the average. Its values are
those of the first rank of G on every rank, so that both ways give the same mean. The same holds for
frozen parameters.

Bounds. Crafted values are exact in every order of additions, and for a quotient as well as for a
product with a rounded 1 / W: the bound is 0. With random values the sum takes W - 1 additions and
the division at most two operations, so that W + 1 roundings of half an epsilon each, relative to
sum_q |x_q| / W, can add up. The bound is (W + 2) eps sum_q |x_q| / W, more than twice as much.

With the claim like(...) the right values are those of the reference, which runs on the same inputs.
An averager with an outer momentum of 0.9 carries the roundings of its last 10 or so steps: 30 steps
leave some 10 * 30 roundings of 2**-24, which is less than ``REFERENCE_TOLERANCE``.
"""

from collections.abc import Iterator

import torch

from conformance.judging.verdict import INSTEAD, Found
from conformance.records.run import Run, fed
from conformance.scenarios.gradients import uses
from conformance.subjects.claims import Claims

JUDGED_AS_REFERENCE = f"it claims to be like a reference: 14.12 {INSTEAD}"
# The error that is allowed beside a reference, relative to the largest parameter on the rank.
REFERENCE_TOLERANCE = 2.0**-10
# Narrow tensors give known mistakes and right results the same values by chance.
_FEW_ELEMENTS = 4


def due(run: Run, rank: int, step: int, claims: Claims) -> tuple[int, ...]:
    """Return the global ranks that ``rank`` is averaged with at ``step``, or () if none are."""
    group = run.group(rank)
    if periodic := claims.options.get("periodic"):
        since_warmup = step - periodic["warmup_steps"]
        is_due = since_warmup >= 0 and since_warmup % periodic["period"] == 0
        return group if is_due else ()
    if hierarchical := claims.options.get("hierarchical"):
        if step < hierarchical["warmup_steps"]:
            return ()
        sizes = hierarchical["period_group_size_dict"].items()
        due_sizes = [min(size, len(group)) for period, size in sizes if step % period == 0]
        if not due_sizes:
            return ()
        size = max(due_sizes)
        first = group.index(rank) // size * size
        return group[first : first + size]
    return ()


def require_means(run: Run, claims: Claims, found: Found, must_change: bool = False) -> None:
    """Require the mean of every parameter after every call that averages.

    Without ``must_change`` calls at which the schedule was missed are left to 14.2: calls that
    should average and changed nothing, and calls that should change nothing.
    """
    if claims.has("like"):
        found.does_not_apply(JUDGED_AS_REFERENCE)
        return
    averages = False
    for rank, step in calls(run):
        group = due(run, rank, step, claims)
        averages |= bool(group)
        has_averaged = bool(group) and (len(group) == 1 or bool(changed(run, rank, step)))
        if must_change or has_averaged:
            for index in range(len(run.scenario.params)):
                _require_mean(run, found, rank, step, index, group)
    if not averages and not found.failures:
        found.does_not_apply(never_averages(run))


def require_same_agreement(run: Run, reference: Run, found: Found) -> None:
    """Require that two ranks hold the same bits of a parameter whenever the reference's do."""
    for first in run.ranks:
        for other in run.ranks[first.rank + 1 :]:
            for key, right in reference.ranks[first.rank].tensors.items():
                if not torch.equal(right, reference.ranks[other.rank].tensors[key]):
                    continue
                found.require(
                    torch.equal(first.tensors[key], other.tensors[key]),
                    "replicas that agree whenever those of the reference agree",
                    f"ranks {first.rank} and {other.rank} differ in {key} of {run.name}",
                )


def calls(run: Run) -> Iterator[tuple[int, int]]:
    """Yield (rank, step) of every recorded call of the averager."""
    for rank in run.ranks:
        for event in rank.all("averaged"):
            yield rank.rank, event["step"]


def result(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return a parameter after the call, flat in float64."""
    return run.ranks[rank].tensors[f"{step}/parameter/p{index}"].reshape(-1).double()


def changed(run: Run, rank: int, step: int) -> list[str]:
    """Return the names of the parameters that the call has changed."""
    return [
        f"p{index}"
        for index in range(len(run.scenario.params))
        if not torch.equal(result(run, rank, step, index), _fed(run, rank, step, index))
    ]


def never_averages(run: Run) -> str:
    """Return the reason why rules on averages do not apply to a schedule without any."""
    return f"none of its {len(run.scenario.steps)} steps averages"


def _require_mean(
    run: Run, found: Found, rank: int, step: int, index: int, group: tuple[int, ...]
) -> None:
    fed_by = torch.stack([_fed(run, other, step, index) for other in group or (rank,)])
    mean = fed_by.mean(0)
    got = result(run, rank, step, index)
    left_out = torch.equal(got, _fed(run, rank, step, index))
    if group and left_out and not _has_gradient(run, group, step, index):
        return
    # NaN compares false with everything, so that it is wrong as well.
    wrong = (~((got - mean).abs() <= _bound(run, step, index, fed_by, group))).nonzero()
    if not len(wrong):
        found.checked(1)
        return
    at = int(wrong[0])
    expected = "the parameter as it was"
    if group:
        expected = f"the mean over ranks {list(group)}: {mean[at].item():.9g}"
    found.require(
        False,
        expected,
        f"rank {rank}, step {step}, p{index}, index {at}: {got[at].item():.9g} "
        f"({len(wrong)} of {len(got)} elements differ)",
        _cause(run, rank, got, fed_by, group),
    )


def _bound(
    run: Run, step: int, index: int, fed_by: torch.Tensor, group: tuple[int, ...]
) -> torch.Tensor:
    magnitude = fed_by.abs().mean(0)
    if run.scenario.steps[step] == "crafted":
        return 0.0 * magnitude
    eps = torch.finfo(getattr(torch, run.scenario.params[index].dtype)).eps
    return (len(group) + 2) * eps * magnitude


def _cause(
    run: Run, rank: int, got: torch.Tensor, fed_by: torch.Tensor, group: tuple[int, ...]
) -> str:
    """Return the known mistake that gives these values, or an empty text if none does."""
    if not group:
        return "averaged at a step that does not average"
    size = len(group)
    total = fed_by.sum(0)
    if torch.equal(got, fed_by[group.index(rank)]):
        return "left as it was"
    if len(got) <= _FEW_ELEMENTS:
        return ""
    if torch.allclose(got, total / size, rtol=1e-2, atol=0.0):
        return "the mean, rounded more coarsely than the parameter's dtype"
    known = {"the sum, not divided": total}
    if run.world > size:
        known[f"divided by {run.world}, the size of WORLD"] = total / run.world
    known["divided twice"] = total / size**2
    known[f"divided by {size + 1}"] = total / (size + 1)
    for name, value in known.items():
        if torch.allclose(got, value, rtol=1e-6, atol=0.0):
            return name
    return ""


def _fed(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the values that a parameter was set to before the call, flat in float64."""
    spec = run.scenario.params[index]
    group = run.group(rank)
    size = len(group)
    is_used = run.scenario.variant != "unused" or any(
        uses(size, place, step, index) for place in range(size)
    )
    # A parameter that may be left out of the average has the same values on all ranks.
    source = rank if is_used and not spec.frozen else group[0]
    values_of_step = 0 if spec.frozen else step
    return fed(run.scenario.steps[step], spec, size, source, values_of_step, index)


def _has_gradient(run: Run, ranks: tuple[int, ...], step: int, index: int) -> bool:
    """Return whether any of these ranks has a gradient for a parameter."""
    if run.scenario.params[index].frozen:
        return False
    if run.scenario.variant != "unused":
        return True
    groups = {rank: run.group(rank) for rank in ranks}
    return any(uses(len(group), group.index(rank), step, index) for rank, group in groups.items())
