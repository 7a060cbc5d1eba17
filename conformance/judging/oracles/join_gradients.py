"""The gradients that a joinable computes while some ranks have joined.

Let x_q be the gradient that autograd computes on rank q in a step, T the ranks that
train in the step, and W the number of ranks of the group. A rank that has joined has no gradient:
its shadow adds zeros. The right gradient on the ranks of T is therefore

    sum_{q in T} x_q / D

with D = W, or D = |T| under divide_by_initial_world_size=False. The kit cannot know the meaning of
the gradients of any joinable. The first context shows it, in which all ranks train: if they are the
means or the sums of the x_q there, within the bound, they have to be in the other contexts. Sums
have D = 1 everywhere. A joinable whose join_hook does not name the argument has one D of its own,
W or |T|, in all steps of all contexts.

Bound. The sum of n = |T| values has n - 1 roundings in any order, n + 1 with the zeros of shadows
and the division, and one more if each rank multiplies by a rounded reciprocal; and m - 1 if a rank
computes its gradient in m backwards. Each rounding is at most eps / 2 of a partial sum, and these
are at most sum |x_q| / D. So the error of an element is below (W + m + 2) eps sum |x_q| / D, where
half of it covers products of roundings. An underflow adds less than one smallest subnormal for each
rounding. ``join_clipping.py`` has gradients that are clipped.

"""

import re
from collections.abc import Iterable, Iterator

import torch

from conformance.judging.oracles.join import Member, members, members_of
from conformance.judging.oracles.join_clipping import (
    Clipping,
    Factor,
    Gradient,
    common_factor,
)
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.join_draws import divides_by_all

NO_GRADIENTS = "it leaves no gradients in parameters that autograd trains"
NO_PARAMETERS_FOUND = "the kit finds no parameters in its attributes, or in objects that these hold"
OTHER_GRADIENTS = "after even inputs its gradients are neither means nor sums over ranks"
_OF_STEP = re.compile(r"\d+/\d+/(?:grad|local)/p\d+")

Place = tuple[Member, int, int]
"""A rank in a context, a step, and the number of a parameter."""


def require_gradients_of_trainers(
    run: Run,
    found: Found,
    presumed: bool = False,
    even_contexts: tuple[int, ...] = (0,),
    clipping: Clipping | None = None,
) -> None:
    """Require gradients that hold nothing of ranks that have joined, with the right divisor.

    Args:
        run: the run.
        found: receives the findings.
        presumed: at smaller sizes the gradients are means or sums: here they have to be, too.
        even_contexts: have even inputs, on different groups; gradients that are means or sums in
            one of them have to be so in all contexts.
        clipping: receives steps with clipped gradients, if there are other parts of the run.
    """
    if not have_shapes(run, found):
        return
    of_run = Clipping() if clipping is None else clipping
    places = {
        member.context: places_of(run, members_of(run, member.context)) for member in members(run)
    }
    if not places[0]:
        found.does_not_apply(NO_GRADIENTS if _have_parameters(run) else NO_PARAMETERS_FOUND)
        return
    for member, at, index in places[0]:
        got = _grad(member, at, index)
        is_finite = bool(_local_sum(run, member, at, index)[1].isfinite().all())
        if got is not None and is_finite and not got.isfinite().all():
            place = f"{member}, step {at}, gradient of parameter {index}"
            found.require(False, "finite values", f"{place}: a value that is not finite")
            return
    even = [way for context in even_contexts for way in ways(run, places[context])]
    if not even and not presumed:
        found.does_not_apply(OTHER_GRADIENTS)
        return
    if not even and not _are_clipped(run, places[0], of_run):
        member, at, index = places[0][0]
        found.require(
            False,
            f"after even inputs the mean or the sum of the gradients of ranks {list(member.group)}",
            f"{member}, step {at}, parameter {index}: neither",
            _cause_of_divisor(run, places[0][0]),
        )
        return
    own: set[bool] = set()
    # One even context alone shows the meaning, and needs no judgement.
    begin = 0 if len(even_contexts) > 1 else 1
    is_mean = even[0] if even else True
    for context in sorted(places)[begin:]:
        for fed_together in _by_step(places[context]):
            trial = Found()
            for fed in fed_together:
                _require_gradient(run, fed, trial, is_mean, own)
            found.checked(trial.checks)
            factor = _factor(run, fed_together, is_mean, own) if trial.failures else None
            all_train = _all_train(fed_together[0])
            # Some even context has none: it shows the meaning of gradients.
            of_run.steps[all_train] += context not in even_contexts
            if factor is None:
                found.failures += trial.failures
            else:
                of_run.note(factor, trial.failures, all_train)
    if clipping is None:
        of_run.settle(found)


