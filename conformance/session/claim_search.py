"""``--claims auto``: which claims a subject would hold, the strictest first. It proposes; it certifies nothing.

A claim is tried by the rules that hold it to account, as far as the first that does not hold. Claims of the exact family are
told from one another by the same runs; each lossy claim lengthens runs in its own way, and has some of its own.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from conformance.judging.verdict import Verdict
from conformance.scenarios.hook import ORDERED
from conformance.session.engine import Engine
from conformance.subjects.claims import CONTRACTION, DIFFERENCE, FEEDBACK, LOCAL, UNBIASED, Claims

CONTRACT = ("1.1", "1.2", "1.3", "1.4", "1.5", "9.2")
EXACT = ("2.1", "2.2", "2.3", "2.6", "2.7", "2.10")
LOSSY = {FEEDBACK: "13.1", DIFFERENCE: "13.1", CONTRACTION: "13.2", UNBIASED: "13.3", LOCAL: "13.5"}
DELTAS = (0.5, 0.25, 0.1)


@dataclass
class Tried:
    """One claim that was tried.

    Attributes:
        claims: it.
        failed: the number of the first rule that does not hold, and why; '' where all do.
        margins: of the rules that hold: the largest error, as a fraction of its bound.
        share: the largest share of the gradients' bytes that a rank sent in a step after the warm-up; None where it is not known.
    """

    claims: Claims
    failed: str = ""
    margins: dict[str, float] = field(default_factory=dict)
    share: float | None = None


def propose(make_engine: Callable[[Claims], Engine]) -> list[Tried]:
    """Try claims, the strictest first, until one holds; return all that were tried.

    ``unbiased`` is no stricter than a contraction, nor is that: where one holds the other is tried too.

    Args:
        make_engine: returns what judges the subject under some claims.
    """
    exact = make_engine(Claims())
    tried = [_try(exact, (*CONTRACT, *EXACT))]
    if not tried[0].failed or any(not exact.judge(number).verdict.holds for number in CONTRACT):
        return tried
    for claims in (*exact.other_claims(), *_lossy(exact.exact_steps())):
        if any(before.claims == claims for before in tried):
            continue
        tried.append(_try(make_engine(claims), _rules_of(claims)))
        if tried[-1].failed.startswith("2.7") and not claims.world_only:
            claims = replace(claims, world_only=True)
            tried.append(_try(make_engine(claims), _rules_of(claims)))
        if not tried[-1].failed:
            if claims.lossy == CONTRACTION:
                random = Claims(lossy=UNBIASED, warmup=claims.warmup, world_only=claims.world_only)
                tried.append(_try(make_engine(random), _rules_of(random)))
            return tried
    return tried


def _lossy(warmup: int) -> Iterator[Claims]:
    for delta in (0.999, 0.99, 0.9):
        yield Claims(lossy=CONTRACTION, delta=delta, warmup=warmup)
    for kind in (FEEDBACK, DIFFERENCE):
        yield from (Claims(lossy=kind, delta=delta, warmup=warmup) for delta in DELTAS)
    yield Claims(lossy=UNBIASED, warmup=warmup)
    yield Claims(lossy=LOCAL, warmup=warmup)


def _rules_of(claims: Claims) -> tuple[str, ...]:
    replicas = () if claims.lossy == LOCAL else ("3.1",)
    return (LOSSY[claims.lossy], "13.4", "1.8", "2.6", "2.7", "2.10", *replicas) if claims.lossy else EXACT


def _try(engine: Engine, numbers: tuple[str, ...]) -> Tried:
    tried = Tried(engine.claims)
    for number in numbers:
        judgement = engine.judge(number)
        if judgement.verdict in (Verdict.FAIL, Verdict.KIT_ERROR) or (judgement.verdict is Verdict.NOT_RUN and judgement.runs):
            tried.failed = f"{number}: {judgement.reason}"
            return tried
        margins = [run["margin"] for run in judgement.runs.values() if run.get("margin")]
        if margins:
            tried.margins[number] = max(margins)
    run = engine.finished(ORDERED)
    if run is not None:
        sent = run.bytes_sent(max(2, engine.claims.warmup))
        shares = [sum(size for _, size in collectives) / given for _, _, collectives, given in sent if given]
        tried.share = max(shares, default=None)
    return tried


def proposal_lines(tried: list[Tried]) -> list[str]:
    """Return what is said of them in the terminal."""
    lines = [f"tried     {one.claims}: {one.failed}" for one in tried if one.failed]
    for one in (one for one in tried if not one.failed):
        said = ", ".join(f"{number} {margin:.2g}" for number, margin in one.margins.items()) or "none: bit for bit"
        lines += [f'proposed  --claims "{one.claims}"', f"          margins, where 1 is the bound: {said}"]
        if one.share is not None and one.claims.lossy:
            ratio = math.ceil(one.share * 100) / 100
            lines.append(f"          a rank sends {one.share:.3g} of its gradients' bytes: ratio={ratio:g} would hold")
    if all(one.failed for one in tried):
        return [*lines, "none of the claims holds: the first line says what it lacks to be exact"]
    return [*lines, "nothing was certified: run again with the claims that you mean"]
