"""Every step of a long run is judged: thresholds on steps, leaks and biases are found."""

import math
import random
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch

from conformance.judging.oracles import long_run_weights
from conformance.judging.oracles.long_runs import LongRecord
from conformance.judging.rule import Rule
from conformance.judging.verdict import Found
from conformance.rules import section_23_long_runs as section_23
from conformance.scenarios.learning_rates import learning_rates
from conformance.scenarios.long_runs import ENDURANCE
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims
from tests.cases import in_turns
from tests.made_long_runs import Simulated, long_run
from tests.made_runs import read_failures

pytestmark = pytest.mark.ranks  # ranks are simulated, over thousands of steps

FEEDBACK = "compressed(delta=0.25)"
CHANGE = "compressed(feedback=ef21, delta=0.25)"


def judged(rule: Rule, claims: str, hook: Simulated, **options: Any) -> Found:
    run, parsed = long_run(claims, hook, **options)
    found = Found()
    rule.check(run, parsed, found)
    assert found.checks or found.not_applicable
    return found


def mean(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
    return gradients.mean(0).expand_as(gradients)


def largest(part: torch.Tensor) -> torch.Tensor:
    """Keep a quarter of the elements of each rank."""
    count = math.ceil(part.size(1) / 4)
    places = part.abs().topk(count, dim=1).indices
    return torch.zeros_like(part).scatter_(1, places, part.gather(1, places))


def signs(part: torch.Tensor) -> torch.Tensor:
    return part.sign() * part.abs().mean(1, keepdim=True)


class Feedback:
    """Compression with feedback; ``left`` returns the part of the residual that is kept."""

    def __init__(
        self,
        compress: Callable[[torch.Tensor], torch.Tensor] = largest,
        left: Callable[[int], float] = lambda step: 1.0,
        factor: float = 1.0,
    ) -> None:
        self.residuals: dict[int, torch.Tensor] = {}
        self.compress = compress
        self.left = left
        self.factor = factor

    def __call__(self, step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        total = gradients + self.residuals.get(index, 0)
        sent = self.compress(total)
        self.residuals[index] = (total - sent) * self.left(step)
        return mean(step, index, sent) * self.factor


class Estimates:
    """EF21; the estimates shrink by ``left`` in every step."""

    def __init__(self, left: float = 1.0, until: float = math.inf) -> None:
        self.estimates: dict[int, torch.Tensor] = {}
        self.left = left
        self.until = until

    def __call__(self, step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        own = self.estimates.get(index, torch.zeros_like(gradients)) * self.left
        new = own + largest(gradients - own)
        if step < self.until:
            self.estimates[index] = new
        return mean(step, index, new)


class RandomRounding:
    """Random rounding to multiples of a quarter of the mean magnitude, on each rank."""

    def __init__(
        self,
        seed: Callable[[int, int, int], Any] = lambda step, index, rank: (step, index, rank),
        factor: Callable[[int], float] = lambda step: 1.0,
    ) -> None:
        self.seed = seed
        self.factor = factor

    def __call__(self, step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        rows = []
        for rank, row in enumerate(gradients):
            unit = row.abs().mean() / 4
            draws = torch.rand(row.shape, generator=self.generator(step, index, rank))
            rounded = (row / unit + draws).floor() * unit if float(unit) else row
            rows.append(rounded * self.factor(step))
        return mean(step, index, torch.stack(rows))

    def generator(self, step: int, index: int, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed(hash(self.seed(step, index, rank)) % 2**31)


class DelayedRange(RandomRounding):
    """Random rounding within the largest magnitude of some steps before."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.largest: dict[int, list[float]] = {}

    def __call__(self, step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        before = self.largest.setdefault(index, [])
        size = float(gradients.abs().max())
        limit = max(before[-self.window :], default=size)
        before.append(size)
        return super().__call__(step, index, gradients.clamp(-limit, limit))


class Alternating(Feedback):
    """Compression with feedback that sends in one step of some, the first bucket at other times."""

    def __init__(self, every: int) -> None:
        super().__init__(lambda part: part)
        self.every = every

    def __call__(self, step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        self.compress = torch.zeros_like if (step + index // 3) % self.every else torch.clone
        return super().__call__(step, index, gradients)


class HoldsBackUpdates(Feedback):
    """Compression with feedback whose residuals are converted as the learning rate falls."""

    def __init__(self, claims: str, seed: int, power: float) -> None:
        super().__init__()
        scenario = adapt_scenario(ENDURANCE, parse_claims(claims), seed=seed)
        self.rates = learning_rates(scenario)
        self.power = power

    def __call__(self, step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        if step:
            quotient = self.rates[step - 1] / self.rates[step]
            self.residuals[index] *= quotient**self.power
        return super().__call__(step, index, gradients)


@pytest.mark.parametrize("window", [1, 16, 60])
def test_a_range_of_earlier_steps_is_found(window: int) -> None:
    found = judged(section_23.every_step, "unbiased", DelayedRange(window), seed=window)
    assert len(found.failures) == 1


@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("claims", ["compressed", FEEDBACK])
def test_steps_that_send_nothing_are_found(claims: str, every: int) -> None:
    found = judged(section_23.every_step, claims, Alternating(every), seed=every)
    assert "a message of" in found.failures[0].expected


@pytest.mark.parametrize("power", [0, 1, -1, 2])
@pytest.mark.parametrize("seed", in_turns(range(3), 3))
def test_gradients_or_updates_are_held_back(seed: int, power: float) -> None:
    hook = HoldsBackUpdates(FEEDBACK, seed, power)
    found = judged(section_23.every_step, FEEDBACK, hook, seed=seed)
    assert bool(found.failures) == (power not in (0, 1))


@pytest.mark.parametrize("seed", in_turns(range(5), 5))
@pytest.mark.parametrize("claims", ["exact", "rounded(float16)"])
def test_the_mean_is_right(claims: str, seed: int) -> None:
    def rounded(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        return (
            mean(step, index, gradients.half()).float()
            if "float16" in claims
            else mean(step, index, gradients)
        )

    assert not judged(section_23.every_step, claims, rounded, seed=seed).failures


def test_a_threshold_on_steps_is_found_wherever_it_lies() -> None:
    draws = random.Random(1)
    for seed in range(5):
        run, claims = long_run("exact", mean, seed=seed)
        right = [dict(rank.tensors) for rank in run.ranks]
        for _ in range(10):
            first = draws.randint(1, 1000)
            for rank, tensors in zip(run.ranks, right, strict=True):
                for name, rows in tensors.items():
                    rank.tensors[name] = rows.clone()
                    rank.tensors[name][first + 1 :] *= 1.0001
            found = Found()
            section_23.every_step.check(run, claims, found)
            assert found.failures, first
            # Zeros are right, whatever they are multiplied by.
            assert (
                f"step {first + 1}," in found.failures[0].actual
                or "zero" in (run.scenario.steps[first + 1])
            )


def test_one_wrong_step_is_named() -> None:
    def hook(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        return gradients if step == 731 else mean(step, index, gradients)

    (failure,) = judged(section_23.every_step, "exact", hook).failures
    assert "rank 0, step 731" in failure.actual
    assert "this step alone" in failure.cause


def test_a_period_is_named() -> None:
    def hook(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        return gradients if step % 97 == 50 else mean(step, index, gradients)

    (failure,) = judged(section_23.every_step, "exact", hook).failures
    assert "every 97th from step 50 on" in failure.cause


@pytest.mark.parametrize("seed", in_turns(range(3), 3))
@pytest.mark.parametrize("compress", [largest, signs])
def test_feedback_is_right(compress: Callable[[torch.Tensor], torch.Tensor], seed: int) -> None:
    found = judged(section_23.every_step, FEEDBACK, Feedback(compress), seed=seed)
    assert not found.failures, found.failures


@pytest.mark.parametrize(
    "hook",
    [
        Feedback(left=lambda step: 0.99),
        Feedback(left=lambda step: 0.0 if step % 100 == 99 else 1.0),
        Feedback(left=lambda step: 0.0 if step == 1013 else 1.0),
        Feedback(left=lambda step: 1.0 if step < 900 else 0.9),
        Feedback(left=lambda step: 0.999),
        Feedback(signs, left=lambda step: 0.999),
        Feedback(factor=0.97),
        Feedback(factor=0.997),
    ],
)
def test_feedback_that_loses_something_is_found(hook: Simulated) -> None:
    assert judged(section_23.every_step, FEEDBACK, hook).failures


def test_estimates_converge() -> None:
    assert not judged(section_23.every_step, CHANGE, Estimates()).failures
    assert judged(section_23.every_step, CHANGE, Estimates(left=0.99)).failures
    assert judged(section_23.every_step, CHANGE, Estimates(until=1000)).failures


@pytest.mark.parametrize("seed", in_turns(range(3), 3))
def test_random_rounding_is_unbiased(seed: int) -> None:
    hook = RandomRounding()
    for rule in (
        section_23.every_step,
        section_23.independent_in_time,
        section_23.independent_among_ranks,
    ):
        assert not judged(rule, "unbiased", hook, seed=seed).failures


def test_a_bias_is_found() -> None:
    for factor in (lambda step: 0.98, lambda step: 1.0 if step < 1000 else 0.9):
        hook = RandomRounding(factor=factor)
        assert judged(section_23.every_step, "unbiased", hook).failures


@pytest.mark.parametrize("after", in_turns([7, 100, 900, 1, 256, 613], 3))
def test_noise_that_repeats_is_found(after: int) -> None:
    hook = RandomRounding(seed=lambda step, index, rank: (step % after, index, rank))
    (failure,) = judged(section_23.independent_in_time, "unbiased", hook).failures
    assert f"after {after} step" in failure.cause


def test_ranks_with_the_same_noise_are_found() -> None:
    hook = RandomRounding(seed=lambda step, index, rank: (step, index))
    assert judged(section_23.independent_among_ranks, "unbiased", hook).failures


def partners(until: float = math.inf) -> Simulated:
    """Return a hook that averages each rank with the next one, in turns with the one before."""

    def hook(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        if step >= until:
            return gradients
        return (gradients + gradients.roll(1 if step % 2 else -1, 0)) / 2

    return hook


def test_local_means_are_right() -> None:
    for rule in (section_23.every_step, section_23.mixing):
        assert not judged(rule, "local", partners()).failures


def test_pairs_of_three_ranks_may_differ_between_buckets() -> None:
    def hook(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        alone = (step + index) % 3
        return torch.stack(
            [
                row if rank == alone else (row + gradients[3 - alone - rank]) / 2
                for rank, row in enumerate(gradients)
            ]
        )

    assert not judged(section_23.every_step, "local", hook).failures


def test_the_end_of_mixing_is_found_wherever_it_lies() -> None:
    draws = random.Random(2)
    for until in draws.sample(range(2, 1000), 4):
        assert judged(section_23.mixing, "local", partners(until), seed=until).failures


def test_wrong_weights_are_found() -> None:
    def hook(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        return gradients.roll(1, 0) if step == 900 else partners()(step, index, gradients)

    (failure,) = judged(section_23.every_step, "local", hook).failures
    assert "step 900" in failure.actual


def test_other_bits_on_a_rank_are_found() -> None:
    def hook(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        results = mean(step, index, gradients).clone()
        if step == 77:
            results[1] *= 1 + 2**-20
        return results

    (failure,) = judged(section_23.same_bits, FEEDBACK, hook).failures
    assert "step 77" in failure.actual


def test_a_longer_run_has_rounds_of_several_steps() -> None:
    steps = 5000

    def hook(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        return gradients if step == 4321 else mean(step, index, gradients)

    assert not judged(section_23.every_step, "exact", mean, steps=steps).failures
    (failure,) = judged(section_23.every_step, "exact", hook, steps=steps).failures
    assert "steps 4320 to 4322" in failure.actual


def test_the_messages_on_long_runs() -> None:
    def swapped(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        """Mix elements of both ranks from one step on."""
        mixed = mean(step, index, gradients).clone()
        if step >= 900:
            mixed[:, ::2] = gradients[:1, ::2]
        return mixed

    def infinite(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        return mean(step, index, gradients) / float(step != 77)

    def warming_up(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        return mean(step, index, gradients) if step < 2 else late(step, index, gradients)

    def at_every_thousandth(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        return mean(step, index, gradients) * (1 + (step % 1000 == 900))

    def opposite(step: int, index: int, gradients: torch.Tensor) -> torch.Tensor:
        """Send half of the elements, and the others in the next step."""
        generator = torch.Generator().manual_seed(1000 * (step // 2) + index)
        sent = torch.randint(2, gradients.shape, generator=generator)
        return mean(step, index, gradients * 2 * (1 - sent if step % 2 else sent))

    late = Feedback(left=lambda step: 1.0 if step < 900 else 0.9)
    repeating = RandomRounding(seed=lambda step, index, rank: (step % 7, index, rank))
    shared = RandomRounding(seed=lambda step, index, rank: (step, index))
    found = [
        judged(section_23.every_step, "exact", at_every_thousandth, steps=5000),
        judged(section_23.every_step, f"{FEEDBACK}, warmup(2)", warming_up),
        judged(section_23.every_step, FEEDBACK, infinite),
        judged(section_23.every_step, CHANGE, Estimates(until=1000)),
        judged(section_23.every_step, "local", swapped),
        judged(section_23.independent_in_time, "unbiased", repeating),
        judged(section_23.independent_in_time, "unbiased", opposite),
        judged(section_23.independent_among_ranks, "unbiased", shared),
        judged(section_23.mixing, "local", partners(500)),
    ]
    run, claims = long_run("exact", mean)
    incomplete = Found()
    for rank in run.ranks:
        rank.tensors = {}
    section_23.every_step.check(run, claims, incomplete)
    found.append(incomplete)
    fused = Found()
    stepped, claims = long_run("fused(SGD, lr=0.1)", mean)
    section_23.fused.check(stepped, claims, fused)
    for rank in stepped.ranks:
        values = {name.replace("/", "/parameter/"): rows for name, rows in rank.tensors.items()}
        rank.tensors |= values
    section_23.fused.check(stepped, claims, fused)
    texts = [read_failures(one.failures[:1]) for one in found]
    texts.append(read_failures(fused.failures[:2]))
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
Expected: mean 0.100094527 within 1.45e-07
Actual: 0.133459369 on rank 0, steps 900 to 902, parameter p0, index (0, 0)
Likely cause: 5 of 1667 groups of steps are wrong, among them steps 900, 1899, 2898, 3900
Expected: results that sum to the means, within 64.9, the largest sum of residuals
Actual: rank 0, step 1223, parameter p0 (step 1221 after the warm-up): the sum of all
    results so far is off by 67.3; at the end by 67.3, with a limit of 7.42
Likely cause: over the whole run results are 0.9897 times the means
Expected: finite values for finite gradients
Actual: rank 0, step 77, parameter p0: some are not, or there is no gradient
Likely cause: this step alone, of 1316, is wrong
Expected: a result within 14.7 of the mean
Actual: rank 0, step 1055: 15 away
Likely cause: 164 of 1276 are wrong, among them steps 1055, 1056, 1057, 1058
Expected: the same weights of the ranks' gradients for all elements
Actual: rank 0, step 900, parameter p0: elements do not fit the weights that fit best,
    0.684 of rank 0, 0.16 of rank 1, 0.155 of rank 2
Likely cause: all steps from step 900 on are wrong: look for a count of steps or calls
Expected: errors that have nothing to do with those of earlier steps
Actual: rank 0: errors 7 steps apart are alike: on average their product is 0.75 of their
    square, 4.48 times the limit
Likely cause: the random numbers repeat after 7 steps: a seed that comes again
Expected: errors that have nothing to do with those of earlier steps
Actual: rank 0: errors 1 step apart are opposite: on average their product is -0.27 of
    their square, 2.44 times the limit
Likely cause: the random numbers of a step follow from those of 1 step before
Expected: errors with gradients on all 2 ranks that have at most 2.83 times the variance
    of errors with gradients on rank 0 alone; independent draws give 2 times
Actual: 3.98 times that variance
Likely cause: ranks draw the same numbers, or have the same error in every draw
Expected: a rank that is heard in the first steps and then at least every 200 steps
Actual: parameter p0: rank 0 hears rank 1 in step 498, then not for 769 steps
Likely cause: ranks no longer communicate, or the partners of a schedule no longer change
Expected: results of every step
Actual: rank 0, parameter p0: none
Expected: parameters of every step
Actual: rank 0: none
Expected: as SGD(lr=0.1) leaves it: 6.4000001
Actual: rank 0, step 0, parameter p0: -64
Likely cause: all steps from step 0 on are wrong: look for a count of steps or calls""",
    )


def test_mixing_is_not_judged_without_a_solved_parameter() -> None:
    found = Found()
    run, claims = long_run("local", mean)
    long_run_weights.require_mixing(LongRecord(run, claims), {}, found)
    assert found.without_evidence == "no parameter has enough elements for the weights of all ranks"
