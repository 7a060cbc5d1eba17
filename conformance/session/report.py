"""What people read: the text of a failure, the summary in the terminal, and report.html."""

from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from conformance.certificates.certificate import Conclusion, at_scale, limits, summary
from conformance.judging.rule import MUST, SECTIONS, Rule
from conformance.judging.verdict import Judgement, Verdict
from conformance.records.files import write_json
from conformance.session.claim_search import equivalent_claims
from conformance.session.session import Session


def failure_text(session: Session, rule: Rule, judgement: Judgement) -> str:
    """Return what is said of a rule that does not hold: requirement, expected, actual, cause, remedy, command."""
    where = next(
        (name for name, run in judgement.runs.items() if run["verdict"] == str(judgement.verdict)),
        "",
    )
    lines = [
        f"{rule.number} {rule.title}" + (f"  [{where}]" if where else ""),
        f"  Requirement:  {rule.requirement}",
    ]
    for failure in judgement.failures[:1]:
        lines += [f"  Expected:     {failure.expected}", f"  Actual:       {failure.actual}"]
        if failure.cause:
            lines.append(f"  Likely cause: {failure.cause}")
        lines += _evidence_lines(failure.evidence)
    if judgement.verdict is Verdict.KIT_ERROR:
        lines.append(f"  Kit error:    {judgement.reason}")
    lines += [f"  Look at:      {rule.remedy}", f"  Rerun:        {session.rerun(rule.number)}"]
    return "\n".join(lines)


def _evidence_lines(evidence: dict[str, Any]) -> list[str]:
    """The evidence of a run that broke, cut to what fits a terminal; report.json has all of it."""
    lines = []
    for rank, kept in evidence.items():
        exit_said = "killed by the kit" if kept.get("killed by the kit") else f"exit {kept['exit']}"
        lines.append(f"  {rank}: {exit_said}")
        for name in ("traceback", "stacks", "output"):
            if text := kept.get(name):
                tail = text.strip().splitlines()[-8:] if name != "stacks" else _main_stack(text)
                lines += [f"    {name}:", *(f"      {line}" for line in tail)]
        if kept.get("last collectives"):
            lines += [
                "    last collectives:",
                *(f"      {line}" for line in kept["last collectives"]),
            ]
    return lines


def _main_stack(text: str) -> list[str]:
    """The stack of the main thread, innermost frames first, without those of pytest or the host."""
    blocks = text.strip().split("\n\n")
    block = next((b for b in reversed(blocks) if "rank.py" in b), blocks[-1])
    return block.splitlines()[:9]


def conclusion_lines(session: Session, conclusion: Conclusion) -> list[str]:
    """Return the closing lines of a session."""
    header, lines = session.header, []
    claims, sizes = header["claims"]["text"], ", ".join(map(str, session.worlds))
    name = session.subject.name
    advice = [
        j
        for j in session.judgements.values()
        if j.verdict is Verdict.FAIL and session.rules[j.number].level != MUST
    ]
    lines += [f"advice  {j.number} {session.rules[j.number].title}: {j.reason}" for j in advice]
    lines += [f"limit   {line}" for line in limits(session.rules, session.judgements)]
    lines += [
        f"at scale, simulated: {said}" for said in at_scale(session.rules, session.judgements)
    ]
    lines += session.notes
    if conclusion.certificate:
        torch = header["profile"]["torch"]
        mode = session.profile.where + (
            ", one collective at a time"
            if header["profile"]["name"].endswith("-serialised")
            else ""
        )
        nodes = header["profile"].get("nodes", ())
        mode += f", on {len(nodes)} node{'s' if len(nodes) > 1 else ''}" if nodes else ""
        checks = sum(j.checks for j in session.judgements.values())
        lines += [
            f"CERTIFIED  {name}  as {claims}",
            f"           {len(session.judgements)} rules, {checks} checks; {mode}, world sizes {sizes}, torch {torch}",
            f"           {session.certificate_path}",
        ]
        return lines
    label = {"refused": "REFUSED", "kit error": "KIT ERROR"}.get(
        conclusion.verdict, "NOT CERTIFIED"
    )
    lines.append(f"{label}  {name}  as {claims}")
    if label == "NOT CERTIFIED":
        lines.append("development run: no certificate")
    lines += [f"  {reason}" for reason in conclusion.reasons]
    if (
        conclusion.verdict == "refused"
        and session.engine
        and (others := equivalent_claims(session.engine))
    ):
        lines.append(
            "it would hold the rules of equivalence as "
            + ", or as ".join(f'--claims "{claims}"' for claims in others)
        )
    return lines


def conclusion_text(session: Session, conclusion: Conclusion) -> str:
    """Return the whole report as text: every failure, then the closing lines."""
    failures = [
        failure_text(session, session.rules[j.number], j)
        for j in session.judgements.values()
        if j.verdict >= Verdict.FAIL and session.rules[j.number].level == MUST
    ]
    return "\n\n".join([*failures, "\n".join(conclusion_lines(session, conclusion))])


def write_report(session: Session, conclusion: Conclusion) -> None:
    """Write report.json, with the whole evidence, and report.html beside it.

    Raises:
        KitError: the folder cannot be written.
    """
    session.folder.mkdir(parents=True, exist_ok=True)
    rules = [
        {
            **summary(session.rules[number], judgement),
            "requirement": session.rules[number].requirement,
            "failures": [vars(failure) for failure in judgement.failures[:20]],
        }
        for number, judgement in session.judgements.items()
    ]
    report = {
        **session.header,
        "verdict": conclusion.verdict,
        "reasons": conclusion.reasons,
        "rules": rules,
    }
    write_json(session.folder / "report.json", report)
    environment = Environment(
        loader=PackageLoader("conformance.session.session", "."),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = {
        f"{number} {title}": [r for r in rules if r["rule"].partition(".")[0] == number]
        for number, title in SECTIONS.items()
    }
    page = environment.get_template("report.html.jinja").render(
        report=report, sections=sections, lines=conclusion_lines(session, conclusion)
    )
    (session.folder / "report.html").write_text(page, encoding="utf-8")
