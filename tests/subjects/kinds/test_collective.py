"""Judging quantized collectives: the oracle, the references, torch's own, and their arguments."""

import enum
import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hooks_ref
from conformance.errors import TargetError, UsageError
from conformance.hosts.pool import Pool
from conformance.judging.oracles import collective as oracle
from conformance.judging.rule import MUST, Rule
from conformance.judging.verdict import Verdict
from conformance.ranks.drivers import collective
from conformance.ranks.resolve import Factory
from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective import CALLED, FORMS, PLAIN, WAITED
from conformance.scenarios.collective_conditions import MIXED_CALLS
from conformance.scenarios.collective_training import IN_FLIGHT, ON_TWO_GROUPS, UNEVEN
from conformance.scenarios.draws import drawn
from conformance.scenarios.gradients import gradient
from conformance.scenarios.model import Scenario
from conformance.session.adaptations import adapt_scenario
from conformance.session.engine import Engine
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import default_claims, parse_claims
from conformance.subjects.spec import parse_other
from conformance.subjects.target import parse_target
from hooks_ref.quantized_collectives import dequantize, quantize
from tests.cases import Case, Judgements, by_short_rules, in_turns

TORCHS = "torch.distributed.algorithms._quantization.quantization:auto_quantize"
LISTS = {"18.7"}  # puts other tensors into lists
FLOAT16 = {"18.6", "18.36"}  # overwrites the outputs of a rank outside of the group
BRAIN = {
    "18.4",
    "18.5",
    "18.14",
}  # bfloat16 takes matrices only, reads memory in order, loses a NaN
SINGLE = {"18.12", "18.13"}  # ignores a positional group, and split sizes
REFUSED = {
    Case(f"{TORCHS},func=all_gather,qtype=FP16", worlds=(2,), kind="collective"): FLOAT16 | LISTS,
    Case(f"{TORCHS},func=all_gather,qtype=BFP16", worlds=(2,), kind="collective"): BRAIN | LISTS,
    Case(f"{TORCHS},func=all_to_all,qtype=FP16", worlds=(2,), kind="collective"): FLOAT16 | LISTS,
    Case(f"{TORCHS},func=all_to_all,qtype=BFP16", worlds=(2,), kind="collective"): BRAIN | LISTS,
    Case(f"{TORCHS},func=all_to_all_single,qtype=FP16", worlds=(2,), kind="collective"): FLOAT16
    | SINGLE
    | {"18.5"},  # fills a transposed output in the order of its memory
    Case(f"{TORCHS},func=all_to_all_single,qtype=BFP16", worlds=(2,), kind="collective"): BRAIN
    | SINGLE,
    Case(f"{TORCHS},func=all_gather,qtype=FP16,quant_loss=2.0", worlds=(2,), kind="collective"): {
        "18.3",
        *FLOAT16,
    }
    | LISTS,
    Case(f"{TORCHS},func=scatter,qtype=FP16", worlds=(2,), kind="collective"): {"18.1"},
}
SEEN_BESIDE = {"18.15", "18.19"}  # their observations are compared, too
REFUSED = {by_short_rules(case, rules | SEEN_BESIDE): rules for case, rules in REFUSED.items()}
CAUSES = {
    "18.3": "the factor is ignored",
    "18.7": "other tensors are put into the list",
    "18.12": "an argument is not seen if it is given by position",
    "18.13": "the split sizes are ignored",
    "18.14": "NaN is lost",
}


