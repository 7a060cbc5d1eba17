"""No rule crashes on the records of a broken subject: it fails, or is not run, with a sentence.

The records of a right subject of each kind are damaged (``damage.py``), and each rule judges them
alone. A rule that raises an exception of its own would be a kit error.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from conformance.judging.misshapen import misshapen
from conformance.judging.rule import Rule, WorldSizes
from conformance.judging.verdict import Judgement, Verdict
from conformance.records.run import Run
from conformance.rules import book
from conformance.scenarios.model import Scenario
from conformance.session.engine import Engine
from conformance.session.run_sources import RunSource
from conformance.subjects.kinds import KINDS
from conformance.subjects.spec import SubjectSpec
from tests.cases import Case, is_costly, own_judge, subject_and_claims
from tests.rules.damage import Draw, damaged

SEED = 0
# Damages that each rule judges.
DRAWS = 10
# Each part of the rules of a kind is a test of its own.
PARTS = 8
WORLDS = (2,)
REFERENCES = {kind: Case(one.reference, worlds=WORLDS, kind=kind) for kind, one in KINDS.items()}
CLAIMS = {
    "rounded": Case("hooks_ref:fp16_compress_hook", "rounded(float16)", worlds=WORLDS),
    "compressed": Case(
        "hooks_ref:powerSGD_hook",
        "compressed, warmup(2)",
        "hooks_ref:PowerSGDState,matrix_approximation_rank=1,start_powerSGD_iter=2",
        worlds=WORLDS,
    ),
    "ef21": Case(
        "hooks_ref:compression_hook",
        "compressed(feedback=ef21, delta=0.25), checkpointable, rescaled(call=rescale)",
        "examples.states:top_k_ef21",
        worlds=WORLDS,
    ),
    "unbiased": Case(
        "hooks_ref:compression_hook", "unbiased", "examples.states:qsgd", worlds=WORLDS
    ),
    "local": Case(
        "hooks_ref:gossip_grad_hook", "local", "hooks_ref:GossipGraDState", worlds=WORLDS
    ),
    "fused": Case(
        "examples.setups:sgd_in_the_hook",
        "fused(SGD, lr=0.1, momentum=0.9)",
        setup=True,
        worlds=WORLDS,
    ),
    "like": Case(
        "hooks_ref:EMAModelAverager,decay=0.5",
        "like(EMAModelAverager, decay=0.5)",
        worlds=WORLDS,
        kind="averager",
    ),
    # The numbers that a joinable computes are judged by costly rules alone.
    "numbers of a joinable": Case(
        "tests.right.joins:Averages",
        worlds=WORLDS,
        kind="joinable",
        rules=("17.18", "17.19", "17.20", "17.32", "17.37", "17.38"),
    ),
}
SUBJECTS = REFERENCES | CLAIMS


class Damaging(RunSource):
    """Returns runs of another source, each made once, with damage if a function is given.

    Attributes:
        made: the runs so far, as they were made.
        damage: returns a damaged copy of a run of the subject; None leaves runs as they are.
    """

    def __init__(self, source: RunSource) -> None:
        self.profile = source.profile
        self.seed = source.seed
        self.damage: Callable[[Run], Run] | None = None
        self._source = source
        self.made: dict[tuple[Scenario, str], Run] = {}

    @property
    def capacity(self) -> int | None:
        return self._source.capacity

    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Run:
        key = scenario, name
        if key not in self.made:
            self.made[key] = self._source.run(scenario, world, subject, name)
        # The names of baselines have a prefix.
        is_baseline = name != f"{scenario.name}@{world}"
        if self.damage is None or is_baseline:
            return self.made[key]
        return self.damage(self.made[key])


PARTS_OF_SUBJECTS = [
    pytest.param(
        name,
        part,
        marks=[pytest.mark.rarely] * (part > 0 or name in CLAIMS),
        id=f"{name}-{part}",
    )
    for name in SUBJECTS
    for part in range(PARTS)
]


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "part"), PARTS_OF_SUBJECTS)
def test_a_rule_has_a_sentence_for_every_damaged_record(name: str, part: int) -> None:
    case = SUBJECTS[name]
    rules = [
        rule
        for rule in book(case.kind, "cpu").values()
        # With one world size there is no other.
        if rule.number in case.rules
        or not (case.rules or is_costly(rule) or rule.worlds is WorldSizes.OTHERS)
    ]
    source = Damaging(own_judge().engine(case).source)
    wrong = {}
    for rule in rules[part::PARTS]:
        source.damage = None
        judgement = judged(source, case, rule)
        assert judgement.verdict.holds, judgement.reason
        assert misshapen(source.made.values()) is None
        for number in range(DRAWS):
            draw = Draw(f"{SEED} {name} {rule.number} {number}")
            texts: list[str] = []

            def damage(run: Run, draw: Draw = draw, texts: list[str] = texts) -> Run:
                changed, text = damaged(draw, run)
                texts.append(text)
                return changed

            source.damage = damage
            if problems := problems_of(judged(source, case, rule)):
                wrong[f"{rule.number}, draw {number}: {'; '.join(texts)}"] = problems
    assert wrong == {}


def judged(source: RunSource, case: Case, rule: Rule) -> Judgement:
    """Judge one rule by itself, without the rules that it builds on.

    A rule that watches every run watches those that its own scenarios name.
    """
    alone = replace(rule, needs=(), presumes=())
    rules = {rule.number: alone}
    if rule.watches:
        watched = [one for one in book(case.kind).values() if not one.watches]
        rules |= {one.number: one for one in watched if set(one.on) <= set(rule.on)}
    return Engine(source, rules, *subject_and_claims(case), WORLDS).judge(rule.number)


def problems_of(judgement: Judgement) -> list[str]:
    """Return what a reader of a judgement could not use."""
    problems = []
    if judgement.verdict is Verdict.KIT_ERROR:
        problems.append(judgement.reason)
    if judgement.verdict is not Verdict.PASS and not judgement.reason:
        problems.append(f"{judgement.verdict} without a reason")
    for failure in judgement.failures:
        if not (failure.expected.strip() and failure.actual.strip()):
            problems.append(f"a failure without a sentence: {failure}")
        if "AttributeError" in failure.actual or "TypeError" in failure.actual:
            problems.append(failure.actual)
    return problems
