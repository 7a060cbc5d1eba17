"""Tests of the summary on the page of a CI job.

No text of a subject may become more than text there, whatever Markdown or HTML it contains.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from conformance.__main__ import main
from conformance.certificates.markdown import block, span
from conformance.certificates.markdown_summary import gate_markdown, session_markdown
from tests.made_certificates import Body, certificate, changed, ran, rule_of, written

HOSTILE = [
    "<script>alert(1)</script>",
    "</code></pre><img src=x onerror=alert(1)>",
    "[a](https://example.org) ![b](https://example.org/x.png) https://example.org "
    "www.example.org a@example.org",
    "`` ` ``` </details>",
    "```\n# heading\n- item\n```\n<b>bold</b>",
    "a | b |\n|---|---|\n| <i>c</i> | d |",
    "\n\n~~~\n<table>\n\n**strong** @someone #1",
    "\x1b[31mred\x1b[0m \u202egnorts \x07",
    "    <!-- \n\n--> $x$ &lt; \\` \\| \\",
]
ALLOWED = {
    *(
        "heading_open",
        "heading_close",
        "paragraph_open",
        "paragraph_close",
        "inline",
        "text",
        "code_inline",
        "softbreak",
        "fence",
    ),
    *(
        "bullet_list_open",
        "bullet_list_close",
        "list_item_open",
        "list_item_close",
        "strong_open",
        "strong_close",
    ),
    *(
        f"{part}_{end}"
        for part in ("table", "thead", "tbody", "tr", "th", "td")
        for end in ("open", "close")
    ),
}


def report(body: Body, **changes: Any) -> Body:
    """Return the report of a session that refused the subject of a certificate."""
    made: Body = {
        key: json.loads(json.dumps(body[key]))
        for key in ("kit", "subject", "claims", "profile", "date", "rules")
    }
    ran(made, "2.2", "values@3", verdict="fail", reason="off")
    failure = {
        "expected": "mean 1 within 3e-08",
        "actual": "2 on rank 0",
        "cause": "the sum, not the mean",
        "evidence": {},
    }
    rule_of(made, "2.2").update(requirement="The mean.", failures=[failure, failure])
    ran(made, "10.1", verdict="fail", reason="it waits in wait()")
    rule_of(made, "10.1").update(reason="it waits in wait()")
    rule_of(made, "2.9").update(
        verdict="not applicable",
        reason="refused with an error on every rank: no",
        runs={},
        checks=0,
    )
    return {**made, "verdict": "refused", "reasons": ["2.2 random gradients"], **changes}


def types(markdown: str) -> Iterator[tuple[str, str]]:
    """Yield (type, content) of every token of a text, as GitHub's Markdown renders it."""
    parser = MarkdownIt("gfm-like", {"html": True, "linkify": True})
    for token in parser.parse(markdown):
        yield token.type, token.content
        yield from ((child.type, child.content) for child in token.children or ())


