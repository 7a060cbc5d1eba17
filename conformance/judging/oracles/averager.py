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
frozen parameters, and for integers, which cannot require grad.

Bounds. Crafted values are exact in every order of additions, and for a quotient as well as for a
product with a rounded 1 / W, unless W is 7 (``EXACT_SIZES``). With 7 ranks, and with random values,
the sum takes W - 1 additions and the division at most two operations, so that W + 1 roundings of
half an epsilon each, relative to sum_q |x_q| / W, can add up. The bound is
(W + 2) eps sum_q |x_q| / W, more than twice as much.

A running mean in float64, m <- m ((k - 1) / k) + x_k / k for k = 2 to W, rounds whatever the values
are, and may stand beside a mean of zero. Its k-th step has at most three roundings of half an
epsilon on the way of m and of x_k, relative to sum_(q <= k) |x_q| / k, and the later steps shorten
its error to k / W. So a step adds at most 3/2 eps sum_q |x_q| / W, and all of them less than
2 W eps sum_q |x_q| / W, with the epsilon of float64: the bound of crafted values.

A value that is not finite has to be the same: NaN if the mean is NaN, otherwise the same infinity.

With the claim like(...) the right values are those of the reference: ``averager_like``. With
``world_only`` G is WORLD, whatever group the kit has made.
"""

import torch

from conformance.judging.oracles.averager_like import EVALUATED, require_like
from conformance.judging.oracles.averager_records import calls, fed_to, group_at, result, same
from conformance.judging.oracles.mean import EXACT_SIZES
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.averager_loops import NEAR_KIND, OVERFLOWS, is_of_subclass
from conformance.scenarios.averager_training import CHANGING, IDLE, is_given, turn
from conformance.scenarios.averager_values import has_gradient, is_of_integers
from conformance.scenarios.averaging_schedule import QUIET
from conformance.scenarios.moved_parameters import specs_at
from conformance.subjects.claims import Claims

# Narrow tensors give known mistakes and right results the same values by chance.
_FEW_ELEMENTS = 4
# The causes of parameters that are left as they were, by the variant of the scenario and by the
# kind of the step.
_LEFT = {
    OVERFLOWS.variant: "left as it was: a gradient of some rank is not finite, or overflows if it "
    "is squared; parameters are finite, and averaged as always",
    IDLE.variant: "left as it was: calls in which all parameters are frozen, or none are given, "
    "were not counted",
    CHANGING.variant: "left as it was: the model has changed since earlier averages, and each is "
    "of the parameters that are passed",
}
_LEFT_AT = {
    NEAR_KIND: "left as it was: values are close to those of other ranks, or of the average "
    "before, or small"
}
SHIFTED = "the schedule is shifted, or a step was not counted or counted twice"


def due(run: Run, rank: int, step: int, claims: Claims) -> tuple[int, ...]:
    """Return the global ranks that ``rank`` is averaged with at ``step``, or () if none are."""
    group = tuple(range(run.world)) if claims.has("world_only") else group_at(run, rank, step)
    # An averager counts its own calls.
    step = turn(run.scenario, step)[1]
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


def require_right(
    run: Run, claims: Claims, found: Found, must_change: bool = False, evaluated: bool = False
) -> None:
    """Require right parameters after every recorded call.

    They are those of the reference under ``like``, and otherwise means. Without ``must_change``
    calls at which the schedule was missed are left to 14.2: calls that should average and changed
    nothing, and calls that should change nothing. ``evaluated`` includes the averages to evaluate
    with, if the reference keeps any.
    """
    if claims.has("like"):
        require_like(run, claims, found, EVALUATED if evaluated else ("parameter",))
        return
    averages = 0
    for rank, step in calls(run):
        group = due(run, rank, step, claims)
        averages += bool(group)
        has_averaged = bool(group) and (len(group) == 1 or bool(changed(run, rank, step)))
        if must_change or has_averaged:
            for index in range(len(run.scenario.params)):
                _require_mean(run, found, rank, step, index, group)
    if must_change:
        require_quiet(run, claims, found)
    if not averages and not found.failures:
        found.lacks_evidence(never_averages(run))


def require_dtypes(run: Run, found: Found) -> None:
    """Require that each parameter still has its dtype after every recorded call."""
    for rank, step in calls(run):
        for index, spec in enumerate(specs_at(run.scenario, step)):
            got = str(run.ranks[rank].tensors[f"{step}/parameter/p{index}"].dtype)
            found.require(
                got == f"torch.{spec.dtype}",
                f"p{index} of {spec.dtype}",
                f"rank {rank}, step {step}: p{index} is of {got.removeprefix('torch.')}",
            )


def require_same_gradients(run: Run, found: Found) -> None:
    """Require that the gradients keep their bits in every recorded call."""
    for rank, step in calls(run):
        event = run.ranks[rank].first("averaged", step=step) or {}
        names = ", ".join(f"p{index}" for index in event.get("grads_changed", ["?"]))
        actual = f"rank {rank}, step {step}: grads of {names} changed"
        found.require(not names, "the same grads as before", actual)
        names = ", ".join(f"p{index}" for index in event.get("grads_moved", ["?"]))
        found.require(
            not names,
            "grads in the memory that they had before",
            f"rank {rank}, step {step}: grads of {names} have other memory",
            "p.grad is another tensor: views of DDP's buckets, or of a flat buffer, and the "
            "optimizer's hold the old one; write into it",
        )


def require_parameters_left(run: Run, found: Found) -> None:
    """Require that no parameter changes while the averager's state is saved or loaded."""
    for rank in run.ranks:
        for event in rank.all("changed_by_state"):
            names = ", ".join(f"p{index}" for index in event["parameters"])
            found.require(
                False,
                f"the same parameters after {event['call']} as before: the trainer saves and loads "
                "the model",
                f"rank {rank.rank}: {names} changed",
                "values of the state, such as those at the begin of a round, are written into the "
                "model; or state_dict() makes an average",
            )


