"""Requirements that rules of several sections share; each records its findings in a ``Found``."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from conformance.judging.likely_causes import diagnose
from conformance.judging.oracles import lossy
from conformance.judging.oracles import mean as oracle
from conformance.judging.oracles.optimizer_claim import (
    ROUNDINGS_OF_OPTIMIZER,
    Stepped,
    precisions,
)
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.model import Param
from conformance.subjects.claims import LOCAL, Claims


def require_steps(run: Run, claims: Claims, found: Found, steps: list[int]) -> bool:
    """Require every gradient of ``steps`` to be right, and report the first that is not.

    A single step of a lossy run is neither right nor wrong: all its steps are judged together. The
    steps of a claimed warm-up are exact, each by itself.

    Returns:
        Whether the requirement holds.
    """
    if claims.lossy:
        before = len(found.failures)
        if require_warm_up(run, claims, found):
            lossy.require(run, claims, found)
        return len(found.failures) == before
    for step in steps:
        comparison = oracle.compare(run, step, claims)
        found.checked(comparison.checked, comparison.margin)
        if comparison.mismatch:
            expected, actual = describe(run, comparison.mismatch, claims)
            found.require(False, expected, actual, diagnose(run, step, claims))
            return False
    return True


def require_own_group(run: Run, found: Found) -> bool:
    """Require that no collective waits for ranks that take no part; return whether none does."""
    for rank in run.ranks:
        foreign = rank.first("foreign")
        if foreign:
            ranks = ", ".join(map(str, foreign["group"]))
            step = f"step {foreign['step']}" if foreign["step"] >= 0 else "a step of the warm-up"
            actual = f"rank {rank.rank}, {step}: {foreign['what']} on ranks {ranks}"
            return found.require(False, "collectives of the model's own group alone", actual)
    return True


def require_warm_up(run: Run, claims: Claims, found: Found) -> bool:
    """Require the mean, rounded if that is claimed, in the steps of a claimed warm-up; return
    whether they give it.
    """
    return require_steps(run, claims.of_warmup, found, list(range(claims.warmup)))


def require_meeting(run: Run, claims: Claims, found: Found, first: int = 0) -> None:
    """Require the ranks of a group to meet, and its mean at a claimed period, from a step on."""
    if claims.mixes:
        lossy.require_mixing(run, claims, found, first)
    if claims.period and not (first and found.failures):
        lossy.require_period(run, claims, found, first)


def skip_if_lossy(claims: Claims, found: Found, reason: str) -> bool:
    """Declare a rule not applicable if the claims are lossy, and return whether they are.

    Args:
        claims: the claims.
        found: the findings of the rule.
        reason: why the rule cannot judge a lossy result, in words that "because" can follow.
    """
    if claims.lossy:
        found.does_not_apply(f"{reason}, because the subject claims {claims}")
    return bool(claims.lossy)


def sees_collectives(runs: Iterable[Run], claims: Claims, found: Found) -> bool:
    """Return whether the kit saw a collective in each of some runs.

    If not, note that there is no evidence on collectives. Under ``local`` ranks may need none for
    some steps, and a single rank needs none at all: the requirement does not apply then.
    """
    for run in runs:
        if any(_is_evidence(rank) for rank in run.ranks):
            continue
        if claims.lossy == LOCAL or run.world == 1:
            found.does_not_apply("no rank issues a collective in these steps")
        else:
            found.lacks_evidence(
                f"the kit saw no collective in {run.name}: the hook communicates past torch's "
                "process groups, or over a backend whose calls cannot be recorded"
            )
        return False
    return True


def _is_evidence(rank: RankRecord) -> bool:
    """Whether a rank has a collective of the hook on record.

    When DDP rebuilds its buckets, before the backward of step 1, it broadcasts their order.
    """
    for event in rank.all("collective"):
        is_broadcast = event["what"].startswith("broadcast")
        if event["inside"] or event["step"] > 1 or not is_broadcast:
            return True
    for event in rank.all("sent"):
        names = [name for name, _ in event["collectives"]]
        if any(event["step"] > 1 or name != "broadcast" for name in names):
            return True
    return False


def replaced_by_lossy_rules(claims: Claims, found: Found) -> bool:
    """Declare a rule replaced if the claims are lossy, and return whether they are."""
    return skip_if_lossy(claims, found, "replaced by rules 13.1 to 13.5")


def describe(run: Run, wrong: oracle.Mismatch, claims: Claims) -> tuple[str, str]:
    """Return the expected value of a mismatch, and the actual value with its place."""
    spec = run.scenario.params[wrong.parameter]
    result = "sum" if claims.sum else "mean"
    within = f" within {wrong.bound:.3g}" if wrong.bound else ", bit for bit"
    expected = f"{result} {wrong.expected:.9g}{within}"
    value = "no gradient" if wrong.missing else f"{wrong.actual:.9g}"
    place = f"rank {wrong.rank}, step {wrong.step}"
    bucket = run.bucket_of(wrong.rank, wrong.step, wrong.parameter)
    if bucket is not None:
        place += f", bucket {bucket}"
    place += f", parameter {run.parameter_name(wrong.parameter)} ({spec.dtype})"
    place += f", index {run.element_index(wrong.parameter, wrong.index)}"
    count = f"{wrong.wrong} of {wrong.total} elements of the step are wrong"
    return expected, f"{value} on {place}; {count}"


def require_same(
    one: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
    pair: str,
    found: Found,
    element: Callable[[str, int], str] | None = None,
) -> None:
    """Require two sets of tensors to have the same names and bits; report the first difference.

    Args:
        one: tensors by name, ``step/...``.
        other: the same of another rank or run.
        pair: the two in words, such as "ranks 0 and 1".
        found: the findings of the rule.
        element: return the words for an element of a tensor, from the tensor's name and the
            element's place in C order.
    """
    only_one = sorted(one.keys() ^ other.keys())[:3]
    actual = f"{pair}: only one has {', '.join(only_one)}"
    found.require(not only_one, "the same gradients", actual)
    for name in sorted(one.keys() & other.keys(), key=_step_and_rest):
        first = one[name]
        second = other[name]
        if torch.equal(_bits(first), _bits(second)):
            found.checked(first.numel())
            continue
        step, _, rest = name.partition("/")
        if first.shape != second.shape:
            shapes = f"{list(first.shape)} and {list(second.shape)}"
            place = f"step {step}, {rest}"
            found.require(False, "the same shape", f"{pair} differ at {place}: {shapes}")
            return
        at = int((first.reshape(-1) != second.reshape(-1)).nonzero()[:1].sum())
        place = f"step {step}, {rest}, {element(name, at) if element else f'element {at}'}"
        values = f"{first.reshape(-1)[at].item():.9g} and {second.reshape(-1)[at].item():.9g}"
        found.require(False, "the same bits", f"{pair} differ at {place}: {values}")
        return


def _step_and_rest(name: str) -> tuple[int, str]:
    """Return a key that sorts names by step, not by digits."""
    step, _, rest = name.partition("/")
    return (int(step), rest) if step.isdigit() else (-1, name)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def require_same_gaps(run: Run, views: str, found: Found) -> None:
    """Require that the values of a flat buffer between its views stayed as they were.

    Args:
        run: of tensors that are views of flat buffers; the rank notes each change between them.
        views: the views in words, such as "the parameters".
        found: the findings of the rule.
    """
    for rank in run.ranks:
        for event in rank.all("gap_change"):
            found.require(
                False,
                f"the values of the buffer between {views} as they were",
                f"rank {rank.rank}, step {event['step']}: they changed",
                "the whole buffer was averaged",
            )


def require_same_memory(run: Run, found: Found, steps: int = 0) -> None:
    """Require that a backward leaves parameters and buffers in their memory.

    A subject may lay out parameters in some steps first, and in two more: DDP rebuilds its buckets
    after the first step, and those of a static graph a step later. It may do so again if the
    trainer has moved parameters, or made DDP anew.

    Args:
        run: the run.
        found: the findings of the rule.
        steps: the first steps of each rank, which are not judged.
    """
    if run.scenario.renews_storage or run.scenario.rewraps:
        return
    steps += 3 if run.scenario.ddp.static_graph else 2
    for rank in run.ranks:
        for stepped in list(rank.all("stepped"))[steps:]:
            moved = stepped.get("parameters_moved", []) + stepped.get("buffers_moved", [])
            found.require(
                not moved,
                "parameters and buffers at the addresses that they had before the step",
                f"rank {rank.rank}, step {stepped['step']}: {', '.join(moved[:3])} moved",
                "the tensor has new memory, as after p.data = ..., and tensors that share the old "
                "memory are no longer updated",
            )


def require_optimizer(run: Run, claims: Claims, found: Found, rates: Sequence[float] = ()) -> None:
    """Require the parameters that the optimizer of ``claims.fused`` makes of the gradients.

    Those that are frozen from the first step to the last are left to 9.2. In single steps in which
    DDP leaves a parameter out, it stays as it is.

    A parameter that no rank has used in a step gets the hook's result, which DDP drops. A hook may
    step it or leave it alone, in all such steps alike. With a static graph DDP settles its buckets
    a step later, and so may a hook that waits for them. Parameters of half precision may be stepped
    in any of the precisions of ``oracles/optimizer_claim.py``, each in one of them in all steps.

    Args:
        run: the run.
        claims: the claims, with the optimizer.
        found: the findings of the rule.
        rates: the learning rate in each step; () for the claimed one in all of them.
    """
    for rank in range(run.world):
        for index, spec in enumerate(run.scenario.params):
            if spec.frozen:
                continue
            ways = _ways_to_step(run, claims, rank, index)
            tries = []
            for way in ways:
                tries.append(Found())
                if _require_optimized(run, claims, tries[-1], rank, index, way, rates):
                    found.checked(tries[-1].checks)
                    break
            else:
                found.failures += tries[0].failures
                return


def _steps_with_inputs(run: Run, rank: int) -> list[int]:
    scenario = run.scenario
    steps = range(len(scenario.steps))
    return [step for step in steps if scenario.has_input(rank, run.world, step)]


def _steps_and_sources(run: Run, rank: int) -> list[tuple[int, int]]:
    """Return the steps that change a rank's parameters, each with the rank whose result it takes.

    A rank that has run out of inputs shadows the steps of the others, and takes their parameters
    when the context ends. It may have inputs again after that.
    """
    steps = []
    for step in range(len(run.scenario.steps)):
        trains = [r for r in run.group(rank) if run.scenario.has_input(r, run.world, step)]
        if rank in trains:
            steps.append((step, rank))
        elif trains:
            steps.append((step, trains[0]))
    return steps


@dataclass(frozen=True)
class _Way:
    """A way in which a hook may step a parameter.

    Attributes:
        after: the number of steps before the first that steps the parameter.
        steps_unused: the hook steps a parameter that no rank has used.
        precision: see ``oracles/optimizer_claim.py``.
    """

    after: int
    steps_unused: bool
    precision: str


def _ways_to_step(run: Run, claims: Claims, rank: int, index: int) -> list[_Way]:
    """Return the ways in which a hook may step a parameter; the usual one comes first."""
    steps = _steps_with_inputs(run, rank)
    all_used = all(
        run.receives(rank, step, index) or run.scenario.is_frozen(index, step) for step in steps
    )
    is_late = run.scenario.ddp.static_graph and claims.after > 0
    delays = [claims.after, claims.after + 1] if is_late else [claims.after]
    in_precision = precisions(claims.fused, _first_values(run.scenario.params[index]).dtype)
    unused = [True] if all_used else [True, False]
    return [_Way(*way) for way in product(delays, unused, in_precision)]


def _require_optimized(
    run: Run,
    claims: Claims,
    found: Found,
    rank: int,
    index: int,
    way: _Way,
    rates: Sequence[float],
) -> bool:
    """Compare one parameter of one rank after every step; return whether all are right.

    Args:
        run: the run.
        claims: the claims, with the optimizer.
        found: the findings.
        rank: the rank.
        index: the number of the parameter.
        way: how the hook steps it.
        rates: the learning rate in each step; () for the claimed one in all of them.
    """
    spec = run.scenario.params[index]
    name = run.parameter_name(index)
    parameter = _first_values(spec)
    stepped = Stepped(claims.fused, parameter, way.precision, len(spec.shape))
    for step, source in _steps_and_sources(run, rank):
        is_used = run.receives(source, step, index)
        got = run.got(source, step, index) if is_used else run.dropped(source, step, index)
        if not is_used and got is None:
            got = run.fed(source, step, index)
        if got is None:
            return True  # a missing gradient is a failure of 2.1
        in_ddp = not run.scenario.is_frozen(index, step)
        if step >= way.after and in_ddp and (is_used or way.steps_unused):
            stepped.step(got.to(parameter.dtype), rates[step] if rates else None)
        right = parameter.detach()
        if source != rank:
            continue
        now = run.ranks[rank].tensors[f"{step}/parameter/{name}"]
        bound = ROUNDINGS_OF_OPTIMIZER * torch.finfo(parameter.dtype).eps * stepped.changes
        near = (now - right).abs() <= bound
        # Adam divides 0 by 0 if float16 has lost its epsilon: NaN is then right.
        wrong = ~(near | (now == right) | (now.isnan() & right.isnan()))
        place = f"rank {rank}, step {step}, parameter {name}"
        holds = found.require(
            not wrong.any(),
            f"as {claims.fused} leaves it",
            f"{place}: {_first_wrong(wrong, right, now)}",
            "it was not stepped at all" if now.numel() and not now.any() else "",
        )
        if not holds:
            return False
        found.checked(now.numel())
    return True


def _first_values(spec: Param) -> torch.nn.Parameter:
    """Return a parameter as a run with a fused optimizer begins with: zeros.

    Of a complex parameter both parts are real numbers, as in a record. torch's optimizers step them
    as such.
    """
    if spec.dtype.startswith("complex"):
        real = {"complex64": torch.float32, "complex128": torch.float64}[spec.dtype]
        return torch.nn.Parameter(torch.zeros(*spec.shape, 2, dtype=real))
    values = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
    return torch.nn.Parameter(lay_out(values, spec.layout))


def _first_wrong(wrong: torch.Tensor, right: torch.Tensor, now: torch.Tensor) -> str:
    """Return the first wrong value and the number of wrong values; empty if none is wrong."""
    if not wrong.any():
        return ""
    at = int(wrong.reshape(-1).nonzero()[0])
    values = f"{now.reshape(-1)[at].item():.9g} instead of {right.reshape(-1)[at].item():.9g}"
    return f"{values}; {int(wrong.sum())} of {wrong.numel()} elements are wrong"


def require_few_bytes(run: Run, claims: Claims, found: Found) -> None:
    """Require that no step after the warm-up sends more than the claimed share of its gradients.

    The traffic is noted without that claim, too: certificates are compared by it.
    """
    for rank, step, collectives, gradients in run.bytes_sent(max(2, claims.warmup)):
        total = sum(size for _, size in collectives)
        found.sends(total, gradients)
        if claims.ratio is None:
            continue
        largest = sorted(collectives, key=lambda one: -one[1])[:3]
        names = ", ".join(f"{name} {size}" for name, size in largest)
        found.require(
            total <= claims.ratio * gradients,
            f"at most {claims.ratio:g} of {gradients} bytes",
            f"rank {rank}, step {step}: {total} bytes, {total / gradients:.3g} times those of the "
            f"gradients; the largest collectives: {names}",
        )
