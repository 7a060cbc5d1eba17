"""The texts for people, rendered from made judgements: report.html, report.json, the terminal."""

import json
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.certificates.certificate import REQUIRED_WORLDS, Conclusion, conclude
from conformance.judging.rule import MUST
from conformance.judging.verdict import Verdict
from conformance.session.options import Options
from conformance.session.report import write_report
from conformance.session.session import Session
from conformance.session.terminal import conclusion_lines, conclusion_text, failure_text
from tests.made_certificates import judged
from tests.made_sessions import CLAIMS, Made, conclusion_of, failed, made_session, of_verdict

HOSTILE = "</pre><script>alert('x')</script><img src=x onerror=alert(1)> & \udc80"
TRACEBACK = 'Traceback (most recent call last):\n  File "mypkg.py", line 3, in hook\nValueError: no'
VOID = {"meta", "input", "br", "img", "link"}


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
    return made_session


def written(session: Session) -> tuple[Page, str]:
    """Write the report; return the page, parsed and as text."""
    conclusion = conclusion_of(session)
    write_report(session, conclusion)
    text = (session.folder / "report.html").read_text()
    return Page(text), text


def closing(session: Session) -> list[str]:
    """Return the closing lines in the terminal."""
    conclusion = conclusion_of(session)
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
    for place in session.rules["2.2"].remedy.split("; "):
        assert any(place in text for text in page.texts["dd"])
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


def test_a_should_rule_that_does_not_hold_is_advice_and_no_failure(made: Made) -> None:
    advice = next(number for number, rule in made().rules.items() if rule.level != MUST)
    page, text = written(made(failed(advice)))
    assert "NOT JUDGED IN FULL" in text
    assert "REFUSED" not in text
    assert "1 advice" in page.texts["span"]
    assert not [words for words in page.texts["span"] if "fail" in words]
    assert not [words for words in page.texts["summary"] if "fail" in words]


def test_claims_that_nobody_declared_are_the_default(made: Made) -> None:
    session = made()
    session.header["claims"]["declared_by"] = "nobody: exact is the default"
    page, _ = written(session)
    assert "not declared: exact is the default" in page.texts["small"]


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
    session = made(failed("1.5"), *several, *hung, *single, *other)
    lines = [line for line in closing(session) if "not run" in line][1:]
    first, second = numbers[23], numbers[24]
    assert lines == [
        "    23 more rules were not run because this one fails: "
        f"{', '.join(sorted(numbers[:8], key=numbers.index))}, ...",
        f"not run  {first} {session.rules[first].title}: values@1: nothing to judge",
        f"not run  {second} {session.rules[second].title}: no world size of this profile runs it",
    ]
    # A partial run has no failed rule that the others could follow from.
    unexplained = of_verdict(Verdict.NOT_RUN, numbers[:20], "a first reason")
    more = of_verdict(Verdict.NOT_RUN, numbers[20:23], "a second reason")
    session = made(failed("1.5"), *unexplained, *more, *single, *other)
    lines = [line for line in closing(session) if line.startswith("not run")]
    assert lines == [
        f"not run  20 rules: {', '.join(numbers[:8])}, ...: a first reason",
        f"not run  3 rules: {', '.join(numbers[20:23])}: a second reason",
        "not run  2 more rules, for 2 other reasons, which report.html gives",
    ]


def test_a_development_run_names_its_reasons_once(made: Made) -> None:
    session = made(*of_verdict(Verdict.NOT_RUN, ["2.2", "2.3"], "judged only if 2.1 holds"))
    lines = closing(session)
    assert not [line for line in lines if line.startswith("not run")]
    assert "  2.2, 2.3 were not run: judged only if 2.1 holds" in lines


def test_a_whole_run_without_a_certificate_is_no_development_run(made: Made) -> None:
    session = made()
    reason = "node 1 was lost, and its runs were repeated on others"
    lines = conclusion_lines(session, Conclusion(7, "not certified", [reason]))
    start = lines.index("nothing failed, and there is no certificate:")
    assert lines[start - 1].startswith("NOT JUDGED IN FULL  ")
    assert lines[start + 1] == f"  {reason}"
    assert not [line for line in lines if "development" in line]


def test_a_broken_run_gets_advice_on_broken_runs_first(made: Made) -> None:
    broke = {"rank 0": {"exit": 70, "traceback": TRACEBACK}}
    session = made()
    remedy = session.rules["2.2"].remedy.replace("; ", f"\n{'':16}")
    text = failure_text(session, session.rules["2.2"], failed("2.2", **broke))
    assert f"  Look at:      the place where the stacks of the ranks end\n{'':16}a coll" in text
    assert f"then {remedy}\n" in text
    assert f"  Look at:      {remedy}\n" in failure_text(
        session, session.rules["2.2"], failed("2.2")
    )


