"""The texts for people: a failed rule, the summary in the terminal, report.json and report.html."""

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from conformance.certificates.certificate import Conclusion, at_scale, limits, summary
from conformance.judging.rule import MUST, SECTIONS, Rule
from conformance.judging.verdict import Judgement, Verdict
from conformance.records.files import write_json
from conformance.session.claim_search import equivalent_claims
from conformance.session.session import Session

# Of each piece of evidence the terminal shows so many lines; report.json holds all of them.
_SHOWN_LINES = 8
_SHOWN_FRAMES = 9
_KEPT_FAILURES = 20
_LABELS = {"refused": "REFUSED", "kit error": "KIT ERROR", "not certified": "NOT CERTIFIED"}


def failure_text(session: Session, rule: Rule, judgement: Judgement) -> str:
    """Return the text of a failed rule: requirement, expected, actual, cause, remedy, command."""
    verdict = str(judgement.verdict)
    failed_runs = [name for name, run in judgement.runs.items() if run["verdict"] == verdict]
    run = f"  [{failed_runs[0]}]" if failed_runs else ""
    lines = [f"{rule.number} {rule.title}{run}", f"  Requirement:  {rule.requirement}"]
    for failure in judgement.failures[:1]:
        lines.append(f"  Expected:     {failure.expected}")
        lines.append(f"  Actual:       {failure.actual}")
        if failure.cause:
            lines.append(f"  Likely cause: {failure.cause}")
        lines += _evidence_lines(failure.evidence)
    if judgement.verdict is Verdict.KIT_ERROR:
        lines.append(f"  Kit error:    {judgement.reason}")
    lines.append(f"  Look at:      {rule.remedy}")
    lines.append(f"  Rerun:        {session.rerun(rule.number)}")
    return "\n".join(lines)


def conclusion_lines(session: Session, conclusion: Conclusion) -> list[str]:
    """Return the closing lines of a session."""
    rules = session.rules
    judgements = session.judgements
    lines = [
        f"advice  {judgement.number} {rules[judgement.number].title}: {judgement.reason}"
        for judgement in judgements.values()
        if judgement.verdict is Verdict.FAIL and rules[judgement.number].level != MUST
    ]
    lines += [f"limit   {line}" for line in limits(rules, judgements)]
    lines += [f"at scale, simulated: {line}" for line in at_scale(rules, judgements)]
    lines += session.notes
    claims = session.header["claims"]["text"]
    if conclusion.certificate:
        return [
            *lines,
            f"CERTIFIED  {session.subject.name}  as {claims}",
            *_certificate_lines(session),
        ]
    lines.append(f"{_LABELS[conclusion.verdict]}  {session.subject.name}  as {claims}")
    if conclusion.verdict == "not certified":
        lines.append("development run: no certificate")
    lines += [f"  {reason}" for reason in conclusion.reasons]
    others = []
    if conclusion.verdict == "refused" and session.engine:
        others = equivalent_claims(session.engine)
    if others:
        proposals = ", or as ".join(f'--claims "{claims}"' for claims in others)
        lines.append(f"it would hold the rules of equivalence as {proposals}")
    return lines


def conclusion_text(session: Session, conclusion: Conclusion) -> str:
    """Return the whole report as text: every failure, then the closing lines."""
    failures = [
        failure_text(session, session.rules[judgement.number], judgement)
        for judgement in session.judgements.values()
        if judgement.verdict >= Verdict.FAIL and session.rules[judgement.number].level == MUST
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
            "failures": [vars(failure) for failure in judgement.failures[:_KEPT_FAILURES]],
        }
        for number, judgement in session.judgements.items()
    ]
    report = {
        **session.header,
        "verdict": conclusion.verdict,
        "reasons": conclusion.reasons,
        "rules": rules,
    }
    write_json(session.request.paths.report, report)
    page = _render(session, report, conclusion_lines(session, conclusion))
    session.request.paths.report.with_suffix(".html").write_text(page, encoding="utf-8")


def _render(session: Session, report: Mapping[str, Any], lines: list[str]) -> str:
    """Return report.html."""
    environment = Environment(
        loader=PackageLoader("conformance", "session"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = {
        f"{number} {title}": [
            rule for rule in report["rules"] if session.rules[rule["rule"]].section == number
        ]
        for number, title in SECTIONS.items()
    }
    template = environment.get_template("report.html.jinja")
    return template.render(name=session.subject.name, report=report, sections=sections, lines=lines)


def _certificate_lines(session: Session) -> list[str]:
    """Return the lines below CERTIFIED: the extent of the run, and the path of the certificate."""
    profile = session.header["profile"]
    extent = session.profile.where
    if profile["name"].endswith("-serialised"):
        extent += ", one collective at a time"
    nodes = len(profile.get("nodes", ()))
    if nodes:
        extent += f", on {nodes} node{'s' if nodes > 1 else ''}"
    checks = sum(judgement.checks for judgement in session.judgements.values())
    sizes = ", ".join(map(str, session.worlds))
    return [
        f"           {len(session.judgements)} rules, {checks} checks; {extent}, world sizes "
        f"{sizes}, "
        f"torch {profile['torch']}",
        f"           {session.certificate_path}",
    ]


def _evidence_lines(evidence: Mapping[str, Any]) -> list[str]:
    """Return the evidence of a failed run, cut to the size of a terminal."""
    lines = []
    for rank, kept in evidence.items():
        end = "killed by the kit" if kept.get("killed by the kit") else f"exit {kept['exit']}"
        lines.append(f"  {rank}: {end}")
        for name in ("traceback", "stacks", "output"):
            text = kept.get(name)
            if not text:
                continue
            tail = (
                _main_stack(text) if name == "stacks" else text.strip().splitlines()[-_SHOWN_LINES:]
            )
            lines.append(f"    {name}:")
            lines += [f"      {line}" for line in tail]
        if kept.get("last collectives"):
            lines.append("    last collectives:")
            lines += [f"      {line}" for line in kept["last collectives"]]
    return lines


def _main_stack(text: str) -> list[str]:
    """Return the stack of the main thread, innermost frames first, without the host's frames."""
    blocks = text.strip().split("\n\n")
    block = next((block for block in reversed(blocks) if "rank.py" in block), blocks[-1])
    return block.splitlines()[:_SHOWN_FRAMES]