def _have_parameters(run: Run) -> bool:
    return any(
        event["parameters"] for member in members(run) for event in member.events("gradients")
    )


def have_shapes(run: Run, found: Found) -> bool:
    """Require floating-point gradients of one shape on all ranks and in all steps of a context.

    Return whether they are; other gradients cannot be compared.
    """
    gradients = [
        (rank.rank, name, tensor)
        for rank in run.ranks
        for name, tensor in rank.tensors.items()
        if _OF_STEP.fullmatch(name)
    ]
    # Gradients of autograd come first: they decide the shape.
    gradients.sort(key=lambda gradient: "/local/" not in gradient[1])
    shapes: dict[tuple[str, str], list[int]] = {}
    for rank, name, tensor in gradients:
        context, at, _, parameter = name.split("/")
        got = list(tensor.shape)
        shape = shapes.setdefault((context, parameter), got)
        if got != shape or not (tensor.is_floating_point() or tensor.is_complex()):
            number = parameter.removeprefix("p")
            found.require(
                False,
                f"gradients of parameter {number} of shape {shape} and of a floating-point dtype",
                f"rank {rank}, context {context}, step {at}: shape {got}, {tensor.dtype}",
                "a parameter or its gradient was replaced",
            )
            return False
    return True


def ways(run: Run, places: list[Place]) -> list[bool]:
    """Return True if gradients after even inputs are means, and False if they are sums."""
    size = len(places[0][0].group) if places else 0
    return [
        is_mean
        for is_mean, divisor in ((True, size), (False, 1))
        if places and all(fits(run, place, divisor) for place in places)
    ]


def places_of(run: Run, some: Iterable[Member]) -> list[Place]:
    """Return the places of the gradients of some members that autograd has computed on a rank."""
    return list(_places_of(run, some))


def _places_of(run: Run, some: Iterable[Member]) -> Iterator[Place]:
    for member in some:
        for event in member.events("gradients"):
            for index in range(event["parameters"]):
                place = member, event["at"], index
                if _grad(*place) is not None and _local_sum(run, *place)[0]:
                    yield place


def _tensor(member: Member, rank: int, at: int, name: str, run: Run) -> torch.Tensor | None:
    return run.ranks[rank].tensors.get(f"{member.context}/{at}/{name}")


def _grad(member: Member, at: int, index: int) -> torch.Tensor | None:
    return member.rank.tensors.get(f"{member.context}/{at}/grad/p{index}")


