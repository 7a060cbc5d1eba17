"""The engine on runs written by hand: which rule a failed run fails."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from conformance.errors import KitError, TargetError
from conformance.judging.oracles.mean import mean
from conformance.judging.rule import Rule
from conformance.judging.verdict import Found, Judgement, Verdict
from conformance.records.files import RAISED
from conformance.records.rank_record import Event, RankRecord, Tensors
from conformance.records.run import Run
from conformance.rules import book
from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import Scenario
from conformance.session.claim_search import equivalent_claims
from conformance.session.engine import Engine
from conformance.session.run_maker import MAX_HANGS
from conformance.session.run_sources import RunSource as Source
from conformance.subjects.claims import Claims, parse_claims
from conformance.subjects.kinds import HOOK, KINDS
from conformance.subjects.spec import REFERENCE, SubjectSpec
from tests.made_runs import broken_run, event, made_run

Make = Callable[[Scenario, int], Run]


class MadeSource(Source):
    """Makes runs instead of running anything, and remembers their names."""

    def __init__(
        self, subject: Make, reference: Make = lambda s, w: made_run(scenario=s, world=w)
    ) -> None:
        self.subject, self.reference = subject, reference
        self.asked: list[str] = []

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Run:
        self.asked.append(("reference " if subject == REFERENCE else "") + name)
        return (self.reference if subject == REFERENCE else self.subject)(scenario, world)


def engine(
    rules: dict[str, Rule],
    source: MadeSource,
    claims: Claims = Claims(),  # noqa: B008
    worlds: tuple[int, ...] = (1, 2, 3),
) -> Engine:
    control = Engine(source, rules, REFERENCE, Claims(), worlds)
    return Engine(source, rules, SubjectSpec(hook="made:hook"), claims, worlds, control)


def right(scenario: Scenario, world: int) -> Run:
    return made_run(scenario=scenario, world=world)


def undivided(scenario: Scenario, world: int) -> Run:
    return made_run(lambda run, r, s, i: mean(run, r, s, i) * run.world, scenario, world)


def test_each_scenario_runs_once_however_many_rules_read_it(rules: dict[str, Rule]) -> None:
    source = MadeSource(right)
    judged = engine(rules, source)
    for number in ("1.2", "1.3", "1.4", "1.5", "2.1", "2.2", "2.3", "2.6", "3.1"):
        assert judged.judge(number).verdict is Verdict.PASS, number
    assert len(source.asked) == len(set(source.asked))


def changes_parameters_in(*names: str) -> Make:
    """Return runs in which the scenarios of these names change a parameter."""

    def make(scenario: Scenario, world: int) -> Run:
        run = made_run(scenario=scenario, world=world)
        if scenario.name in names:
            for stepped in run.ranks[0].all("stepped"):
                stepped["parameters_changed"] = ["p0"]
        return run

    return make


def some_rules(rules: dict[str, Rule]) -> dict[str, Rule]:
    """Return a book in which only 9.2 watches; the others read `values`, `buckets`, `shapes`."""
    return {number: rules[number] for number in ("1.5", "2.1", "4.1", "2.6", "2.9", "9.2")}


def test_a_rule_that_watches_reads_every_run_that_other_rules_need(rules: dict[str, Rule]) -> None:
    book_ = some_rules(rules)
    watcher = engine(book_, MadeSource(right)).judge("9.2")
    others = {
        f"{scenario.name}@{size}"
        for rule in book_.values()
        if not rule.watches
        for scenario, size in engine(book_, MadeSource(right)).plan.runs_of(rule)
    }
    assert watcher.verdict is Verdict.PASS
    assert set(watcher.runs) == others
    assert len(others) > 2


def test_a_rule_that_watches_fails_with_its_first_run_that_fails(rules: dict[str, Rule]) -> None:
    book_ = some_rules(rules)
    watched = engine(book_, MadeSource(right)).judge("9.2").runs
    wrong = list(watched)[-2].partition("@")[0]
    source = MadeSource(changes_parameters_in(wrong))
    judgement = engine(book_, source).judge("9.2")
    assert judgement.verdict is Verdict.FAIL
    assert "p0 changed" in judgement.reason
    # The reference is asked about that run and the plainest ones alone.
    asked = [name for name in source.asked if name.startswith("reference")]
    assert f"reference {list(judgement.runs)[-1]}" in asked
    assert len(asked) <= 3


def test_a_rule_that_watches_is_not_failed_by_runs_of_others(rules: dict[str, Rule]) -> None:
    book_ = some_rules(rules)
    watched = engine(book_, MadeSource(right)).judge("9.2").runs
    broken = list(watched)[-1].partition("@")[0]

    def make(scenario: Scenario, world: int) -> Run:
        return broken_run(scenario, world) if scenario.name == broken else right(scenario, world)

    judgement = engine(book_, MadeSource(make)).judge("9.2")
    assert judgement.verdict is Verdict.PASS
    assert set(judgement.runs) == {name for name in watched if not name.startswith(f"{broken}@")}


def few_rules(rules: dict[str, Rule]) -> dict[str, Rule]:
    """Return a book in which 9.2 watches, and 2.1 alone needs another rule: 9.2."""
    return {
        number: replace(rules[number], needs=("9.2",) if number == "2.1" else ())
        for number in ("1.5", "2.1", "2.6", "2.9", "9.2")
    }


def test_rules_that_need_every_run_are_judged_last(rules: dict[str, Rule]) -> None:
    book_ = few_rules(rules)
    judged = engine(book_, MadeSource(right))
    judged.announce(tuple(book_))
    for number in book_:
        assert judged.judge(number).verdict is Verdict.PASS
    assert list(judged.judgements) == ["1.5", "2.6", "2.9", "9.2", "2.1"]


def test_after_a_failure_no_rule_is_judged_before_its_turn(rules: dict[str, Rule]) -> None:
    book_ = few_rules(rules)
    judged = engine(book_, MadeSource(undivided))
    judged.announce(tuple(book_))
    judged.judge("9.2")
    assert list(judged.judgements) == ["1.5", "2.6", "9.2"]


def test_runs_of_baselines_begin_ahead_beside_the_subjects(rules: dict[str, Rule]) -> None:
    class Ahead(MadeSource):
        def begin(
            self,
            runs: Iterable[tuple[Scenario, int]],
            subject: SubjectSpec | None,
            prefix: str = "",
        ) -> None:
            begun.extend((f"{prefix}{one.name}@{size}", subject) for one, size in runs)

    begun: list[tuple[str, SubjectSpec | None]] = []
    source = Ahead(right)
    judged = engine(rules, source)
    number = next(one.number for one in rules.values() if one.baseline and one.kind == HOOK)
    judged.announce(("2.1", number))
    judged.judge("2.1")
    vanilla = {name for name, subject in begun if subject is None}
    assert vanilla
    assert {name.removeprefix("vanilla-") for name in vanilla} <= {name for name, _ in begun}
    assert len(begun) == len(set(begun))


def test_a_failure_is_the_subjects_only_if_the_reference_passes(rules: dict[str, Rule]) -> None:
    assert engine(rules, MadeSource(undivided)).judge("2.1").verdict is Verdict.FAIL
    judgement = engine(rules, MadeSource(undivided, undivided)).judge("2.1")
    assert judgement.verdict is Verdict.KIT_ERROR
    assert "the reference allreduce does not pass it" in judgement.reason


def test_a_broken_run_is_the_subjects_although_what_its_rule_needs_is_not_run(
    rules: dict[str, Rule],
) -> None:
    """At world size 2 alone 2.6 is not run, of the reference neither."""
    book_ = {**rules, "24.7": replace(rules["24.7"], needs=("2.6",))}
    judged = engine(book_, MadeSource(breaks_in("wide_groups")), worlds=(2,))
    assert judged.judge("2.6").verdict is Verdict.NOT_RUN
    # As a rule that watches every run makes it.
    judged.maker.run(judged.plan.named("wide_groups"), 3)
    judgement = judged.judge("24.7")
    assert judgement.verdict is Verdict.FAIL, judgement.reason
    assert "RuntimeError" in judgement.reason


def test_a_machine_on_which_the_reference_fails_judges_nothing(rules: dict[str, Rule]) -> None:
    with pytest.raises(KitError, match=r"the reference allreduce fails rule 2\.1"):
        engine(rules, MadeSource(right, undivided)).check_machine()


def test_rules_that_would_say_the_same_again_are_not_run(rules: dict[str, Rule]) -> None:
    judged = engine(rules, MadeSource(undivided))
    assert judged.judge("2.1").verdict is Verdict.FAIL
    for number in ("2.2", "2.7", "3.1", "8.1", "12.2"):
        assert judged.judge(number).verdict is Verdict.NOT_RUN


def test_a_node_that_was_lost_is_nobodys_failure(rules: dict[str, Rule]) -> None:
    """Nor of the rule that owns the scenario; and a baseline that was lost runs again for the next
    rule.
    """

    def lost(scenario: Scenario, world: int) -> Run:
        return Run(
            scenario,
            world,
            [],
            "node",
            host=("node 1 (bert), ranks 2, 3: no answer from its machine"),
        )

    judgement = engine(rules, MadeSource(lost)).judge("1.5")
    assert (judgement.verdict, judgement.failures) == (Verdict.NOT_RUN, [])
    assert "node 1 (bert), ranks 2, 3: no answer from its machine" in judgement.reason
    with pytest.raises(KitError, match=r"not fit to judge.*node 1 \(bert\)"):
        engine(rules, MadeSource(right, lost)).check_machine()
    beside = next(
        rule for rule in rules.values() if rule.baseline == "vanilla" and rule.kind == HOOK
    )

    class WithoutVanilla(MadeSource):
        def run(
            self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str
        ) -> Run:
            run = super().run(scenario, world, subject, name)
            return run if subject else lost(scenario, world)

    alone = {**rules, beside.number: replace(beside, needs=())}
    judged = engine(alone, WithoutVanilla(right))
    judgement = judged.judge(beside.number)
    assert (judgement.verdict, "(bert)" in judgement.reason) == (Verdict.NOT_RUN, True)
    assert judged.control is not None
    assert not judged.control.maker.baselines


def test_wrong_at_another_world_size_is_one_failure(rules: dict[str, Rule]) -> None:
    def wrong_at_three(scenario: Scenario, world: int) -> Run:
        return undivided(scenario, world) if world == 3 else right(scenario, world)

    judged = engine(rules, MadeSource(wrong_at_three))
    assert judged.judge("2.1").verdict is Verdict.PASS
    assert judged.judge("2.6").verdict is Verdict.FAIL
    assert judged.judge("2.2").verdict is Verdict.NOT_RUN
    assert "2.6 does not hold at world size 3" in judged.judge("2.2").reason


def test_a_broken_run_fails_its_owner_and_nobody_else(rules: dict[str, Rule]) -> None:
    judged = engine(
        rules,
        MadeSource(lambda s, w: broken_run(s, w, exit=-11, died=1.0) if w == 2 else right(s, w)),
    )
    assert judged.judge("1.5").verdict is Verdict.FAIL
    assert "rank 1 died (signal SIGSEGV)" in judged.judge("1.5").reason
    assert judged.judge("2.1").verdict is Verdict.NOT_RUN
    assert judged.judge("9.1").verdict is Verdict.NOT_RUN


def test_a_run_in_which_no_rank_came_as_far_as_the_subject_is_a_kit_error(
    rules: dict[str, Rule],
) -> None:
    """The other runs are judged."""

    def busy(scenario: Scenario, world: int) -> Run:
        run = right(scenario, world)
        if scenario.name == "long":
            said = event("error", -1, where="kit", type="E", message="busy", traceback="")
            run.ranks = [RankRecord(rank.rank, [said], exit=70) for rank in run.ranks]
        return run

    judged = engine(rules, MadeSource(busy))
    assert judged.judge("1.7").verdict is Verdict.KIT_ERROR
    assert "no rank came as far as the subject: rank 0 raised E: busy" in judged.judge("1.7").reason
    assert judged.judge("2.1").verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("where", "error", "number"),
    [
        ("register", "ValueError", "1.1"),
        ("backward", "ContractBreach", "1.2"),
        ("backward", "RuntimeError", "1.5"),
    ],
)
def test_a_broken_run_is_blamed_on_the_rule_that_its_kind_belongs_to(
    rules: dict[str, Rule], where: str, error: str, number: str
) -> None:
    def raising(scenario: Scenario, world: int) -> Run:
        run = made_run(scenario=scenario, world=world)
        for rank in run.ranks:
            rank.events = [
                *rank.events[:2],
                event("error", 0, where=where, type=error, message="said why", traceback=""),
            ]
            rank.exit, rank.tensors = 70, {}
        return run

    judged = engine(rules, MadeSource(raising))
    failed = [
        n
        for n in ("1.1", "1.2", "1.3", "1.4", "1.5", "2.1", "2.6", "9.7")
        if judged.judge(n).verdict is Verdict.FAIL
    ]
    assert failed == [number]


def breaks_in(name: str, where: str = "backward", type: str = "RuntimeError") -> Make:
    """Make right runs, except for an error on rank 1 in one scenario."""

    def make(scenario: Scenario, world: int) -> Run:
        run = right(scenario, world)
        if scenario.name == name:
            said = event("error", 0, where=where, type=type, message="said why", traceback="")
            run.ranks[-1] = replace(
                run.ranks[-1], events=[*run.ranks[-1].events[:2], said], exit=70, tensors={}
            )
        return run

    return make


def test_a_breach_where_its_own_rule_does_not_look_is_the_scenarios(rules: dict[str, Rule]) -> None:
    judged = engine(rules, MadeSource(breaks_in("long", type="ContractBreach")))
    assert judged.judge("1.2").verdict is Verdict.PASS
    assert judged.judge("1.7").verdict is Verdict.FAIL


def test_a_broken_run_is_blamed_although_what_its_owner_builds_on_reads_it_too(
    rules: dict[str, Rule],
) -> None:
    """Under compressed, 1.8 owns ``buckets`` and is judged only if 13.4 holds, which reads them
    too.
    """
    judged = engine(rules, MadeSource(breaks_in("buckets")), parse_claims("compressed"))
    assert judged.judge("13.4").verdict is Verdict.NOT_RUN
    assert judged.judge("1.8").verdict is Verdict.FAIL


def test_a_hang_costs_its_deadline_once(rules: dict[str, Rule]) -> None:
    def hanging(scenario: Scenario, world: int) -> Run:
        run = made_run(scenario=scenario, world=world)
        for rank in run.ranks:
            rank.events, rank.tensors, rank.exit, rank.evidence = (
                rank.events[:3],
                {},
                -9,
                {"killed": True},
            )
        run.stopped = "hang"
        return run

    source = MadeSource(hanging)
    judged = engine(rules, source, worlds=(1, 2, 3, 4))
    verdicts = {number: judged.judge(number).verdict for number in book(HOOK, "cpu")}
    assert [number for number, verdict in verdicts.items() if verdict is Verdict.FAIL] == ["1.5"]
    assert [name for name in source.asked if not name.startswith("reference")] == [
        "values@2",
        "values_explained@2",
    ]


@pytest.mark.parametrize("damage", [{"group": None}, {}])
def test_a_repetition_with_an_incomplete_record_explains_nothing(
    rules: dict[str, Rule], damage: dict[str, None]
) -> None:
    def dies(scenario: Scenario, world: int) -> Run:
        run = made_run(scenario=scenario, world=world)
        for rank in run.ranks:
            collective = Event(event("collective", 0, what="allreduce 47 float32", **damage))
            rank.events = [*rank.events[:3], collective]
            rank.tensors = {}
            rank.exit = -9
        return run

    judged = engine(rules, MadeSource(dies)).judge("1.5")
    assert judged.verdict is Verdict.FAIL
    assert judged.failures[0].cause == ""


def test_hangs_in_special_scenarios_are_limited(rules: dict[str, Rule]) -> None:
    def sometimes(scenario: Scenario, world: int) -> Run:
        run = right(scenario, world)
        if scenario.name not in ("values", "as_is"):
            for rank in run.ranks:
                rank.events, rank.tensors, rank.exit, rank.evidence = (
                    rank.events[:3],
                    {},
                    -9,
                    {"killed": True},
                )
            run.stopped = "hang"
        return run

    source = MadeSource(sometimes)
    judged = engine(rules, source, worlds=(2, 3))
    for number in book(HOOK, "cpu"):
        judged.judge(number)
    hung = [name for name in source.asked if not name.startswith(("reference", "values@", "as_is"))]
    assert len([name for name in hung if "explained" not in name]) == MAX_HANGS
    assert {name.replace("_explained", "") for name in hung} == {
        name for name in hung if "explained" not in name
    }


def test_a_subject_that_cannot_be_loaded_is_no_verdict(rules: dict[str, Rule]) -> None:
    def missing(scenario: Scenario, world: int) -> Run:
        run = made_run(scenario=scenario, world=world)
        run.ranks[0].events = [
            event(
                "error", -1, where="load", type="target", message="no module named so", traceback=""
            )
        ]
        run.ranks[0].exit = 70
        return run

    with pytest.raises(TargetError, match="no module named so"):
        engine(rules, MadeSource(missing)).judge("2.1")


def test_a_record_that_could_not_be_written_is_the_kits(rules: dict[str, Rule]) -> None:
    def full(scenario: Scenario, world: int) -> Run:
        run = made_run(scenario=scenario, world=world)
        run.ranks[0].exit, run.ranks[0].evidence = (
            71,
            {"output": ("rank 0 cannot write its record: No space left on device")},
        )
        return run

    with pytest.raises(KitError, match="No space left"):
        engine(rules, MadeSource(full)).judge("2.1")


def test_a_rule_that_raises_is_a_kit_error(rules: dict[str, Rule]) -> None:
    def odd(scenario: Scenario, world: int) -> Run:
        run = right(scenario, world)
        for rank in run.ranks:
            for value in rank.all("value"):
                del value["shape"]
        return run

    judgement = engine(rules, MadeSource(odd)).judge("1.3")
    assert judgement.verdict is Verdict.KIT_ERROR
    sentence, _, trace = judgement.reason.partition("\n")
    assert sentence.endswith("the rule itself failed, a defect of the kit; please report it:")
    assert "KeyError" in trace


def reads_a_gradient(run: Run, claims: Claims, found: Found) -> None:
    """Read a gradient by the name and the shape that it has in a right run."""
    got = run.ranks[1].tensors["0/grad/p0"].reshape(-1)
    found.checked(len(got - mean(run, 1, 0, 0)))


def judged_without(tensor: torch.Tensor | None, rules: dict[str, Rule]) -> Judgement:
    """Judge runs in which a gradient is another tensor, or missing."""

    def make(scenario: Scenario, world: int) -> Run:
        run = made_run(scenario=scenario, world=world)
        if scenario.name != VALUES.name:
            return run
        if tensor is None:
            del run.ranks[1].tensors["0/grad/p0"]
        else:
            run.ranks[1].tensors["0/grad/p0"] = tensor
        run.ranks[1].tensors = Tensors(1, run.ranks[1].tensors)
        run.ranks[1].events[-1]["tensors"] = len(run.ranks[1].tensors)
        return run

    reading = replace(rules["2.1"], check=reads_a_gradient, needs=())
    return engine({"2.1": reading}, MadeSource(make), worlds=(2,)).judge("2.1")


def test_a_tensor_that_is_not_on_record_is_a_failure_with_a_sentence(
    rules: dict[str, Rule],
) -> None:
    judgement = judged_without(None, rules)
    assert judgement.verdict is Verdict.FAIL
    failure = judgement.failures[0]
    assert failure.expected == "0/grad/p0 on record"
    assert failure.actual == "rank 1 has recorded none"


def test_a_tensor_of_another_shape_is_a_failure_with_a_sentence(rules: dict[str, Rule]) -> None:
    judgement = judged_without(torch.zeros(2), rules)
    assert judgement.verdict is Verdict.FAIL
    failure = judgement.failures[0]
    assert failure.expected.startswith("0/grad/p0 of shape [")
    assert failure.actual == "rank 1, values@2: 0/grad/p0 has shape [2]"


def test_nothing_checked_is_not_run() -> None:
    assert Found().verdict() is Verdict.NOT_RUN


def test_says_which_claims_would_hold(rules: dict[str, Rule]) -> None:
    judged = engine(rules, MadeSource(undivided))
    for number in book(HOOK, "cpu"):
        if number.startswith("2."):
            judged.judge(number)
    assert Claims(sum=True) in equivalent_claims(judged)
    assert Claims() not in equivalent_claims(judged)


def test_no_other_claim_is_named_to_a_hook_that_holds_as_it_is_claimed(
    rules: dict[str, Rule],
) -> None:
    judged = engine(rules, MadeSource(right))
    for number in ("2.1", "2.2", "2.3"):
        judged.judge(number)
    assert equivalent_claims(judged) == []


def test_not_run_is_no_pass_for_an_empty_profile(rules: dict[str, Rule]) -> None:
    judged = engine(rules, MadeSource(right), worlds=(2,))
    assert judged.judge("2.6").verdict is Verdict.NOT_RUN


def test_a_rule_of_several_runs_needs_them_all(rules: dict[str, Rule]) -> None:
    """At world size 1 alone there is nothing to compare with."""
    judged = engine(rules, MadeSource(right), worlds=(1,))
    assert {number: judged.judge(number).verdict for number in ("1.10", "3.3")} == dict.fromkeys(
        ("1.10", "3.3"), Verdict.NOT_RUN
    )


@pytest.mark.parametrize(
    ("name", "everywhere", "forgets"),
    [("sparse", True, False), ("sparse", False, True), ("collective_raises", False, False)],
)
def test_a_refusal_or_a_planned_failure_does_not_stop_the_runs_ahead(
    rules: dict[str, Rule], name: str, everywhere: bool, forgets: bool
) -> None:
    """Only those of a broken subject may each cost their whole deadline."""

    class Noting(MadeSource):
        has_forgotten = False

        def forget(self) -> None:
            self.has_forgotten = True

    def made(scenario: Scenario, world: int) -> Run:
        run = made_run(scenario=scenario, world=world)
        if scenario.name == name:
            for rank in run.ranks if everywhere else run.ranks[1:]:
                rank.exit = RAISED
                rank.events = [
                    event("error", 0, where="step", type="ValueError", message="no", traceback="")
                ]
        return run

    source = Noting(made)
    judged = engine(rules, source)
    scenario = next(one for one in KINDS[HOOK].scenarios if one.name == name)
    judged.maker.run(scenario, 2)
    assert f"{name}@2" in source.asked
    assert source.has_forgotten is forgets


def test_the_evidence_of_a_machine_that_no_rank_began_on_is_kept(rules: dict[str, Rule]) -> None:
    def busy(scenario: Scenario, world: int) -> Run:
        error = event(
            "error", -1, where="kit", type="AcceleratorError", message="busy", traceback="in torch"
        )
        ranks = [RankRecord(rank, [error], exit=RAISED) for rank in range(world)]
        return Run(scenario, world, ranks)

    judgement = engine(rules, MadeSource(busy)).judge("1.5")
    assert judgement.verdict is Verdict.KIT_ERROR
    assert judgement.failures[0].evidence["rank 0"]["traceback"] == "in torch"