def everywhere(value: Any, text: str) -> Any:
    """Return a body in which a text replaces every text that is no key.

    Verdicts, levels and numbers of rules stay, because the summary depends on them.
    """
    if isinstance(value, dict):
        kept = ("verdict", "level", "rule")
        return {
            key: one if key in kept and isinstance(one, str) else everywhere(one, text)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [everywhere(one, text) for one in value]
    return text if isinstance(value, str) else value


def test_a_refusal() -> None:
    page = session_markdown(report(certificate()))
    assert page.startswith("### REFUSED `mypkg.hooks:half` as `rounded(float16)`\n")
    for part in (
        "**`2.2`** `Gives the mean of random gradients within the bound of a sum`",
        "Requirement:  The mean.\nRun:          values@3\n"
        "Expected:     mean 1 within 3e-08\nActual: ",
        "Likely cause: the sum, not the mean\n",
        "Limits:\n\n- `2.9 Averages or refuses sparse gradients: "
        "refused with an error on every rank: no`",
        "Advice:\n\n- `10.1 Returns without waiting for its communication: it waits in wait()`",
        "| `2.4` `Keeps the precision of float32, float64, float16 and bfloat16` | `0.31` |",
        "Bytes sent by `13.7`: `0.5` of the bytes without compression",
        "profile `gloo-cpu`, world sizes `1, 2, 3, 4`",
    ):
        assert part in page
    assert "10.4" not in page  # a rule for a claim that is not made is no limit
    assert "Because" not in page


def test_a_certificate() -> None:
    page = session_markdown(certificate())
    assert page.startswith("### CERTIFIED `mypkg.hooks:half` as `rounded(float16)`\n")
    assert "Limits" not in page


def test_a_development_run() -> None:
    body = report(certificate(), verdict="not certified", reasons=["world size 1 was left out"])
    page = session_markdown(body)
    assert page.startswith("### NOT JUDGED IN FULL `mypkg.hooks:half`")
    assert "Nothing failed, and there is no certificate." in page
    assert "Because:\n\n- `world size 1 was left out`" in page


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_more_than_text(text: str) -> None:
    for body in (certificate(), report(certificate()), report(certificate(), verdict="kit error")):
        page = session_markdown(everywhere(body, text)) + gate_markdown(text, [text], [text])
        assert {kind for kind, _ in types(page)} <= ALLOWED
        assert "".join(page.split("\n")).isprintable()
    shown = [
        content
        for kind, content in types(f"x {span(text)} y\n\n{block(text)}\n")
        if kind in ("code_inline", "fence")
    ]
    assert len(shown) == 2


def test_text_that_is_not_escaped_would_be_found() -> None:
    found = {kind for text in HOSTILE for kind, _ in types(f"- {text}\n")}
    assert {"html_inline", "link_open", "image"} <= found - ALLOWED


def test_text_is_shown_unchanged() -> None:
    for text in ("a `b` c", "``", "`", "x|y", "<b>", "a  b"):
        (code,) = (
            content
            for kind, content in types(span(text).replace("\\|", "|"))
            if kind == "code_inline"
        )
        assert code == " ".join(text.split())
        (fenced,) = (content for kind, content in types(block(text)) if kind == "fence")
        assert fenced == text + "\n"


def test_a_pipe_does_not_end_a_cell() -> None:
    cells = [
        content
        for kind, content in types(f"| a | b |\n|---|---|\n| {span('x|y')} | z |\n")
        if kind == "code_inline"
    ]
    assert cells == ["x|y"]


def test_long_text_is_cut() -> None:
    text = block("line\n" * 10_000)
    assert text.endswith("\n[...]\n```")
    assert len(text) < 1000
    assert len(block("x" * 10**6)) < 5000


def test_the_command_prints_or_appends(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    files = [
        written(tmp_path / "c.json", certificate()),
        written(tmp_path / "r.json", report(certificate())),
    ]
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert main(["summary", *map(str, files)]) == 0
    printed = capsys.readouterr().out
    assert "### CERTIFIED" in printed
    assert "### REFUSED" in printed
    page = tmp_path / "page.md"
    page.write_text("before\n\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    assert main(["summary", *map(str, files)]) == 0
    assert capsys.readouterr().out == ""
    assert page.read_text().strip() == f"before\n\n{printed.strip()}"


@pytest.mark.parametrize(
    ("body", "code", "expected"),
    [
        (lambda: {**certificate(), "date": "never"}, 1, "was edited"),
        (
            lambda: changed(certificate(), lambda b: b["rules"].pop(0)),
            1,
            "is from a development run",
        ),
        (lambda: {"verdict": "refused", "rules": [3]}, 1, "is no report that this kit can read"),
        (lambda: {}, 1, "is no certificate"),
    ],
)
def test_invalid_files_are_refused(
    body: Any, code: int, expected: str, tmp_path: Path, capsys: Any
) -> None:
    assert main(["summary", str(written(tmp_path / "c.json", body()))]) == code
    assert expected in capsys.readouterr().err


def test_a_missing_file_is_a_usage_error(tmp_path: Path, capsys: Any) -> None:
    assert main(["summary", str(tmp_path / "none.json")]) == 4
    assert (
        capsys.readouterr().err
        == f"summary: {tmp_path / 'none.json'}: cannot be read (No such file or directory)\n"
    )


def test_a_folder_stands_for_all_reports_in_it(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert main(["summary", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(
        f"### NOT JUDGED\n\nThere is no report in `{tmp_path}`"
    )
    assert main(["summary", str(tmp_path / "results")]) == 0
    assert "NOT JUDGED" in capsys.readouterr().out
    (tmp_path / "a").mkdir()
    written(tmp_path / "a" / "report.json", report(certificate()))
    written(tmp_path / "a" / "certificate.json", certificate())
    assert main(["summary", "--output", str(tmp_path / "s.md"), str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "s.md").read_text().count("### ") == 1
    assert (
        "CERTIFIED" not in (tmp_path / "s.md").read_text()
    )  # reports alone count: a certificate may be from an earlier run


def test_the_gate_appends_its_own_summary(tmp_path: Path, capsys: Any) -> None:
    old = written(tmp_path / "o.json", certificate())
    page = tmp_path / "page.md"
    new = written(
        tmp_path / "n.json", changed(certificate(), lambda b: b["claims"].update(text="exact"))
    )
    assert main(["gate", "--baseline", str(old), "--summary", str(page), str(new)]) == 1
    assert page.read_text().startswith(
        "### Gate: refused\n\n`mypkg.hooks:half as exact, profile gloo-cpu`\n\n"
        "Worse:\n\n- `changed claim: "
    )
    capsys.readouterr()