def require_same_outside(run: Run, found: Found) -> None:
    """Require that a rank outside of the group keeps its parameters, or gets an error."""
    for rank in run.ranks:
        for event in rank.all("outside"):
            names = ", ".join(f"p{index}" for index in event["changed"])
            found.require(
                not names,
                "parameters as they were on a rank outside of the group",
                f"rank {rank.rank}: {names} changed",
                "there get_world_size() is -1, and a collective does nothing",
            )


def require_quiet(run: Run, claims: Claims, found: Found) -> None:
    """Require that no parameter changes in a quiet step without an average."""
    if claims.has("like"):
        _require_same_quiet_changes(run, found)
        return
    quiet = run.steps(QUIET)
    if not quiet:
        return
    for rank in run.ranks:
        found.checked(1)
        for event in rank.all("quiet_change"):
            if not due(run, rank.rank, event["step"], claims):
                names = ", ".join(f"p{index}" for index in event["parameters"])
                actual = f"rank {rank.rank}, step {event['step']}: {names} changed"
                found.require(False, "parameters as they were", actual, SHIFTED)


def _require_same_quiet_changes(run: Run, found: Found) -> None:
    assert run.reference is not None
    for rank, right in zip(run.ranks, run.reference.ranks, strict=True):
        expected = [event["step"] for event in right.all("quiet_change")]
        got = [event["step"] for event in rank.all("quiet_change")]
        actual = f"rank {rank.rank}: steps {got[:5]} changed them"
        found.require(got == expected, f"changes in the steps {expected[:5]}", actual, SHIFTED)


def changed(run: Run, rank: int, step: int) -> list[str]:
    """Return the names of the parameters that the call has changed."""
    return [
        f"p{index}"
        for index in range(len(run.scenario.params))
        if not same(result(run, rank, step, index), fed_to(run, rank, step, index)).all()
    ]


def never_averages(run: Run) -> str:
    """Return why a schedule without any average gives no evidence on averages."""
    count = len(run.scenario.steps)
    return f"none of its {count} steps averages: certify a shorter period or warm-up"


def _require_mean(
    run: Run, found: Found, rank: int, step: int, index: int, group: tuple[int, ...]
) -> None:
    given = _is_given(run, rank, step, index)
    if not given:
        group = ()
    fed_by = torch.stack([fed_to(run, other, step, index) for other in group or (rank,)])
    mean = fed_by.mean(0)
    got = result(run, rank, step, index)
    left_out = same(got, fed_to(run, rank, step, index)).all()
    if group and left_out and not _has_gradient(run, group, step, index):
        return
    is_close = (got - mean).abs() <= _bound(run, step, index, fed_by, group)
    wrong = (~(same(got, mean) | (is_close & mean.isfinite()))).nonzero()
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
        _cause(run, rank, got, fed_by, group, index, step)
        if given
        else "a parameter that is not given, or no longer, is averaged",
    )


def _bound(
    run: Run, step: int, index: int, fed_by: torch.Tensor, group: tuple[int, ...]
) -> torch.Tensor:
    magnitude = fed_by.abs().mean(0)
    if is_of_integers(run.scenario.params[index]):
        return torch.zeros_like(magnitude)
    if not group:
        return torch.zeros_like(magnitude)
    if run.scenario.steps[step] != "normal" and len(group) in EXACT_SIZES:
        return 2 * len(group) * torch.finfo(torch.float64).eps * magnitude
    eps = torch.finfo(getattr(torch, specs_at(run.scenario, step)[index].dtype)).eps
    return (len(group) + 2) * eps * magnitude


def _cause(
    run: Run,
    rank: int,
    got: torch.Tensor,
    fed_by: torch.Tensor,
    group: tuple[int, ...],
    index: int,
    step: int,
) -> str:
    """Return the known mistake that gives these values, or an empty text if none does."""
    if not group:
        return "averaged at a step that does not average"
    if is_of_integers(run.scenario.params[index]):
        return "integers are averaged: their sum overflows, or is rounded in float32"
    size = len(group)
    total = fed_by.sum(0)
    if torch.equal(got, fed_by[group.index(rank)]):
        return _cause_of_left(run, rank, index, step)
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


def _cause_of_left(run: Run, rank: int, index: int, step: int) -> str:
    """Return the likely cause of a parameter that is left as it was although an average is due."""
    if is_of_subclass(run.scenario, index) and not _leaves_others(run, rank, step):
        return "left as it was: it is of a subclass of torch.nn.Parameter"
    by_kind = _LEFT_AT.get(run.scenario.steps[step], "left as it was")
    return _LEFT.get(run.scenario.variant, by_kind)


def _leaves_others(run: Run, rank: int, step: int) -> bool:
    """Return whether a trained parameter of torch's own class is left as it was, too."""
    names = changed(run, rank, step)
    return any(
        f"p{index}" not in names
        for index, spec in enumerate(run.scenario.params)
        if not spec.frozen and not is_of_subclass(run.scenario, index)
    )


def _is_given(run: Run, rank: int, step: int, index: int) -> bool:
    """Return whether the averager has the parameter."""
    made = run.ranks[rank].first("averagers_made") or {}
    return bool(made.get("takes_params")) or is_given(run.scenario, step, index)


def _has_gradient(run: Run, ranks: tuple[int, ...], step: int, index: int) -> bool:
    """Return whether any of these ranks has a gradient for a parameter."""
    groups = {rank: group_at(run, rank, step) for rank in ranks}
    return any(
        has_gradient(run.scenario, len(group), group.index(rank), step, index)
        for rank, group in groups.items()
    )
