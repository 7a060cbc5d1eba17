"""Judge the errors of random results over a long run; ``long_runs.py`` has the derivations."""

import itertools
import math
from collections.abc import Iterator

import torch

from conformance.judging.oracles.long_runs import LongRecord
from conformance.judging.oracles.lossy.noise import NEARLY
from conformance.judging.verdict import Found
from conformance.subjects.claims import Claims

# See "Unbiased" in ``oracles/lossy.py``.
SIGMAS = 6.0
PEAKS = 12.0
MANY = 256
FINE = 1 / 4
SMALL = 1 / 20
ROUNDINGS = 16

LAG_SIGMAS = 7.0
_CUT_OFF = ": a range from earlier steps, which cuts off the gradients of a step in which they grow"
FEWEST_PAIRS = 100  # rounds that a lag must have between them
# See "Small parameters" in ``long_runs.py``.
BLOCKS = 8  # of a run
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "last")
EXPECTED = 36  # elements that a silent parameter should have sent
SELDOM = 2  # times less often than before, compared with other parameters
ON_EACH_SIDE = 8  # errors of a block


def require_unbiased(record: LongRecord, found: Found) -> bool:
    """Require the errors of all rounds after the warm-up to cancel out on every rank, and those of
    the rounds in which gradients grow."""
    growth = record.growth[record.warm_up :]
    means = [table[record.places[record.warm_up :]] / growth.unsqueeze(1) for table in record.means]
    whole_means = torch.cat(means, dim=1)
    grows = growth > 1
    for rank in _different_ranks(record):
        errors = _errors(record, rank)
        whole = torch.cat(errors, dim=1)
        if not bool(whole.isfinite().all()):
            return found.require(
                False, "finite values for finite gradients", f"rank {rank}: some are not"
            )
        is_fine = float(whole.norm()) <= FINE * float(whole_means.norm())
        typical = float(whole_means.norm()) / math.sqrt(whole_means.numel())
        slack = ROUNDINGS * record.unit() * typical
        place = f"rank {rank}, all parameters"
        if not _require_cancelling(record, whole, whole_means, place, slack, found):
            return False
        if not _require_growing(record, whole, whole_means, grows, rank, slack, found):
            return False
        allowed = slack + SMALL * typical
        for index in record.indices:
            numel = errors[index].size(1)
            if numel < MANY and not is_fine:
                if not _require_small(
                    record, rank, index, errors[index], means[index], allowed, found
                ):
                    return False
                continue
            place = f"rank {rank}, parameter {record.run.parameter_name(index)}"
            of_numel = allowed if numel < MANY else slack
            if not _require_cancelling(record, errors[index], means[index], place, of_numel, found):
                return False
    return True


