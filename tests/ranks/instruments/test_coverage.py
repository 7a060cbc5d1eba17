"""Ranks note the lines and branches of the subject's own files, also on threads of Gloo's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.ranks.instruments import coverage
from conformance.records.run import Run
from conformance.scenarios.hook import VALUES
from conformance.session.coverage import measure
from tests.hooks_ref.algorithms import try_hook

NOTING = replace(VALUES, steps=("crafted",), observe=replace(VALUES.observe, coverage=True))
HERE = "tests.ranks.instruments.coverage_subjects"


def noted(pool: Pool, hook: str) -> Run:
    return try_hook(pool, NOTING, hook=hook)


def test_a_branch_in_a_callback_is_seen(pool: Pool) -> None:
    """Gloo's own thread runs the callback; no trace function of Python ever sees it."""
    run = noted(pool, f"{HERE}:decides_in_a_callback")
    coverage = measure([run]).coverage
    assert coverage is not None
    lines = [(one.source, one.side) for one in coverage.untaken]
    assert lines == [
        ("if total.numel() > 123_456:", "never true"),
        ("return total if total.dim() == 1 else total.flatten()", "never false"),
    ]
    assert [file.file.name for file in coverage.files] == [f"{HERE.replace('.', '/')}.py"]


def test_the_subject_runs_as_without_marks(pool: Pool) -> None:
    """A rank that also checks its own function: signature, pickle, closure, source and name."""
    run = noted(pool, f"{HERE}:checks_itself")
    assert run.finished


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (f"{HERE}:builtin", "no function of Python"),
        (
            "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook",
            "is not its own",
        ),
    ],
)
def test_code_without_a_source_is_not_measured(pool: Pool, hook: str, reason: str) -> None:
    measured = measure([noted(pool, hook)])
    assert measured.coverage is None
    assert reason in measured.reason


def test_a_reference_that_a_module_passes_on_is_measured(pool: Pool) -> None:
    """The host has imported the references before; the first rank notes where they lie."""
    runs = [noted(pool, f"{HERE}:passed_on") for _ in range(2)]
    measured = measure(runs)
    assert measured.coverage is not None, measured.reason
    assert not measured.reason
    assert "hooks_ref/default_hooks.py" in [file.file.name for file in measured.coverage.files]


@pytest.mark.parametrize(
    ("hook", "state", "reason"),
    [
        (
            "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook",
            f"{HERE}:no_state",
            "is not its own",
        ),
        (f"{HERE}:executed", None, "no source file"),
    ],
)
def test_other_code_is_measured_without_that_of_the_function(
    pool: Pool, hook: str, state: str | None, reason: str
) -> None:
    measured = measure([try_hook(pool, NOTING, hook=hook, state=state)])
    assert measured.coverage is not None
    assert reason in measured.reason
    assert [file.file.name for file in measured.coverage.files] == [f"{HERE.replace('.', '/')}.py"]


@pytest.mark.parametrize("hook", ["partial", "Callable()", "Decorated()", "bound"])
def test_other_callables_are_measured(pool: Pool, hook: str) -> None:
    measured = measure([noted(pool, f"{HERE}:{hook}")])
    assert measured.coverage is not None, measured.reason
    assert measured.coverage.files


def test_an_optimizer_whose_step_torch_has_wrapped_has_a_file() -> None:
    class Steps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    right = Steps.step.__code__
    Steps([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert Steps.step.__code__ is not right
    assert coverage.code_of_class(Steps) is right


def test_nothing_is_noted_unless_the_scenario_observes_it(pool: Pool) -> None:
    run = try_hook(pool, replace(NOTING, observe=VALUES.observe), hook=f"{HERE}:partial")
    assert [rank.coverage for rank in run.ranks] == [None, None]
    assert measure([run]).reason == "no rank noted which lines ran"


def test_marked_code_is_kept_for_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read it, unless the source is another one or the file was cut short."""
    monkeypatch.setattr(coverage, "_KEPT", [])
    monkeypatch.setattr(coverage, "_MARKED", {})
    coverage.keep_marked_code(tmp_path / "marked")
    code, count = coverage._marked_code("mine.py", b"x = 1\n")
    (file,) = (tmp_path / "marked").iterdir()
    marked = []
    monkeypatch.setattr(coverage, "_mark", lambda *given: marked.append(given) or (code, count))
    coverage._MARKED.clear()
    assert coverage._marked_code("mine.py", b"x = 1\n") == (code, count)
    assert marked == []
    coverage._marked_code("mine.py", b"x = 2\n")
    file.write_bytes(file.read_bytes()[:-3])
    coverage._MARKED.clear()
    coverage._marked_code("mine.py", b"x = 1\n")
    assert marked == [("mine.py", b"x = 2\n"), ("mine.py", b"x = 1\n")]
