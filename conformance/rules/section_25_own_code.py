"""Section 25: the numbers in the subject's own code."""

from dataclasses import replace

from conformance.judging.requirements import (
    require_meeting,
    require_optimizer,
    require_steps,
)
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.probes import PROBE, judged_as, steps_after
from conformance.subjects.claims import Claims


@rule(
    "25.1",
    "Is right on both sides of the numbers in its own code",
    on=(PROBE,),
    owns=(PROBE,),
    needs=("2.1", "2.2"),
    probes=True,
    since="1.2",
    source="hooks in the wild that take another path for large buckets, after some steps or on "
    "more ranks than their tests have",
    remedy="the branch that begins at the number: it is right on one side of it only",
)
def both_sides(run: Run, claims: Claims, found: Found) -> None:
    """If no other run took a branch that compares with a number, runs made for that number give
    right results too. So do runs for numbers that bound something without a branch: the size of a
    cache or a pool, the length of a plan, the numbers in a table. Under ``local`` ranks go on to
    hear each other after such a number of steps.

    The number is evaluated from the code (``judging/oracles/code_numbers.py``). The runs have
    buckets, tensors, steps or ranks below and above it (``scenarios/probes.py``), and are judged as
    the plainest run is under the subject's claims. At most eight numbers are tried, up to 2**25
    elements, 2,048 tensors, 4,096 steps and 8 ranks. The certificate names them.
    """
    name = judged_as(run.scenario, claims.holds_back).name
    judged = replace(run, scenario=replace(run.scenario, name=name))
    require_steps(judged, claims, found, list(range(len(judged.scenario.steps))))
    after = steps_after(run.scenario, claims.period) if claims.mixes else 0
    if after and not found.failures:
        require_meeting(judged, claims, found, len(run.scenario.steps) - after)
    if claims.fused and not found.failures:
        require_optimizer(judged, claims, found)
    for failure in found.failures:
        failure.actual = f"{failure.actual} ({run.scenario.summary})"