@pytest.mark.parametrize("case", in_turns(list(REFUSED), 8), ids=str)
def test_torchs_is_refused_by_these_rules_alone(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    judgements = judgements_of(case)
    failed = {
        number: j
        for number, j in judgements.items()
        if j.verdict is Verdict.FAIL and rules[number].level == MUST
    }
    assert failed.keys() == REFUSED[case]
    for number, judgement in failed.items():
        first = judgement.failures[0]
        assert first.cause == CAUSES.get(number, first.cause)
        if number == "18.5":
            assert first.cause in (
                "these are its elements in another order",
                "elements are taken in the order of memory",
            )
        if number == "18.4":
            assert "shape (7,): it raised RuntimeError" in first.actual
            assert "Tensor 'input' must have 2 dimension(s). Found 1" in first.actual
        if number == "18.1":
            assert "is not supported yet (in scatter, step 0)" in first.actual
    if "18.1" not in failed:
        refusal = "RuntimeError: The async_op=True mode is not supported yet."
        assert judgements["18.19"].failures[0].actual.endswith(refusal)
        traffic = judgements["18.15"].runs["collective_ordered@2"]["traffic"]
        assert traffic == {"largest": 0.5, "mean": 0.5}


MATRICES = by_short_rules(
    Case(
        f"{TORCHS},func=all_gather,qtype=BFP16",
        "collective(all_gather), rounded(bfloat16), dimensions(2)",
        worlds=(2,),
        kind="collective",
    ),
    ("18.4",),
)


@pytest.mark.parametrize("case", [MATRICES], ids=str)
def test_torchs_takes_matrices_only(
    judgements_of: Callable[[Case], Judgements], case: Case
) -> None:
    assert judgements_of(case)["18.4"].verdict is Verdict.PASS


# The commands of hooks_ref/README.md cover the other combinations.
QTYPES = {
    "all_gather": ("BFP16", "FP8"),
    "all_to_all": ("FP16", "INT8"),
    "all_to_all_single": ("BFP16", "FP8"),
    "scatter": ("FP16", "INT8"),
    "all_gather_into_tensor": ("INT8",),
    "reduce_scatter": ("FP16",),
    "reduce_scatter_tensor": ("INT8",),
    "all_reduce": ("FP16",),
}
OURS = [
    by_short_rules(
        Case(f"hooks_ref:auto_quantize,func={func},qtype={qtype}", worlds=(2,), kind="collective")
    )
    for func, qtypes in QTYPES.items()
    for qtype in qtypes
]


@pytest.mark.parametrize("case", in_turns(OURS, 13), ids=str)
def test_ours_is_certified(judgements_of: Callable[[Case], Judgements], case: Case) -> None:
    judgements = judgements_of(case).values()
    assert {j.number: j.reason for j in judgements if not j.verdict.holds} == {}


@pytest.mark.parametrize(
    ("target", "claims"),
    [
        ("func=all_gather,qtype=FP16", "collective(all_gather), rounded(float16)"),
        (
            "func=scatter,qtype=BFP16,quant_loss=2.0",
            "collective(scatter), rounded(bfloat16), divided(loss=2.0)",
        ),
        (
            "func=all_to_all,qtype=INT8,error_feedback=True",
            "collective(all_to_all), blocks(int8, size=128), feedback",
        ),
        (
            "func=all_to_all_single,qtype=FP8,quant_loss=None",
            "collective(all_to_all_single), blocks(float8_e4m3fn, size=128)",
        ),
    ],
)
def test_default_claims_follow_from_the_target(target: str, claims: str) -> None:
    arguments = parse_target(f"hooks_ref:auto_quantize,{target}", "").kwargs
    default = default_claims("collective", arguments)
    assert str(default) == claims
    assert parse_claims(claims, "collective") == default


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounded(float16)", "claim which collective it is"),
        ("collective(all_gather)", "claim how it loses precision"),
        (
            "collective(all_gather), rounded(float16), blocks(int8)",
            "claim how it loses precision, by one of",
        ),
        (
            "collective(broadcast), rounded(float16)",
            "collective takes one of all_gather, all_gather_into_tensor, all_to_all, "
            "all_to_all_single, scatter, reduce_scatter, reduce_scatter_tensor, all_reduce",
        ),
        ("collective(scatter), rounded(int8)", "rounded takes one of float16, bfloat16"),
        ("collective(scatter), blocks(int4)", "blocks takes one of int8,"),
        (
            "collective(scatter), blocks(int8, size=0)",
            "takes size=, a whole number from 1 on; got 0",
        ),
        ("collective(scatter), bounded(0.1)", "bounded takes relative="),
        (
            "collective(scatter), bounded(relative=2)",
            "takes relative=, a number above 0 and up to 1; got 2",
        ),
        (
            "collective(scatter), rounded(float16), divided(0)",
            "divided takes one number, which is not 0",
        ),
        ("collective(scatter), rounded(float16), divided", "divided takes one number"),
        ("collective(scatter), rounded(float16), dimensions(3)", "dimensions takes 1 or 2"),
        (
            "collective(scatter), rounded(float16), compressed",
            "'compressed' is not a claim of a collective; known: collective",
        ),
    ],
)
def test_claims_that_do_not_parse(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_claims(text, "collective")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"func": "broadcast", "qtype": "FP16"}, {"func": "all_gather", "qtype": "INT4"}],
)
def test_other_arguments_need_claims(arguments: dict[str, Any]) -> None:
    text = r"--collective: no claims follow from func=.* and qtype=.*--claims"
    with pytest.raises(UsageError, match=text):
        default_claims("collective", arguments)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "hooks_ref:auto_quantize,func=broadcast,qtype=FP16",
            "func=broadcast: one of all_gather, all_gather_into_tensor, all_to_all, "
            "all_to_all_single, scatter, reduce_scatter, reduce_scatter_tensor, all_reduce",
        ),
        (
            "hooks_ref:auto_quantize,func=all_gather,qtype=FP4",
            "qtype=FP4: no such member; DQuantType has FP16, BFP16, INT8, FP8",
        ),
        (
            "hooks_ref:auto_quantize,func=all_gather",
            "auto_quantize requires qtype: add it to the target \\(auto_quantize,qtype=...\\)",
        ),
        (
            f"{TORCHS},func=all_gather,qtype=INT8",
            "qtype=INT8: no such member; DQuantType has FP16, BFP16",
        ),
        ("hooks_ref:PeriodicModelAverager,period=4", "the target gives a PeriodicModelAverager"),
        ("tests.right.quantized_collectives:GONE", "no attribute 'GONE'"),
        ("nowhere.at_all:gather", "there is no module 'nowhere' on the path"),
    ],
)
def test_other_targets_are_refused_in_one_line(
    pool: Pool, rules: dict[str, Rule], target: str, message: str
) -> None:
    claims = parse_claims("collective(all_gather), rounded(float16)", "collective")
    spec = parse_other("collective", target)
    engine = Engine(LocalSource(pool), rules, spec, claims, (1,))
    with pytest.raises(TargetError, match=message) as error:
        engine.judge("18.1")
    assert "\n" not in str(error.value)