def _local_sum(
    run: Run, member: Member, at: int, index: int
) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Return whether any rank computed a gradient, the sum over ranks, and that of magnitudes."""
    got = _grad(member, at, index)
    assert got is not None
    total = torch.zeros_like(got, dtype=torch.float64)
    magnitude = torch.zeros_like(total)
    is_known = False
    for rank in member.training(at):
        local = _tensor(member, rank, at, f"local/p{index}", run)
        if local is not None:
            is_known = True
            total += local.double()
            magnitude += local.double().abs()
    return is_known, total, magnitude


def _bound(run: Run, place: Place, magnitude: torch.Tensor, divisor: int) -> torch.Tensor:
    member, at, _ = place
    got = _grad(*place)
    assert got is not None
    calls = [
        event["calls"]
        for rank in run.ranks
        for event in rank.all("gradients", step=member.context, at=at)
    ]
    roundings = len(member.group) + max(calls) + 2
    info = torch.finfo(got.dtype)
    return roundings * (info.eps * magnitude / divisor + info.tiny * info.eps)


def fits(run: Run, place: Place, divisor: int) -> bool:
    """Return whether a gradient is the sum over the ranks that train, divided by a number."""
    got = _grad(*place)
    assert got is not None
    _, total, magnitude = _local_sum(run, *place)
    error = (got.double() - total / divisor).abs()
    return bool((error <= _bound(run, place, magnitude, divisor)).all())


def _require_gradient(run: Run, place: Place, found: Found, is_mean: bool, own: set[bool]) -> None:
    """Require a gradient of an uneven context.

    Args:
        own: for a joinable with a divisor of its own, whether that is the number of all ranks;
            receives the divisor of the first step that shows it.
    """
    member, at, index = place
    training = len(member.training(at))
    size = len(member.group)
    allowed = _divisors(run, place, is_mean, own)
    fitting = {way for way, divisor in allowed.items() if fits(run, place, divisor)}
    if len(fitting) == 1 and training < size:
        own |= fitting
    divisors = " or ".join(map(str, sorted(set(allowed.values()))))
    found.require(
        bool(fitting),
        f"the sum of the gradients of ranks {member.training(at)}, divided by {divisors}",
        f"{member}, step {at}, parameter {index}: the gradient has other values",
        _cause(run, place),
    )


def _divisors(run: Run, place: Place, is_mean: bool, own: set[bool]) -> dict[bool, int]:
    """Return the divisors that are right, by whether they are the number of all ranks."""
    member, at, _ = place
    training = len(member.training(at))
    size = len(member.group)
    by_all = divides_by_all(run.scenario, member.context)
    if not is_mean:
        return {True: 1}
    if not _knows_divisor(member):
        return {way: size if way else training for way in own or (True, False)}
    return {by_all: size if by_all else training}


def _by_step(places: list[Place]) -> list[list[Place]]:
    """Return the places of each step of a context."""
    steps: dict[int, list[Place]] = {}
    for place in places:
        steps.setdefault(place[1], []).append(place)
    return list(steps.values())


def _all_train(place: Place) -> bool:
    member, at, _ = place
    return len(member.training(at)) == len(member.group)


def _factor(run: Run, places: list[Place], is_mean: bool, own: set[bool]) -> Factor | None:
    """Return the factor below 1 by which all gradients of a step have been clipped, if any."""
    for divisor in sorted(set(_divisors(run, places[0], is_mean, own).values())):
        ranks: dict[int, list[Gradient]] = {}
        for place in places:
            got = _grad(*place)
            assert got is not None
            _, total, magnitude = _local_sum(run, *place)
            bound = _bound(run, place, magnitude, divisor)
            ranks.setdefault(place[0].rank.rank, []).append((got, total / divisor, bound))
        factor = common_factor(list(ranks.values()), divisor)
        if factor is not None:
            return factor
    return None


def _are_clipped(run: Run, places: list[Place], clipping: Clipping) -> bool:
    """Whether an even context has clipped means as its gradients."""
    for step in _by_step(places):
        if all(fits(run, place, len(place[0].group)) for place in step):
            continue
        factor = _factor(run, step, True, {True})
        if factor is None:
            return False
        clipping.note(factor, [], all_train=True)
    return clipping.is_clipping


def _cause(run: Run, place: Place) -> str:
    """Return the mistake that gives this gradient, if it is a known one."""
    member, at, index = place
    got = _grad(*place)
    assert got is not None
    _, total, _ = _local_sum(run, *place)
    size = len(member.group)
    training = member.training(at)
    mistakes = {
        f"divided by {size}, the number of all ranks": (total, size),
        f"divided by {len(training)}, the number of training ranks": (total, len(training)),
        "the sum, not divided": (total, 1),
    }
    joined = [rank for rank in member.group if rank not in training]
    lengths = dict(zip(member.group, member.inputs, strict=True))
    for name, said in (("local", "its last gradient"), ("grad", "the last mean gradient")):
        stale = total.clone()
        for rank in joined:
            last = _tensor(member, rank, lengths[rank] - 1, f"{name}/p{index}", run)
            if last is not None:
                stale += last.double()
        for divisor in (size, len(training), 1):
            mistakes.setdefault(
                f"a rank that has joined goes on adding {said} (/ {divisor})", (stale, divisor)
            )
    for name, (right, divisor) in mistakes.items():
        if torch.allclose(got.double(), right / divisor, rtol=1e-5, atol=0.0):
            return name
    return (
        "no known mistake: look at the divisor, at clipping or scaling, and at the main hook, "
        "which has to contribute zeros"
    )


def _cause_of_divisor(run: Run, place: Place) -> str:
    """Return by which number of ranks the sum was divided, if it was by one of them."""
    got = _grad(*place)
    assert got is not None
    _, total, _ = _local_sum(run, *place)
    for divisor in range(2, len(place[0].group)):
        if torch.allclose(got.double(), total / divisor, rtol=1e-5, atol=0.0):
            return f"divided by {divisor}, with {len(place[0].group)} ranks"
    return ""


def _knows_divisor(member: Member) -> bool:
    return any(event["divides"] for event in member.events("state_of_joinable"))


def has_own_gradients(run: Run) -> bool:
    """Whether ranks have other gradients of a parameter after a step of the first context."""
    first: dict[tuple[int, int], torch.Tensor] = {}
    for member, at, index in places_of(run, members_of(run, 0)):
        grad = _grad(member, at, index)
        assert grad is not None
        if not torch.equal(grad, first.setdefault((at, index), grad)):
            return True
    return False
