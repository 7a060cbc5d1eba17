"""Certifying sync strategies: what is right, what each communicates and needs, and targets that are none."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from conformance.errors import TargetError, UsageError
from conformance.hosts.pool import Pool
from conformance.judging.oracles.strategy import _fed, _parts, _ranks, _roundings, right
from conformance.judging.rule import MUST, Rule
from conformance.judging.verdict import Found, Verdict
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.model import Scenario
from conformance.scenarios.strategy import PLAIN, multiple
from conformance.session.engine import make_engine
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import Claims, default_claims, parse_claims
from conformance.subjects.kinds.strategy import STRATEGY
from conformance.subjects.spec import parse_other
from tests.cases import Case, Judgements
from tests.made_runs import event

OURS = "hooks_ref:ddp_sync_context,sync_strategy="
SINGLE = Case(f"{OURS}single_auto_sync", worlds=(2,), kind="strategy")
MULTI = Case(f"{OURS}multi_auto_sync", worlds=(2,), rules=("16.16", "16.18"), kind="strategy")
DENSE = [s for s in STRATEGY.scenarios if s.variant not in ("no_ddp",) and s.name != "strategy_sparse"]


@pytest.mark.parametrize("case", [SINGLE], ids=str)
def test_a_lost_sync(judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case) -> None:
    """Where micro-batches use different parameters, DDP that synchronises in the last one alone leaves each rank its own gradients."""
    failed = {number: j for number, j in judgements_of(case).items() if j.verdict is Verdict.FAIL}
    assert failed.keys() == {"16.3"}
    assert rules["16.3"].level == MUST
    assert all("a lost sync" in failure.cause for failure in failed["16.3"].failures)


@pytest.mark.parametrize("case", [MULTI], ids=str)
def test_an_average_in_every_microbatch(judgements_of: Callable[[Case], Judgements], case: Case) -> None:
    """It is certified, with the advice that it communicates four times what it has to; without its claim DDP raises an error."""
    judgements = judgements_of(case)
    assert judgements["16.18"].verdict is Verdict.FAIL
    assert "4.00 times the bytes of its gradients" in judgements["16.18"].reason
    (counted,) = judgements["16.18"].runs.values()
    assert counted["traffic"]["mean"] == pytest.approx(4, rel=0.01)  # which certificates are compared by
    assert "Expected to have finished reduction" in judgements["16.16"].reason


def test_what_is_claimed_where_nobody_says_anything() -> None:
    said = {
        name: str(default_claims("strategy", {"sync_strategy": name})) for name in ("single_auto_sync", "multi_auto_sync", "forced_sync")
    }
    plain = "what every strategy is"
    assert said == {"single_auto_sync": plain, "multi_auto_sync": "find_unused", "forced_sync": plain}
    assert default_claims("strategy", {}) == Claims(kind="strategy")


def test_every_choice_of_microbatches_has_a_sum_of_its_own() -> None:
    multiples = [multiple(3, 4, batch) for batch in range(4)]
    sums = [sum(some) for number in range(5) for some in itertools.combinations(multiples, number)]
    assert len(sums) == len(set(sums))


def _orders(run: Run, rank: int, step: int, index: int) -> Iterator[torch.Tensor]:
    """Yield what right strategies make of a gradient, in the dtype of its parameter."""
    dtype, ranks = getattr(torch, run.scenario.params[index].dtype), _ranks(run, rank)
    fed = {(r, part): _fed(run, r, *part, index).to(dtype) for r in ranks for part in _parts(run, step)}
    parts, none = list(_parts(run, step)), torch.zeros_like(next(iter(fed.values())))
    own = {r: sum((fed[r, part] for part in parts), none) for r in ranks}
    yield sum(own.values(), none) / len(ranks)
    yield sum((grad / len(ranks) for grad in own.values()), none)
    yield sum((grad * torch.tensor(1 / len(ranks), dtype=dtype) for grad in reversed(own.values())), none)
    yield sum((sum((fed[r, part] for r in ranks), none) / len(ranks) for part in parts), none)
    mean = none
    for part in parts:  # on top of the mean so far, that of all ranks again
        mean = sum(((mean + fed[r, part]) * torch.tensor(1 / len(ranks), dtype=dtype) for r in ranks), none)
    yield mean


@pytest.mark.parametrize("scenario", DENSE, ids=lambda scenario: scenario.name)
def test_every_right_order_of_operations_is_right(scenario: Scenario) -> None:
    """The same bits with crafted values; with random ones, within the bound."""
    for world in scenario.fits((1, 2, 3, 4)):
        run = Run(scenario, world, [])
        for step, kind in enumerate(scenario.steps):
            for rank, index in itertools.product(range(world), range(0, len(scenario.params), 3)):
                wanted = right(run, rank, step, index)
                bound = _roundings(run, rank, step, index) if kind == "normal" else torch.zeros_like(wanted)
                for got in _orders(run, rank, step, index):
                    assert ((got.double() - wanted).abs() <= bound).all(), (world, rank, step, index)


def test_what_is_no_number_is_wrong(rules: dict[str, Rule]) -> None:
    run = Run(PLAIN, 2, [RankRecord(rank) for rank in range(2)])
    for record in run.ranks:
        record.events += [event("synchronised", step) for step in range(len(PLAIN.steps))]
        for step, index in itertools.product(range(len(PLAIN.steps)), range(len(PLAIN.params))):
            record.tensors[f"{step}/grad/p{index}"] = right(run, record.rank, step, index)
    for broken in (False, True):
        if broken:
            run.ranks[1].tensors["2/grad/p4"][3] = float("nan")
        found = Found()
        rules["16.1"].check(run, Claims(kind="strategy"), found)
        assert found.verdict() is (Verdict.FAIL if broken else Verdict.PASS)
    assert found.failures[0].actual.startswith("rank 1, step 2, p4, index 3: nan")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nopkg:strategy", "there is no module 'nopkg' on the path"),
        ("hooks_ref:ddp_sync_contex", "did you mean ddp_sync_context"),
        ("math:pi", "this is an object of type float"),
        ("hooks_ref:ddp_sync_context", "the strategy requires sync_strategy; a micro-batch has model, is_final_microbatch"),
        ("hooks_ref:noop_hook", "the strategy requires _, bucket"),
        ("builtins:print", "this one returned None"),
    ],
)
def test_a_target_that_is_none(pool: Pool, rules: dict[str, Rule], target: str, said: str) -> None:
    engine = make_engine(LocalSource(pool), rules, parse_other("strategy", target), Claims(kind="strategy"), (1,))
    with pytest.raises(TargetError, match=said) as raised:
        engine.judge("16.1")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ("all_used(2)", "all_used takes no arguments"),
        ("rounded(float16)", r"no claim of a subject of this kind \(strategy\); known: find_unused, all_used, min_world_size"),
        ("find_unused, find_unused", "'find_unused' is given twice"),
    ],
)
def test_claims_that_are_none(claims: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_claims(claims, "strategy")