class Bits(enum.Enum):
    FEW = 8


def annotated(func: Callable[..., Any], bits: Bits, mode: str = "FEW") -> tuple[Any, ...]:
    return func, bits, mode


def named(func, qtype=None):  # type: ignore[no-untyped-def]
    return func, qtype


def gather(tensor_list: Any, tensor: Any, group: Any = None) -> None:
    pass


def test_names_of_functions_and_enum_members_are_replaced_by_them() -> None:
    made = collective._understood(
        Factory(annotated, {"func": "all_to_all", "bits": "FEW", "mode": "FEW"})
    )
    assert made.kwargs == {"func": dist.all_to_all, "bits": Bits.FEW, "mode": "FEW"}
    made = collective._understood(Factory(named, {"func": "scatter", "qtype": "FEW"}))
    assert made.kwargs == {"func": dist.scatter, "qtype": Bits.FEW}
    with pytest.raises(TargetError, match="bits=MANY: no such member; Bits has FEW"):
        collective._understood(Factory(annotated, {"bits": "MANY"}))


@pytest.mark.parametrize(
    "function",
    [
        gather,
        lambda *args, **kwargs: None,
        hooks_ref.auto_quantize(dist.all_gather, hooks_ref.DQuantType.FP16),
    ],
)
def test_a_function_that_is_the_collective(function: Callable[..., Any]) -> None:
    assert collective._understood(Factory(function, {})).function() is function


@pytest.mark.parametrize(
    "function",
    [lambda: gather, lambda process_group, rank=0: gather, types.SimpleNamespace],
)
def test_a_function_that_makes_one(function: Callable[..., Any]) -> None:
    assert collective._understood(Factory(function, {})).function is function