def _require_small(
    record: LongRecord,
    rank: int,
    index: int,
    errors: torch.Tensor,
    means: torch.Tensor,
    slack: float,
    found: Found,
) -> bool:
    """Require a parameter of few elements not to be zero for good, and to be right on average for
    as many blocks at the end of the run as have errors of both signs.
    """
    name = f"parameter {record.run.parameter_name(index)}, of {errors.size(1)} elements"
    borders = [len(errors) * number // BLOCKS for number in range(BLOCKS + 1)]
    spans = [slice(*pair) for pair in itertools.pairwise(borders)]
    expected = _expected_results(record, rank, index, spans)
    sent = _sent(record, rank, index).any(1)
    for number, span in enumerate(spans):
        count = expected[number]
        silent = not sent[span.start :].any()
        first = record.feed.first_steps[record.warm_up + span.start]
        if not found.require(
            not silent or count < EXPECTED,
            f"results other than zero for each parameter: about {count:.0f} from step {first} on "
            "for this one, if it is sent half as often as before",
            f"rank {rank}, {name}: all results are zero from that step on",
            "a number of elements that is rounded to 0, or a parameter that is no longer sent"
            * silent,
        ):
            return False
    along = (errors * means).sum(1)
    begin = len(errors)
    for span in reversed(spans):
        positive = int((along[span] > 0).sum())
        negative = int((along[span] < 0).sum())
        if min(positive, negative) < ON_EACH_SIDE:
            break
        begin = span.start
    place = f"rank {rank}, {name}"
    return begin == len(errors) or _require_cancelling(
        record, errors[begin:], means[begin:], place, slack, found
    )


def _expected_results(record: LongRecord, rank: int, index: int, spans: list[slice]) -> list[float]:
    """Return for each block how many elements of a parameter come at least from its beginning on,
    if they come half as often as before it, compared with those of other parameters; 0 if too few
    have come.
    """
    own = _sent(record, rank, index)
    counts = torch.stack([own[span].sum() for span in spans]).double()
    others = [_sent(record, rank, other).double() for other in record.indices if other != index]
    rates = [torch.stack([sent[span].mean() for sent in others]).median() for span in spans]
    of_others = torch.stack(rates) * own.size(1)
    of_others *= torch.tensor([span.stop - span.start for span in spans])
    expected = []
    for number in range(len(spans)):
        before = float(counts[:number].sum())
        share = before / max(float(of_others[:number].sum()), 1e-300)
        expected.append(share * float(of_others[number:].sum()) / SELDOM * (before >= EXPECTED))
    return expected


def _sent(record: LongRecord, rank: int, index: int) -> torch.Tensor:
    """Return which results after the warm-up are other than zero, ``[rounds, numel]``."""
    rows = record.results(rank, index)
    assert rows is not None
    return (rows != 0)[record.warm_up :]


def _require_growing(
    record: LongRecord,
    errors: torch.Tensor,
    means: torch.Tensor,
    grows: torch.Tensor,
    rank: int,
    slack: float,
    found: Found,
) -> bool:
    """Require the errors of the rounds whose gradients have grown to cancel out."""
    place = f"rank {rank}, steps whose gradients are 8 times as large as those before, or more"
    return not grows.any() or _require_cancelling(
        record, errors[grows], means[grows], place, slack, found, _CUT_OFF
    )


def _different_ranks(record: LongRecord) -> list[int]:
    """Return the ranks whose results differ from those of rank 0, and rank 0."""
    different = {rank for index in record.indices for rank, _ in record.different_ranks(index)}
    return sorted(different)


def _errors(record: LongRecord, rank: int) -> list[torch.Tensor]:
    """Return a rank's errors after the warm-up, ``[rounds, numel]`` by parameter, in units of the
    factor by which the gradients of each round have grown."""
    errors = []
    for index in record.indices:
        rows = record.results(rank, index)
        assert rows is not None
        right = record.means[index][record.places] * record.counts.unsqueeze(1)
        errors.append(((rows - right) / record.growth.unsqueeze(1))[record.warm_up :])
    return errors


def _require_cancelling(
    record: LongRecord,
    errors: torch.Tensor,
    means: torch.Tensor,
    place: str,
    slack: float,
    found: Found,
    hint: str = "",
) -> bool:
    """Require errors ``[rounds, n]`` to cancel out along six directions of each round."""
    draws = len(errors) * record.run.scenario.long_run.steps_per_round
    for directions in _directions(means):
        along = (errors * directions).sum(1)
        total = abs(float(along.sum()))
        spread = math.sqrt(float(along.square().sum()))
        peak = float(along.abs().max())
        bound = SIGMAS * spread + PEAKS * peak + draws * slack * math.sqrt(errors.size(1))
        holds = found.require(
            total <= bound,
            f"errors that cancel out: a sum of at most {bound:.3g} over {draws} draws, along one "
            "direction",
            f"{place}: a sum of {total:.3g}",
            _bias(along, means, directions) + hint if total > bound else "",
        )
        if not holds:
            return False
        found.checked(len(errors), total / bound if bound else None)
    return True


def _bias(along: torch.Tensor, means: torch.Tensor, directions: torch.Tensor) -> str:
    """Return the bias of the two halves of a run, in words."""
    lengths = (means * directions).sum(1).abs().sum()
    if not float(lengths):
        return ""
    halves = along.tensor_split(2)
    whole = float(along.sum() / lengths)
    parts = [float(half.sum() / (lengths / 2)) for half in halves]
    return (
        f"on average results are off by {whole:.3g} of the mean along a direction: by "
        f"{parts[0]:.3g} in the first half of the run and {parts[1]:.3g} in the second"
    )


def _directions(means: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield directions of length 1 for each round: the mean, its signs, ones, three hashes."""
    numbers = torch.arange(1, means.size(1) + 1)
    hashes = [((numbers * odd) % 127 < 63).double() * 2 - 1 for odd in (37, 59, 83)]
    rows = [means, means.sign(), torch.ones_like(means)]
    rows += [row.expand_as(means) for row in hashes]
    for row in rows:
        yield row / row.norm(dim=1, keepdim=True).clamp(min=1e-300)


def require_independent(record: LongRecord, found: Found) -> bool:
    """Require errors that are not correlated with those of any number of rounds before."""
    norms = (record.norms[record.places] / record.growth)[record.warm_up :]
    typical = float(norms.square().mean())
    rounding = typical * (ROUNDINGS * record.unit()) ** 2
    for rank in _different_ranks(record):
        errors = torch.cat(_errors(record, rank), dim=1)
        products = errors @ errors.t()
        lags = range(1, len(errors) - FEWEST_PAIRS)
        shares = []
        for lag in lags:
            along = products.diagonal(lag)
            spread = math.sqrt(float(along.square().sum()))
            bound = LAG_SIGMAS * spread + PEAKS * float(along.abs().max()) + len(along) * rounding
            shares.append(abs(float(along.sum())) / bound if bound else 0.0)
        worst = max(shares)
        found.checked(len(shares), worst)
        if worst > 1:
            # Errors that repeat after k steps repeat after 2k and 3k steps about as much: of these
            # lags the first one is named.
            place = next(place for place, share in enumerate(shares) if share > 0.9 * worst)
            lag = lags[place]
            alike = float(products.diagonal(lag).mean() / products.diagonal().mean())
            steps = f"{lag} steps" if lag > 1 else "1 step"
            cause = f"the random numbers repeat after {steps}: a seed that comes again"
            if alike < 0:
                cause = f"the random numbers of a step follow from those of {steps} before"
            return found.require(
                False,
                "errors that have nothing to do with those of earlier steps",
                f"rank {rank}: errors {steps} apart are {'alike' if alike > 0 else 'opposite'}: on "
                f"average their product is {alike:.2g} of their square, {shares[place]:.3g} times "
                "the limit",
                cause,
            )
    return True


def require_lasting_noise(record: LongRecord, claims: Claims, found: Found) -> bool:
    """Require noise of the same size in each eighth of the run.

    Args:
        record: the run.
        claims: the claims, with the deviation of a rank's noise.
        found: the findings of the rule.
    """
    counts = record.counts[record.warm_up :]
    scale = record.growth[record.warm_up :] / counts.sqrt()
    for rank in _different_ranks(record):
        errors = torch.cat(_errors(record, rank), dim=1) * scale.unsqueeze(1)
        sizes = [float(part.square().mean()) ** 0.5 for part in errors.tensor_split(BLOCKS)]
        least = NEARLY * min(claims.least_noise(record.run.world), sizes[0])
        for part, size in enumerate(sizes):
            holds = found.require(
                size >= least,
                f"noise with a root mean square of {least:.3g} or more in each eighth of the run",
                f"rank {rank}: {sizes[0]:.3g} in the first eighth, {size:.3g} in the "
                f"{_ORDINALS[part]}",
                "noise that fades" if size < least else "",
            )
            if not holds:
                return False
            found.checked(len(counts), least / size if size else None)
    return True


def require_own_noise(record: LongRecord, found: Found) -> None:
    """Require ranks to draw different numbers, which shows in the variance of the mean."""
    size = record.run.world
    errors = torch.cat(_errors(record, 0), dim=1)
    kinds = [record.feed.keys[place][0] for place in record.feed.places[record.warm_up :]]
    squares = {}
    for kind in ("same", "same_one"):
        selected = torch.tensor([one == kind for one in kinds])
        if not selected.any():
            return
        squares[kind] = float(errors[selected].square().sum(1).mean())
    if not squares["same_one"]:
        return
    ratio = squares["same"] / squares["same_one"]
    found.require(
        ratio <= size**1.5,
        f"errors with gradients on all {size} ranks that have at most {size**1.5:.3g} times the "
        f"variance of errors with gradients on rank 0 alone; independent draws give {size} times",
        f"{ratio:.3g} times that variance",
        "ranks draw the same numbers, or have the same error in every draw",
    )
