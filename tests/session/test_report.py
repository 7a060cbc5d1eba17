"""The texts for people, rendered from made judgements: report.html, report.json, the terminal."""

import json
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.certificates.certificate import REQUIRED_WORLDS, conclude
from conformance.judging.rule import MUST
from conformance.judging.verdict import Failure, Judgement, Verdict
from conformance.session.options import Options
from conformance.session.report import (
    conclusion_lines,
    conclusion_text,
    failure_text,
    write_report,
)
from conformance.session.session import Session
from conformance.subjects.claims import parse_claims
from tests.made_certificates import header, judged

CLAIMS = parse_claims("rounded(float16)")

HOSTILE = "</pre><script>alert('x')</script><img src=x onerror=alert(1)> & \udc80"
TRACEBACK = 'Traceback (most recent call last):\n  File "mypkg.py", line 3, in hook\nValueError: no'
VOID = {"meta", "input", "br", "img", "link"}

Made = Callable[..., Session]


class Page(HTMLParser):
    """A parsed page: its tags with their attributes and places, and the text by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.order: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        assert self.open == [], "tags that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if named := dict(attrs).get("id"):
            self.order.append(named)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of every tag of a name."""
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return a function that makes a session from the judgements that are not a pass."""
    monkeypatch.chdir(tmp_path)

    def make(*judgements: Judgement) -> Session:
        options = Options(hook="mypkg.hooks:half", claims="rounded(float16)")
        pool: Any = SimpleNamespace(interruptions=[])
        session = Session.of(options, pool, runs=False)
        session.header = header()
        session.judgements = {
            number: judged(session.rules[number], CLAIMS)
            for number in session.selected
            if number != "13.7"
        }
        session.judgements |= {judgement.number: judgement for judgement in judgements}
        return session

    return make


def failed(number: str, actual: str = "2 on rank 0", **evidence: Any) -> Judgement:
    """Return the judgement on a rule that fails in one run."""
    failure = Failure("mean 1 within 3e-08", actual, "the sum, not the mean", evidence)
    runs = {"values@2": {"verdict": "fail", "reason": actual, "checks": 3}}
    return Judgement(number, Verdict.FAIL, f"values@2: {actual}", [failure, failure], runs)


def of_verdict(verdict: Verdict, numbers: Iterable[str], reason: str) -> list[Judgement]:
    """Return judgements with a verdict for a reason, each in a run of another world size."""
    return [
        Judgement(number, verdict, reason.format(run=f"values@{world + 1}"))
        for world, number in enumerate(numbers)
    ]


def written(session: Session) -> tuple[Page, str]:
    """Write the report; return the page, parsed and as text."""
    conclusion = conclude(
        session.rules, session.judgements, session.header, REQUIRED_WORLDS, session.subject.kind
    )
    write_report(session, conclusion)
    text = (session.folder / "report.html").read_text()
    return Page(text), text


def closing(session: Session) -> list[str]:
    """Return the closing lines in the terminal."""
    conclusion = conclude(
        session.rules, session.judgements, session.header, REQUIRED_WORLDS, session.subject.kind
    )
    return conclusion_lines(session, conclusion)


def test_the_verdict_and_the_first_reason_are_on_top(made: Made) -> None:
    page, text = written(made(failed("2.2"), failed("8.1")))
    assert page.texts["title"] == ["mypkg.hooks:half: refused"]
    assert text.index("REFUSED") < text.index("rounded(float16)") < text.index("gloo-cpu")
    assert text.index("gloo-cpu") < text.index(": 2 on rank 0") < text.index("<article")


def test_the_page_needs_nothing_else(made: Made) -> None:
    page, _ = written(made(failed("2.2")))
    metas = {meta.get("name"): meta.get("content") for meta in page.all("meta")}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert metas["color-scheme"] == "light dark"
    assert not page.all("link")
    assert not page.all("img")
    assert all("src" not in script for script in page.all("script"))
    assert all(str(link["href"]).startswith("#") for link in page.all("a"))
    assert [field["type"] for field in page.all("input")] == ["search"]


def test_a_failure_has_its_remedy_and_its_command(made: Made) -> None:
    session = made(failed("2.2"))
    page, _ = written(session)
    labels = ["Requirement", "Expected", "Actual", "Likely cause", "Look at", "Rerun"]
    assert [text for text in page.texts["dt"] if text in labels][: len(labels)] == labels
    assert session.rules["2.2"].remedy in page.texts["dd"]
    assert session.rerun("2.2") in page.texts["code"]


def test_failures_come_before_everything_else(made: Made) -> None:
    advice = next(
        number
        for number, rule in made().rules.items()
        if rule.level != MUST and number in made().judgements
    )
    session = made(
        failed("9.1"),
        failed(advice),
        *of_verdict(Verdict.NOT_APPLICABLE, ["2.9"], "{run}: refused with an error"),
        *of_verdict(Verdict.NOT_RUN, ["2.2", "2.3"], "judged only if 2.1 holds"),
    )
    session.notes.append("the certificate of an earlier run is elsewhere")
    page, text = written(session)
    parts = ["failures", "9.1", "advice", advice, "limits", "not-run", "notes", "sections", "1.1"]
    assert [place for place in page.order if place in parts] == parts
    assert text.index("an earlier run") > text.index('id="9.1"')


def test_every_rule_has_one_anchor_and_every_link_leads_to_one(made: Made) -> None:
    session = made(failed("2.2"), failed("10.1"))
    page, _ = written(session)
    assert len(page.order) == len(set(page.order))
    assert set(session.judgements) <= set(page.order)
    assert {str(link["href"])[1:] for link in page.all("a")} <= set(page.order)


def test_sections_are_folded_with_counts(made: Made) -> None:
    page, _ = written(made(failed("2.2")))
    assert all("open" not in details for details in page.all("details"))
    assert "2 Equivalence with vanilla allreduce" in page.texts["b"]
    assert any(text.startswith(": ") and "1 fail" in text for text in page.texts["summary"])


def test_text_of_a_subject_stays_text(made: Made) -> None:
    evidence = {"rank 0": {"exit": 70, "output": HOSTILE, "traceback": HOSTILE}}
    session = made(
        failed("2.2", HOSTILE, **evidence),
        *of_verdict(Verdict.NOT_RUN, ["2.3"], HOSTILE),
        *of_verdict(Verdict.NOT_APPLICABLE, ["2.9"], HOSTILE),
    )
    session.notes.append(HOSTILE)
    session.header["claims"]["text"] = HOSTILE
    page, text = written(session)
    assert "<script>alert" not in text
    assert len(page.all("script")) == 1
    assert not page.all("img")


def test_a_report_with_a_hundred_failures_stays_small(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = made()
    line = "  File \"<stdin>\", line 1, in <module> & 'so on'\n"
    judgements = {}
    for index in range(100):
        kept = {"exit": 70, "traceback": line * 100, "stacks": line * 120, "output": line * 120}
        evidence = {
            f"rank {rank}": {**kept, "output": f"{rank}{index}{line * 120}"} for rank in range(4)
        }
        number = list(session.rules)[index]
        judgements[number] = failed(number, "<actual>" * 1000, **evidence)
    session.judgements = judgements
    page, text = written(session)
    assert len(page.all("article")) == 100
    assert len(text.encode()) < 3_000_000
    report = json.loads((session.folder / "report.json").read_text())
    kept = report["rules"][0]["failures"][0]["evidence"]["rank 3"]
    assert kept["traceback"] == line * 100
    assert "characters; report.json has them ...]" in text


def test_a_single_failure_is_shown_whole(made: Made) -> None:
    output = "\n".join(f"line {number}" for number in range(600))
    page, _ = written(made(failed("2.2", **{"rank 0": {"exit": 70, "output": output}})))
    assert output in page.texts["pre"]


def test_report_json_gains_two_keys_for_failed_rules(made: Made) -> None:
    session = made(failed("2.2"))
    written(session)
    report = json.loads((session.folder / "report.json").read_text())
    entries = {entry["rule"]: entry for entry in report["rules"]}
    assert entries["2.2"]["remedy"] == session.rules["2.2"].remedy
    assert entries["2.2"]["rerun"] == session.rerun("2.2")
    added = set(entries["2.2"]) - set(entries["2.1"])
    assert added == {"reason", "remedy", "rerun"}


def test_equal_evidence_is_shown_once(made: Made) -> None:
    same = {"exit": 70, "traceback": TRACEBACK}
    judgement = failed("2.2", **{"rank 0": same, "rank 1": same})
    session = made(judgement)
    text = failure_text(session, session.rules["2.2"], judgement)
    assert text.count("ValueError: no") == 1
    assert "  ranks 0 and 1: exit 70\n    traceback:\n" in text
    page, _ = written(session)
    assert page.texts["summary"][1] == "ranks 0 and 1: exit 70"
    assert page.texts["pre"] == [TRACEBACK]


def test_an_equal_traceback_beside_another_output_is_shown_once(made: Made) -> None:
    same = {"exit": 70, "traceback": TRACEBACK}
    judgement = failed("2.2", **{"rank 0": same, "rank 1": {**same, "output": "more"}})
    session = made(judgement)
    text = failure_text(session, session.rules["2.2"], judgement)
    assert text.count("ValueError: no") == 1
    assert "  rank 1: exit 70\n    traceback:\n      the same as on rank 0\n" in text


def test_limits_with_the_same_reason_share_a_line(made: Made) -> None:
    reason = "{run}: under compressed one step decides nothing"
    session = made(
        *of_verdict(Verdict.NOT_APPLICABLE, ["2.2", "2.3", "8.5"], reason),
        *of_verdict(Verdict.NOT_APPLICABLE, ["2.9"], "{run}: refused with an error"),
    )
    lines = closing(session)
    limits = [line for line in lines if line.startswith("limit")]
    assert limits == [
        "limit   2.2, 2.3, 8.5: under compressed one step decides nothing",
        f"limit   2.9 {session.rules['2.9'].title}: values@1: refused with an error",
    ]


def test_a_certificate_is_named_in_the_last_lines(made: Made) -> None:
    session = made()
    session.judgements["13.7"] = judged(session.rules["13.7"], CLAIMS)
    lines = closing(session)
    assert lines[0] == "letters: n not applicable"
    assert lines[-3] == "CERTIFIED  mypkg.hooks:half  as rounded(float16)"
    assert lines[-1].strip().endswith("certificate.json")
    page, _ = written(session)
    assert page.texts["title"] == ["mypkg.hooks:half: certified"]
    assert not page.all("article")


def test_letters_are_explained_if_they_occur(made: Made) -> None:
    advice = next(
        number
        for number, rule in made().rules.items()
        if rule.level != MUST and rule.kind == "hook"
    )
    session = made(
        failed(advice), *of_verdict(Verdict.NOT_RUN, ["2.2"], "judged only if 2.1 holds")
    )
    expected = "n not applicable, - not run, a advice (a SHOULD rule does not hold)"
    assert closing(session)[0] == f"letters: {expected}"
    session.judgements = {"2.1": judged(session.rules["2.1"], CLAIMS)}
    assert not closing(session)[0].startswith("letters")
    session.judgements = {"2.2": failed("2.2"), "10.4": judged(session.rules["10.4"], CLAIMS)}
    # A test suite that calls certify() sees no letters.
    conclusion = conclude(session.rules, session.judgements, session.header, REQUIRED_WORLDS)
    assert "letters" not in conclusion_text(session, conclusion)


def test_rules_that_were_not_run_are_counted_by_reason(made: Made) -> None:
    session = made()
    numbers = [number for number in session.judgements if number != "1.5"]
    several = of_verdict(Verdict.NOT_RUN, numbers[:20], "judged only if 1.5 holds")
    hung = of_verdict(Verdict.NOT_RUN, numbers[20:23], "{run}: not tried: it hung in values@2")
    single = of_verdict(Verdict.NOT_RUN, numbers[23:24], "{run}: nothing to judge")
    other = of_verdict(Verdict.NOT_RUN, numbers[24:25], "no world size of this profile runs it")
    session = made(failed("1.5"), *several, *hung, *single)
    lines = [line for line in closing(session) if line.startswith("not run")]
    assert lines == [
        f"not run  20 rules: judged only if 1.5 holds: {', '.join(numbers[:8])}, ...",
        f"not run  3 rules: not tried: it hung in values@2: {', '.join(numbers[20:23])}",
        f"not run  {numbers[23]} {session.rules[numbers[23]].title}: values@1: nothing to judge",
    ]
    session = made(failed("1.5"), *several, *hung, *single, *other)
    lines = [line for line in closing(session) if line.startswith("not run")]
    assert len(lines) == 3
    assert lines[-1] == "not run  2 more rules, for 2 other reasons"


def test_a_development_run_names_its_reasons_once(made: Made) -> None:
    session = made(*of_verdict(Verdict.NOT_RUN, ["2.2", "2.3"], "judged only if 2.1 holds"))
    lines = closing(session)
    assert not [line for line in lines if line.startswith("not run")]
    assert "  2.2, 2.3 were not run: judged only if 2.1 holds" in lines