def test_messages_differ_from_pair_to_pair() -> None:
    claims = parse_claims("collective(all_to_all), rounded(float16)", "collective")
    scenario = adapt_scenario(PLAIN, claims)
    pairs = list(itertools.product(range(4), range(4)))
    for step, index in itertools.product(range(3), range(2)):
        of_pairs = [messages.message(scenario, 4, step, index, *pair) for pair in pairs]
        assert all(not torch.equal(a, b) for a, b in itertools.combinations(of_pairs, 2))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_uneven_splits_are_as_many_rows_as_even_ones(size: int) -> None:
    """A collective that ignores them neither fails nor hangs, but gives wrong rows."""
    claims = parse_claims("collective(all_to_all_single), rounded(float16)", "collective")
    scenario = adapt_scenario(CALLED, claims)
    for index in (2, 3):
        rows = [
            [messages.shape_of(scenario, size, 0, index, source, to)[0] for to in range(size)]
            for source in range(size)
        ]
        columns = zip(*rows, strict=True)
        totals = {sum(row) for row in rows} | {sum(column) for column in columns}
        assert len(totals) == 1
        assert totals.pop() % size == 0
        assert all(len({*row}) == size for row in rows)


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_of_an_uneven_gather_has_more_than_others_in_some_call(size: int) -> None:
    claims = parse_claims("collective(all_gather), rounded(float16)", "collective")
    for seed in range(10):
        scenario = drawn(adapt_scenario(UNEVEN, claims), seed)
        rows = [
            [messages.shape_of(scenario, size, 0, index, source, 0)[0] for source in range(size)]
            for index in range(len(scenario.params))
        ]
        # In the other calls some ranks have no rows.
        assert all(len({*of_call}) == size for of_call in rows if all(of_call))
        for first, second in itertools.permutations(range(size), 2):
            assert any(of_call[first] < of_call[second] for of_call in rows)


def test_neighbours_in_bfloat16() -> None:
    random = gradient("normal", (5000,), torch.float32, world=1, rank=0, step=0, param=0)
    sent = torch.cat([random, torch.tensor([1.5, -0.0, 3e38])])
    low, high = oracle.neighbours(sent, "bfloat16")
    for values in (low, high):
        assert torch.equal(values.bfloat16().double(), values)
    nearest = sent.bfloat16().double()
    assert ((nearest == low) | (nearest == high)).all()
    assert (low.abs() <= sent.double().abs()).all()
    assert (high.abs() >= sent.double().abs()).all()
    assert torch.equal((low == high), sent.double() == nearest)


def test_float64_beyond_the_range_of_float32() -> None:
    sent = torch.tensor([1e300, -1e300, 1e-300, -1e-300, 1.5], dtype=torch.float64)
    low, high = oracle.neighbours(sent, "bfloat16")
    largest = torch.finfo(torch.bfloat16).max
    assert low.tolist() == [largest, -largest, 0.0, -0.0, 1.5]
    assert high.tolist() == [math.inf, -math.inf, 2.0**-133, -(2.0**-133), 1.5]
    low, high = oracle.beyond_float32(sent, sent.abs() / 4)
    largest = torch.finfo(torch.float32).max / 2
    assert low.tolist() == [largest, -math.inf, 0.75e-300, -1.25e-300, 1.125]
    assert high.tolist() == [math.inf, -largest, 1.25e-300, -0.75e-300, 1.875]


@pytest.mark.parametrize(
    "scenario",
    [WAITED, IN_FLIGHT, ON_TWO_GROUPS, UNEVEN, MIXED_CALLS],
    ids=lambda one: one.name,
)
def test_no_two_calls_are_waited_for_in_one_order_by_all(scenario: Scenario) -> None:
    calls = len(scenario.params)
    world = scenario.own_size or 3
    groups = {
        group
        for rank in range(world)
        for group in (scenario.group_of(rank, world), scenario.twin_group_of(rank, world))
    }
    for step, group in itertools.product(range(len(scenario.steps)), groups):
        orders = {
            rank: messages.order_of_waits(scenario, world, rank, step, range(calls))
            for rank in group
        }
        for one, other in itertools.combinations(range(calls), 2):
            first = [order.index(one) < order.index(other) for order in orders.values()]
            assert set(first) == {True, False}


@pytest.mark.parametrize(
    ("qtype", "claim"), [("INT8", "blocks(int8)"), ("FP8", "blocks(float8_e4m3fn)")]
)
def test_the_bound_of_blocks_is_met_and_tight(qtype: str, claim: str) -> None:
    claims = parse_claims(f"collective(all_gather), {claim}", "collective")
    assert adapt_scenario(FORMS, claims).options == ("all_gather",)
    kind = hooks_ref.DQuantType[qtype]
    sent = messages.message(adapt_scenario(PLAIN, claims), 2, 2, 1, 1, 0).reshape(-1)
    error = (dequantize(quantize(sent, kind), kind, sent) - sent).double().abs()
    largest_sent = torch.full((660,), math.inf, dtype=torch.float64)
    bound = oracle.claimed_bound(claims, sent.double(), largest_sent) * oracle.SLACK
    assert (error <= bound).all()
    assert (error / bound).max() > 0.9
