"""Ten forged certificates with digests that fit, and what the gate finds of each.

Each forgery is made twice: by an edit of one entry, and by a careful author who also edits all
entries that follow from it. The gate judges both without a baseline, with the baseline, and with
the signature of the certificate that was forged. docs/certificate.md has the table of the results,
which EXPECTTEST_ACCEPT=1 writes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expecttest
import pytest

from conformance.__main__ import main
from conformance.certificates.reproduction import reproduce_commands
from tests.gpg_keys import Signer
from tests.made_certificates import (
    Body,
    certificate,
    changed,
    command,
    forged,
    ran,
    rule_of,
    set_variables,
    without,
    written,
)

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "certificate.md"
BEGIN = "<!-- forgeries: written by tests/cli/test_forgeries.py -->\n"
END = "<!-- end of forgeries -->\n"
HOLDS = "**holds**"


@dataclass(frozen=True)
class Forgery:
    """One forgery.

    Attributes:
        name: of the forged entry.
        edit: the edit of that entry alone.
        careful: the edit of all entries that follow from it, too.
        carefully: the careful edit in words.
    """

    name: str
    edit: Callable[[Body], object]
    careful: Callable[[Body], object]
    carefully: str


def whole_profile(b: Body) -> None:
    b["profile"].update(name="nccl", backend="nccl", device="cuda", devices=8, nccl=[2, 27, 3])
    b["profile"].update(torch="2.13.0+cu126")
    set_variables(b)
    b["command"] += " --backend nccl"


def margins(b: Body) -> None:
    for run in rule_of(b, "2.2")["runs"].values():
        run["margin"] = 0.1
    rule_of(b, "2.2")["margin"] = 0.1


def no_advice(b: Body) -> None:
    rule_of(b, "10.1").pop("reason", None)
    ran(b, "10.1", verdict="pass", reason="")
    b["advice"] = []


def other_subject(b: Body) -> None:
    b["subject"]["hook"] = "mypkg.hooks:other"
    b["command"] = command("hook", "mypkg.hooks:other", b["claims"]["text"])


def no_should_rules(b: Body) -> None:
    b["rules"] = [rule for rule in b["rules"] if rule["level"] == "MUST"]
    b["advice"] = []


def made_up_rule(b: Body) -> None:
    """Copy the entries of another rule."""
    made_up = {**rule_of(b, "2.4"), "rule": "2.3", "title": rule_of(b, "2.3")["title"]}
    without(b, "2.3")
    b["rules"].insert(0, made_up)


def current_golden_list(b: Body) -> None:
    """Give a certificate of an older golden list, which had no rule 23.1, the current digest."""
    without(b, "23.1")


def other_claim(b: Body) -> None:
    b["claims"]["text"] = "exact"
    b["command"] = command("hook", b["subject"]["hook"], "exact")


FORGERIES = [
    Forgery(
        "profile",
        lambda b: b["profile"].update(name="nccl"),
        whole_profile,
        "backend, device, GPUs, torch, command",
    ),
    Forgery(
        "date",
        lambda b: b.update(date="2999-01-01T00:00:00+00:00"),
        lambda b: b.update(date="2026-11-23T00:00:00+00:00"),
        "a day in the past",
    ),
    Forgery(
        "torch",
        lambda b: b["profile"].update(torch="1.8.0"),
        lambda b: b["profile"].update(torch="2.12.0+cpu"),
        "a supported version",
    ),
    Forgery(
        "margins", lambda b: rule_of(b, "2.2").update(margin=0.1), margins, "those of all runs"
    ),
    Forgery("advice", lambda b: b.update(advice=[]), no_advice, "the rule and its runs"),
    Forgery(
        "subject",
        lambda b: b["subject"].update(hook="mypkg.hooks:other"),
        other_subject,
        "the command",
    ),
    Forgery(
        "cut file",
        lambda b: b.update(rules=b["rules"][:20]),
        no_should_rules,
        "SHOULD rules and advice alone",
    ),
    Forgery(
        "development run",
        lambda b: without(b, "2.3"),
        made_up_rule,
        "the missing rule is made up",
    ),
    Forgery(
        "older golden list",
        lambda b: b["kit"].update(golden_list="00" * 32, version="0.0.9"),
        current_golden_list,
        "the digest of the current list",
    ),
    Forgery("claim", lambda b: b["claims"].update(text="exact"), other_claim, "the command"),
]


@pytest.fixture(scope="module")
def body() -> Body:
    """A certificate with advice."""
    return changed(certificate(), lambda b: ran(b, "10.1", verdict="fail", reason="it waits"))


@pytest.fixture
def gate(
    body: Body,
    tmp_path: Path,
    signer: Signer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Body], list[tuple[int, list[str]]]]:
    """Run the gate on a body without a baseline, with the original as the baseline, and with the
    signature of the original; return the exit code and the lines of each.
    """
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    original = written(tmp_path / "original.json", body)
    signature = signer.sign(original)
    ways = (
        (),
        ("--baseline", original),
        ("--signature", signature, "--key", signer.public_key),
    )

    def run(other: Body) -> list[tuple[int, list[str]]]:
        path = written(tmp_path / "certificate.json", other)
        results = []
        for options in ways:
            code = main(["gate", *map(str, options), str(path)])
            printed = capsys.readouterr()
            text = (printed.out + printed.err).replace(f"{tmp_path}/", "")
            results.append((code, text.splitlines()))
        return results

    return run


def made(body: Body, forgery: Forgery, *, careful: bool) -> Body:
    """Return a forged body with a digest that fits."""

    def edit(b: Body) -> None:
        (forgery.careful if careful else forgery.edit)(b)
        if careful:
            b["reproduce"] = reproduce_commands(b)

    return forged(body, edit)


def cell(code: int, lines: list[str]) -> str:
    """Return the first reason of a refusal, without the parts that change with the rule book."""
    if code == 0:
        return HOLDS
    reasons = [line.removeprefix("refused: ") for line in lines if line.startswith("refused: ")]
    reason = re.sub(r"^(?:certificate|original)\.json(?:\.asc)?: ", "", reasons[0])
    reason = re.sub(r"\d+ of \d+ (MUST rules are missing): .*", r"\1", reason)
    reason = re.sub(r"[0-9a-f]{16}", "…", reason.partition("; the golden list")[0])
    return f"refused: {reason.strip()}"


def rows_of(
    forgery: Forgery, body: Body, gate: Callable[[Body], list[tuple[int, list[str]]]]
) -> list[tuple[str, list[str]]]:
    """Return the two rows of a forgery in the table."""
    rows = []
    for careful in (False, True):
        results = gate(made(body, forgery, careful=careful))
        cells = [cell(*results[0])]
        # With a baseline, or a signature, the gate finds more: the reason that comes on top.
        for code, lines in results[1:]:
            more = [line for line in lines if line not in results[0][1]]
            cells.append(cell(code, more if any("refused" in line for line in more) else lines))
        title = f"{forgery.name}, and {forgery.carefully}" if careful else f"**{forgery.name}**"
        rows.append((title, cells))
    return rows


def test_an_unforged_certificate_holds(body: Body, gate: Any) -> None:
    unsigned, compared, signed = gate(body)
    assert [code for code, _ in (unsigned, compared, signed)] == [0, 0, 0]
    assert "not checked: unsigned: no signature was given (--signature FILE)" in unsigned[1][-2]
    assert any(line.startswith("note: signed by Kit <kit@example.org>, key ") for line in signed[1])
    assert not any("unsigned" in line for line in signed[1])


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.name)
def test_an_edit_of_one_entry_is_found(forgery: Forgery, body: Body, gate: Any) -> None:
    for code, lines in gate(made(body, forgery, careful=False)):
        assert code == 1
        assert lines[-1].startswith("GATE REFUSES")
        assert not any(line.startswith("not checked") for line in lines)


# The gate cannot find these without the original, or without its signature.
PASS_UNSIGNED = {
    *("profile", "date", "torch", "margins", "advice"),
    *("subject", "cut file", "development run", "claim"),
}
PASS_WITH_BASELINE = {"date", "torch", "margins", "advice", "development run"}


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.name)
def test_only_a_signature_reveals_a_careful_forgery(
    forgery: Forgery, body: Body, gate: Any
) -> None:
    unsigned, compared, signed = gate(made(body, forgery, careful=True))
    assert (unsigned[0] == 0) == (forgery.name in PASS_UNSIGNED), unsigned
    assert (compared[0] == 0) == (forgery.name in PASS_WITH_BASELINE), compared
    if unsigned[0] == 0:
        assert "not checked: unsigned" in unsigned[1][-2]
    assert signed[0] == 1
    assert any(
        "original.json.asc: is no trusted signature of certificate.json: signature bad" in line
        for line in signed[1]
    )


def test_the_table_in_the_docs_is_current(body: Body, gate: Any) -> None:
    """docs/certificate.md has this table; EXPECTTEST_ACCEPT=1 writes it."""
    lines = [
        "| forged | unsigned, no baseline | unsigned, with the baseline | with the signature |",
        "|---|---|---|---|",
    ]
    for forgery in FORGERIES:
        for title, cells in rows_of(forgery, body, gate):
            lines.append(f"| {title} | {' | '.join(text.replace('|', '/') for text in cells)} |")
    expected = BEGIN + "\n" + "\n".join(lines) + "\n\n" + END
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    if expecttest.ACCEPT:
        PAGE.write_text(before + expected + after, encoding="utf-8")
        return
    assert page == before + expected + after, "EXPECTTEST_ACCEPT=1 writes the table"