@pytest.mark.parametrize("number", ["1.5", "2.2"])
def test_an_error_of_the_subject_gets_advice_on_its_traceback(made: Made, number: str) -> None:
    raised = {"rank 1": {"exit": 70, "traceback": TRACEBACK}}
    actual = "rank 1 raised ValueError: no (in hook call 0, step 0)"
    session = made()
    rule = session.rules[number]
    text = failure_text(session, rule, failed(number, actual, **raised))
    assert "  Look at:      the last line of the traceback that is in your file\n" in text
    assert "stacks of the ranks" not in text
    # The remedy of a rule on broken runs is about runs without an error.
    assert ("then " in text) == (number == "2.2")
    assert (rule.remedy.split("; ")[0] in text) == (number == "2.2")


@pytest.mark.parametrize(
    ("given", "shown"), [(None, ""), ("1,2,3,4", ""), ("3,2", " --world-size 2,3")]
)
def test_the_command_of_a_failure_repeats_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {} if given is None else {"world_size": given}
    pool: Any = SimpleNamespace(interruptions=[])
    session = Session.of(Options(hook="mypkg:half", seed=7, **sizes), pool, runs=False)
    assert session.rerun("2.2") == (
        f"pytest --pyargs conformance --hook mypkg:half --seed 7{shown} --rule 2.2"
    )


def test_a_kit_error_gets_no_advice_on_the_subject(made: Made) -> None:
    session = made()
    (broken,) = of_verdict(Verdict.KIT_ERROR, ["2.2"], "{run}: the rule itself failed")
    text = failure_text(session, session.rules["2.2"], broken)
    assert session.rules["2.2"].remedy not in text
    assert (
        "  Look at:      the kit and this machine: the subject was not judged by this rule" in text
    )


def test_the_first_cause_comes_first_and_the_summary_fits_a_screen(made: Made) -> None:
    session = made()
    numbers = [one for one in session.judgements if session.rules[one].level == MUST]
    first, *others = numbers[:30]
    long = "wrong " * 100
    following = of_verdict(Verdict.NOT_RUN, numbers[30:70], f"judged only if {first} holds")
    session = made(failed(first), *(failed(number, long) for number in others), *following)
    session.judgements = {
        number: session.judgements[number] for number in numbers if number in session.judgements
    }
    lines = closing(session)
    start = next(place for place, line in enumerate(lines) if line.startswith("REFUSED"))
    title = session.rules[first].title
    assert lines[start : start + 4] == [
        "REFUSED  mypkg.hooks:half  as rounded(float16)",
        f"  {first} {title}  [values@2]",
        "    Expected:     mean 1 within 3e-08",
        "    Actual:       2 on rank 0",
    ]
    assert any(line.startswith("    40 more rules were not run because") for line in lines)
    assert sum(line.count("wrong wrong") > 0 for line in lines) == 6
    hidden = ", ".join(others[6:14])
    assert f"  and {len(others) - 6} more rules that fail: {hidden}, ...; see report.html" in lines
    rows = sum(1 + len(line) // 100 for line in lines)
    assert rows <= 40, "\n".join(lines)


def test_a_lossy_certificate_fits_a_screen(made: Made) -> None:
    claims = "rounded(float16)"
    numbers = list(made().judgements)
    groups = [
        of_verdict(
            Verdict.NOT_APPLICABLE,
            numbers[begin : begin + 3],
            f"a reason {begin}, because the subject claims {claims}",
        )
        for begin in range(0, 30, 3)
    ]
    session = made(*(one for group in groups for one in group))
    session.judgements["13.7"] = judged(session.rules["13.7"], CLAIMS)
    lines = closing(session)
    limits = [line for line in lines if line.startswith("limit")]
    assert limits == [
        f"limit   {', '.join(numbers[:3])}: a reason 0, because of its claims",
        f"limit   {', '.join(numbers[3:6])}: a reason 3, because of its claims",
        f"limit   {', '.join(numbers[6:9])}: a reason 6, because of its claims",
        f"limit   and 21 more rules: {', '.join(numbers[9:17])}, ...; report.html says why",
    ]
    assert len(lines) <= 24


def test_numbers_that_were_not_tried_are_named(made: Made) -> None:
    """The terminal names them beside those that runs were made for."""
    session = made()
    session.header["coverage"] = {
        "measured": True,
        "required": False,
        "files": [{"file": "pkg/a.py"}],
        "untaken": [
            {"file": "pkg/a.py", "line": 5, "source": "if idle >= 40:", "side": "never true"}
        ],
        "never_called": [],
        "probes": [
            {"value": 65536, "file": "pkg/a.py", "line": 3, "runs": []},
            {"value": 40, "file": "pkg/a.py", "line": 5, "runs": []},
        ],
        "out_of_reach": [{"value": 10**9, "file": "pkg/a.py", "line": 7, "runs": []}],
    }
    lines = [line.strip() for line in closing(session)]
    assert "runs were made for these values in the code: 65536" in lines
    assert "runs were made for 40 (pkg/a.py:5), but none took the branch there" in lines
    assert (
        "no run was made for 1000000000 (pkg/a.py:7): no scenario reaches it, or eight others "
        "were tried before it"
    ) in lines
