"""Versions of torch: the supported range, messages for others, and faults of versions."""

from pathlib import Path

import pytest
import tomllib

from conformance import plugin
from conformance.judging.rule import Rule
from conformance.judging.run_failures import failed_run, fault_of_torch
from conformance.judging.verdict import Verdict
from conformance.records.files import MODEL_MADE, RAISED
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.rules import book
from conformance.scenarios.hook import COMPLEX, VALUES
from conformance.session.blame import consequence
from conformance.subjects.claims import parse_claims
from conformance.torch_versions import tested
from conformance.torch_versions.faults import FAULTS, fault_behind, lines_of
from conformance.torch_versions.tested import (
    NEWEST,
    OLDEST,
    note_untested,
    reason_unsupported,
    release,
)
from tests.made_runs import event, made_run

ROOT = Path(__file__).resolve().parents[2]
REFUSED = "Invalid scalar type"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.4.1", (2, 4)),
        ("2.13.0+cpu", (2, 13)),
        ("2.16.0a0+git1234", (2, 16)),
        ("2.6.0a0+ecf3bae40a.nv25.01", (2, 6)),
    ],
)
def test_release(version: str, expected: tuple[int, int]) -> None:
    assert release(version) == expected


def test_a_missing_or_old_torch_is_told_what_to_install() -> None:
    missing = reason_unsupported(None)
    assert missing is not None
    assert missing.startswith("torch is not installed")
    assert "https://download.pytorch.org/whl/cpu" in missing
    old = reason_unsupported("2.3.1")
    assert old is not None
    assert "older than 2.4" in old
    assert "\n" not in missing + old
    assert reason_unsupported("2.4.0") is None


def test_the_plugin_refuses_a_missing_torch_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: None)
    options = plugin.options_of(_namespace())
    assert options.named_subjects
    with pytest.raises(pytest.UsageError, match="torch is not installed"):
        plugin._prepare(pytestconfig, _namespace())


def _namespace() -> plugin.argparse.Namespace:
    parser = plugin.argparse.ArgumentParser()
    plugin.add_options(parser.add_argument)
    return parser.parse_args(["--hook", "hooks_ref:allreduce_hook"])


def test_a_newer_torch_is_noted_with_the_tested_range() -> None:
    assert note_untested("2.13.0") is None
    newer = f"{NEWEST[0]}.{NEWEST[1] + 1}.0"
    note = note_untested(newer)
    assert note is not None
    assert "2.4 to " in note
    assert reason_unsupported(newer) is None


def test_the_oldest_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, OLDEST))
    assert f"torch>={oldest}" in project["dependencies"]
    assert f"torch>={oldest}" in tested.INSTALL


def test_a_fault_belongs_to_its_versions_scenarios_and_message() -> None:
    assert fault_behind("2.8.0", COMPLEX, REFUSED) is FAULTS[0]
    assert fault_behind("2.9.1", COMPLEX, REFUSED) is None
    assert fault_behind("2.8.0", VALUES, REFUSED) is None
    assert fault_behind("2.8.0", COMPLEX, "out of memory") is None


def test_the_rules_of_a_fault_read_scenarios_that_have_it() -> None:
    rules: dict[str, Rule] = book()
    for fault in FAULTS:
        version = ".".join(map(str, fault.until))
        reading = {
            number
            for number, rule in rules.items()
            if rule.on
            and all(fault_behind(version, scenario, fault.error) is fault for scenario in rule.on)
        }
        assert set(fault.rules) == reading


def test_the_startup_line_names_the_rule() -> None:
    lines = lines_of("2.6.0", "gloo")
    assert lines["2.8"] == [
        "torch 2.6.0 cannot make a DDP model with complex parameters over Gloo "
        "(pytorch#156632): 2.8 does not apply"
    ]
    assert lines_of("2.6.0", "nccl") == {}
    assert lines_of("2.9.1", "gloo") == {}


def met_while_the_model_was_made(*messages: str, where: str = MODEL_MADE) -> Run:
    """Return a run whose ranks ended with these errors, on torch 2.6.0."""
    run = Run(COMPLEX, len(messages), [])
    for rank, message in enumerate(messages):
        error = event(
            "error",
            -1,
            where=where,
            torch="2.6.0",
            type="RuntimeError",
            message=message,
            traceback="",
        )
        run.ranks.append(RankRecord(rank, [error], exit=RAISED))
    return run


def test_a_fault_of_torch_makes_the_rule_not_applicable() -> None:
    rules = book()
    run = met_while_the_model_was_made(REFUSED, "Connection reset by peer")
    failed = failed_run(run)
    assert failed is not None
    found = consequence(rules, rules["2.8"], parse_claims("exact"), run, failed)
    assert found is not None
    assert found.verdict is Verdict.NOT_APPLICABLE
    assert "torch 2.6.0 cannot make a DDP model" in found.reason
    assert "pytorch#156632" in found.reason


@pytest.mark.parametrize(
    "run",
    [
        met_while_the_model_was_made(REFUSED, "out of memory"),
        met_while_the_model_was_made(REFUSED, REFUSED, where="register"),
        met_while_the_model_was_made(REFUSED, REFUSED, where="backward"),
        made_run(),
    ],
)
def test_another_failure_is_no_fault_of_torch(run: Run) -> None:
    assert fault_of_torch(run) is None
