"""Judging sync strategies: the oracle, the references, and targets and claims that are refused."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from conformance.errors import TargetError, UsageError
from conformance.hosts.pool import Pool
from conformance.judging.oracles.strategy import (
    averaged_ranks,
    fed_part,
    parts,
    right,
    rounding_bound,
)
from conformance.judging.rule import MUST, Rule
from conformance.judging.verdict import Found, Verdict
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.model import Scenario
from conformance.scenarios.strategy import PLAIN
from conformance.scenarios.strategy_schedule import batches, by_itself, multiple
from conformance.session.adaptations import adapt_scenario
from conformance.session.engine import make_engine
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import Claims, default_claims, parse_claims
from conformance.subjects.kinds.strategy import STRATEGY
from conformance.subjects.spec import parse_other
from tests.cases import Case, Judgements, by_short_rules
from tests.made_runs import event

OURS = "hooks_ref:ddp_sync_context,sync_strategy="
SINGLE = by_short_rules(
    Case(f"{OURS}single_auto_sync", worlds=(2,), kind="strategy"), ("16.1", "16.2", "16.3")
)
MULTI = Case(f"{OURS}multi_auto_sync", worlds=(2,), rules=("16.16", "16.18"), kind="strategy")
DENSE = [
    scenario
    for scenario in STRATEGY.scenarios
    if scenario.variant not in ("no_ddp", "special")
    and scenario.name not in ("strategy_sparse", "strategy_complex")
]


@pytest.mark.parametrize("case", [SINGLE], ids=str)
def test_a_lost_sync(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    """DDP that synchronises in the last micro-batch only leaves ranks the gradients of others."""
    failed = {number: j for number, j in judgements_of(case).items() if j.verdict is Verdict.FAIL}
    assert failed.keys() == {"16.3"}
    assert rules["16.3"].level == MUST
    assert all(
        "keeps its own accumulated gradient" in failure.cause for failure in failed["16.3"].failures
    )


@pytest.mark.parametrize("case", [MULTI], ids=str)
def test_an_average_in_every_microbatch(
    judgements_of: Callable[[Case], Judgements], case: Case
) -> None:
    """It is certified, with the advice that it communicates four times as much as it has to.

    Without its claim DDP raises an error.
    """
    judgements = judgements_of(case)
    assert judgements["16.18"].verdict is Verdict.FAIL
    assert "4.00 times the bytes of its gradients" in judgements["16.18"].reason
    (counted,) = judgements["16.18"].runs.values()
    assert counted["traffic"]["mean"] == pytest.approx(4, rel=0.01)
    assert "Expected to have finished reduction" in judgements["16.16"].reason


def test_default_claims() -> None:
    claims = {
        name: str(default_claims("strategy", {"sync_strategy": name}))
        for name in ("single_auto_sync", "multi_auto_sync", "forced_sync")
    }
    plain = "what every strategy is"
    assert claims == {
        "single_auto_sync": plain,
        "multi_auto_sync": "find_unused",
        "forced_sync": plain,
    }
    assert default_claims("strategy", {}) == Claims(kind="strategy")


def test_every_choice_of_microbatches_has_a_sum_of_its_own() -> None:
    multiples = [multiple(3, 4, batch) for batch in range(4)]
    sums = [sum(some) for size in range(5) for some in itertools.combinations(multiples, size)]
    assert len(sums) == len(set(sums))


@pytest.mark.parametrize("scenario", STRATEGY.scenarios, ids=lambda one: one.name)
def test_each_step_has_as_many_micro_batches_as_are_counted(scenario: Scenario) -> None:
    adapted = adapt_scenario(scenario, parse_claims("counts(3), find_unused", "strategy"))
    numbers = {
        batches(adapted, step) for step in range(len(adapted.steps)) if not by_itself(adapted, step)
    }
    assert numbers == {3} or scenario.variant == "claim"
    assert set(scenario.options) <= set(adapted.options)


def _results(run: Run, rank: int, step: int, index: int) -> Iterator[torch.Tensor]:
    """Yield the results of right strategies in the dtype of the parameter."""
    dtype = getattr(torch, run.scenario.params[index].dtype)
    ranks = averaged_ranks(run, rank)
    all_parts = list(parts(run, step))
    fed = {
        (other, part): fed_part(run, other, part, index).to(dtype)
        for other in ranks
        for part in all_parts
    }
    zeros = torch.zeros_like(next(iter(fed.values())))
    own = {other: sum((fed[other, part] for part in all_parts), zeros) for other in ranks}
    reciprocal = torch.tensor(1 / len(ranks), dtype=dtype)
    yield sum(own.values(), zeros) / len(ranks)
    yield sum((grad / len(ranks) for grad in own.values()), zeros)
    yield sum((grad * reciprocal for grad in reversed(own.values())), zeros)
    means = (sum((fed[other, part] for other in ranks), zeros) / len(ranks) for part in all_parts)
    yield sum(means, zeros)
    # The average of every micro-batch includes the mean so far, which all ranks hold.
    mean = zeros
    for part in all_parts:
        mean = sum(((mean + fed[other, part]) * reciprocal for other in ranks), zeros)
    yield mean


@pytest.mark.parametrize("scenario", DENSE, ids=lambda scenario: scenario.name)
def test_every_right_order_of_operations_is_right(scenario: Scenario) -> None:
    """Crafted values give the same bits, and random values are within the bound."""
    for world in scenario.fits((1, 2, 3, 4)):
        run = Run(scenario, world, [])
        for step, kind in enumerate(scenario.steps):
            for rank, index in itertools.product(range(world), range(0, len(scenario.params), 3)):
                wanted = right(run, rank, step, index)
                bound = torch.zeros_like(wanted)
                if kind == "normal":
                    bound = rounding_bound(run, rank, step, index)
                for got in _results(run, rank, step, index):
                    error = (got.double() - wanted).abs()
                    assert (error <= bound).all(), (world, rank, step, index)


def test_nan_is_wrong(rules: dict[str, Rule]) -> None:
    run = Run(PLAIN, 2, [RankRecord(rank) for rank in range(2)])
    for record in run.ranks:
        record.events += [event("synchronised", step) for step in range(len(PLAIN.steps))]
        for step, index in itertools.product(range(len(PLAIN.steps)), range(len(PLAIN.params))):
            record.tensors[f"{step}/grad/p{index}"] = right(run, record.rank, step, index).clone()
    found = Found()
    rules["16.1"].check(run, Claims(kind="strategy"), found)
    assert found.verdict() is Verdict.PASS
    run.ranks[1].tensors["2/grad/p4"][3] = float("nan")
    found = Found()
    rules["16.1"].check(run, Claims(kind="strategy"), found)
    assert found.verdict() is Verdict.FAIL
    assert found.failures[0].actual.startswith("rank 1, step 2, p4, index 3: nan")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nopkg:strategy", "there is no module 'nopkg' on the path"),
        ("hooks_ref:ddp_sync_contex", "did you mean ddp_sync_context"),
        ("math:pi", "this is an object of type float"),
        (
            "hooks_ref:ddp_sync_context",
            "the strategy requires sync_strategy; a micro-batch has model, is_final_microbatch",
        ),
        ("hooks_ref:noop_hook", "the strategy requires _, bucket"),
        ("builtins:print", "this one returned None"),
    ],
)
def test_other_targets_are_refused_in_one_line(
    pool: Pool, rules: dict[str, Rule], target: str, text: str
) -> None:
    spec = parse_other("strategy", target)
    engine = make_engine(LocalSource(pool), rules, spec, Claims(kind="strategy"), (1,))
    with pytest.raises(TargetError, match=text) as raised:
        engine.judge("16.1")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        ("all_used(2)", "all_used takes no arguments"),
        (
            "rounded(float16)",
            "is not a claim of a strategy; known: find_unused, all_used, world_only",
        ),
        ("find_unused, find_unused", "'find_unused' is given twice"),
        ("counts", "takes the number of micro-batches of a step, from 2 to 4"),
        ("counts(5)", "takes the number of micro-batches of a step, from 2 to 4"),
    ],
)
def test_claims_that_do_not_parse(claims: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        parse_claims(claims, "strategy")
