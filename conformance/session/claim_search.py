"""``--claims auto``: search for claims that a hook would hold.

It proposes them and certifies nothing.

Claims are tried from the strictest on. Each is judged by the rules that hold it to account, up to
the first that fails. Claims of the exact family are told apart by the same runs; each lossy claim
lengthens the runs in its own way, and needs runs of its own.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from conformance.judging.oracles.mean import compare
from conformance.judging.verdict import Judgement, Verdict
from conformance.scenarios.hook import NORMAL, ORDERED
from conformance.session.engine import Engine
from conformance.subjects.claims import (
    CONTRACTION,
    DIFFERENCE,
    FEEDBACK,
    LOCAL,
    ROUNDED_DTYPES,
    UNBIASED,
    Claims,
)
from conformance.subjects.kinds import KINDS

# The rules that every hook must pass, whatever it claims; those that hold an exact claim to
# account; and the rule of each lossy claim.
CONTRACT = ("1.1", "1.2", "1.3", "1.4", "1.5", "9.2")
EXACT = ("2.1", "2.2", "2.3", "2.6", "2.7", "2.10")
LOSSY = {FEEDBACK: "13.1", DIFFERENCE: "13.1", CONTRACTION: "13.2", UNBIASED: "13.3", LOCAL: "13.5"}
LOSSY_BESIDE = ("13.4", "1.8", "2.6", "2.7", "2.10")
REPLICAS = "3.1"
MIXING = "13.11"
BYTES_SENT = "13.7"
SEARCHED = (*CONTRACT, *EXACT, *LOSSY.values(), *LOSSY_BESIDE, REPLICAS, MIXING, BYTES_SENT)
"""The rules that a search judges: a rule that watches every run watches the runs of these alone."""
DELTAS_OF_FEEDBACK = (0.5, 0.25, 0.1)
DELTAS_OF_CONTRACTION = (0.999, 0.99, 0.9)
MOST_PROPOSALS = 3


@dataclass
class Tried:
    """One claim that was tried.

    Attributes:
        claims: the claim.
        refused_by: the number of the first failed rule; None if all hold.
        reason: the reason of its failure.
        margins: by rule, the largest error as a fraction of its bound.
        share: the largest share of the gradients' bytes that a rank sent in a step after the
            warm-up; None if unknown.
    """

    claims: Claims
    refused_by: str | None = None
    reason: str = ""
    margins: dict[str, float] = field(default_factory=dict)
    share: float | None = None


def search_claims(engine_for: Callable[[Claims], Engine]) -> list[Tried]:
    """Try claims, the strictest first, until one holds; return all that were tried.

    ``unbiased`` and a contraction are not comparable: if one holds, the other is tried too.

    Args:
        engine_for: returns the engine that judges the subject under some claims.
    """
    exact = engine_for(Claims())
    tried = [_try(exact, (*CONTRACT, *EXACT))]
    is_broken = any(not exact.judge(number).verdict.holds for number in CONTRACT)
    if tried[0].refused_by is None or is_broken:
        return tried
    for claims in (*equivalent_claims(exact), *_lossy_claims(_exact_steps(exact))):
        if any(before.claims == claims for before in tried):
            continue
        tried.append(_try(engine_for(claims), _rules_of(claims)))
        if tried[-1].refused_by == "2.7" and not claims.world_only:
            claims = replace(claims, world_only=True)
            tried.append(_try(engine_for(claims), _rules_of(claims)))
        if tried[-1].refused_by:
            continue
        if claims.lossy == CONTRACTION:
            unbiased = Claims(lossy=UNBIASED, warmup=claims.warmup, world_only=claims.world_only)
            tried.append(_try(engine_for(unbiased), _rules_of(unbiased)))
        return tried
    return tried


def equivalent_claims(engine: Engine) -> list[Claims]:
    """Return the claims of the exact family under which the runs made so far would pass the rules
    of equivalence; none if they pass them as they are claimed.
    """
    current = engine.claims
    if current.lossy or not KINDS[engine.subject.kind].searches_claims:
        return []
    if engine.would_hold(current, EXACT):
        return []
    candidates = [
        replace(current, rounded=rounded, sum=total, scaled=scaled, world_only=world_only)
        for world_only in (False, True)
        for total, scaled in ((False, False), (False, True), (True, False))
        for rounded in (None, *ROUNDED_DTYPES)
    ]
    others = [
        claims for claims in candidates if claims != current and engine.would_hold(claims, EXACT)
    ]
    return others[:MOST_PROPOSALS]


def _exact_steps(engine: Engine) -> int:
    """Return how many steps give the exact mean before the first that does not, on inputs that no
    compression keeps.
    """
    run = engine.finished(NORMAL)
    if run is None:
        return 0
    steps = range(len(run.scenario.steps))
    wrong = (step for step in steps if compare(run, step, Claims()).mismatch)
    return next(wrong, len(steps))


def _lossy_claims(warmup: int) -> Iterator[Claims]:
    for delta in DELTAS_OF_CONTRACTION:
        yield Claims(lossy=CONTRACTION, delta=delta, warmup=warmup)
    for kind in (FEEDBACK, DIFFERENCE):
        for delta in DELTAS_OF_FEEDBACK:
            yield Claims(lossy=kind, delta=delta, warmup=warmup)
    yield Claims(lossy=UNBIASED, warmup=warmup)
    yield Claims(lossy=LOCAL, warmup=warmup)
    yield Claims(lossy=LOCAL, warmup=warmup, ratio=0.0)
    yield Claims(lossy=LOCAL, warmup=warmup, mixing=False)


def _rules_of(claims: Claims) -> tuple[str, ...]:
    if not claims.lossy:
        return EXACT
    # Replicas of a local hook drift apart.
    if claims.lossy != LOCAL:
        return (LOSSY[claims.lossy], *LOSSY_BESIDE, REPLICAS)
    mixing = (MIXING,) if claims.mixes else ()
    sent = (BYTES_SENT,) if claims.ratio is not None else ()
    return (LOSSY[LOCAL], *mixing, *sent, *LOSSY_BESIDE)


def _try(engine: Engine, numbers: tuple[str, ...]) -> Tried:
    tried = Tried(engine.claims)
    for number in numbers:
        judgement = engine.judge(number)
        if _fails(judgement):
            tried.refused_by = number
            tried.reason = judgement.reason
            return tried
        margins = [run["margin"] for run in judgement.runs.values() if run.get("margin")]
        if margins:
            tried.margins[number] = max(margins)
    run = engine.finished(ORDERED)
    if run is not None:
        sent = run.bytes_sent(max(2, engine.claims.warmup))
        shares = [
            sum(size for _, size in collectives) / total
            for _, _, collectives, total in sent
            if total
        ]
        tried.share = max(shares, default=None)
    return tried


def _fails(judgement: Judgement) -> bool:
    if judgement.verdict is Verdict.NOT_RUN:
        return bool(judgement.runs)
    return judgement.verdict in (Verdict.FAIL, Verdict.KIT_ERROR)


def proposal_lines(tried: list[Tried]) -> list[str]:
    """Return the lines of the terminal about the claims that were tried."""
    lines = [
        f"tried     {one.claims}: {one.refused_by}: {one.reason}" for one in tried if one.refused_by
    ]
    holding = [one for one in tried if one.refused_by is None]
    for one in holding:
        margins = ", ".join(f"{number} {margin:.2g}" for number, margin in one.margins.items())
        lines.append(f'proposed  --claims "{one.claims}"')
        lines.append(
            f"          margins, as fractions of the bound: {margins or 'none, bit for bit'}"
        )
        if one.share is not None and one.claims.lossy:
            ratio = math.ceil(one.share * 100) / 100
            lines.append(
                f"          a rank sends {one.share:.3g} of its gradients' bytes: ratio={ratio:g} "
                "would hold"
            )
    if not holding:
        return [
            *lines,
            "none of the claims holds: the first line names the rule that keeps the hook from "
            "being exact",
        ]
    return [*lines, "nothing was certified: run again with the claims that you choose"]
