"""The coverage of the subject's own files, over all runs of a session.

It is no rule of the book. A rule reads the runs of its own scenarios, so that its verdict is the
same whether it is judged alone or with all others; coverage is a property of the runs of all rules
together. So it is an entry of the certificate, ``coverage``, and lines in the terminal and in
report.html. Under ``--require-coverage`` the conclusion refuses a subject with a branch that no run
took. Probes are judged as a rule, since each of them is a run like any other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.judging.oracles.coverage import Coverage, SourceFile, analyse, merge
from conformance.records.run import Run
from conformance.records.source_marks import sha256

NOT_NOTED = "no rank noted which lines ran"


@dataclass(frozen=True)
class Measured:
    """The coverage of some runs.

    Attributes:
        coverage: what no run took; None if it was not measured.
        reason: why it was not measured, or an empty text. With a coverage, why that is of other
            code of the subject's alone, and not of its function's own file.
    """

    coverage: Coverage | None
    reason: str = ""


@dataclass
class Tried:
    """The probes of a session.

    Attributes:
        numbers: the tried numbers and dtypes: their values, places and runs.
        out_of_reach: the numbers that no scenario reaches, with their places.
    """

    numbers: list[dict[str, Any]] = field(default_factory=list)
    out_of_reach: list[dict[str, Any]] = field(default_factory=list)


def measure(runs: Iterable[Run]) -> Measured:
    """Return the coverage of the subject over some runs."""
    records = [rank.coverage for run in runs for rank in run.ranks if rank.coverage]
    if not records:
        return Measured(None, NOT_NOTED)
    unmeasured = all(record["reason"] for record in records)
    reason = str(records[0]["reason"]) if unmeasured else ""
    sources = []
    for path, merged in merge(records).items():
        try:
            source = Path(path).read_bytes()
        except OSError as error:
            return Measured(None, f"{path} cannot be read here: {error.strerror}")
        if sha256(source) != merged.sha256:
            return Measured(None, f"{path} is not the file that ran")
        ran = frozenset(merged.ran)
        at_import = frozenset(merged.at_import)
        sources.append(SourceFile(merged.module, path, merged.sha256, source, ran, at_import))
    try:
        coverage = analyse(sources)
    except (SyntaxError, ValueError, RecursionError) as error:
        return Measured(None, f"a source cannot be parsed: {error}")
    # A subject from elsewhere may have a state, a claim or a factory of the user's own.
    return Measured(coverage if coverage.files or not reason else None, reason)


def entry(measured: Measured, tried: Tried, *, required: bool) -> dict[str, Any]:
    """Return the entry of a certificate.

    Args:
        measured: the coverage.
        tried: the probes that were run.
        required: whether ``--require-coverage`` was given.
    """
    coverage = measured.coverage
    if coverage is None:
        return {"measured": False, "reason": measured.reason, "required": required}
    return {
        "measured": True,
        "required": required,
        **({"function_not_measured": measured.reason} if measured.reason else {}),
        "files": [
            {
                "file": file.file.name,
                "sha256": file.file.sha256,
                "lines": file.lines,
                "lines_ran": file.lines_ran,
                "branches": file.branches,
                "branches_taken": file.branches_taken,
            }
            for file in coverage.files
        ],
        "untaken": [
            {"file": one.file, "line": one.line, "source": one.source, "side": one.side}
            for one in coverage.untaken
        ],
        "never_called": [
            {"file": one.file, "line": one.line, "function": one.function}
            for one in coverage.never_called
        ],
        "not_named": {
            "only_raise": coverage.only_raise,
            "at_import": coverage.at_import,
            "functions_not_used": coverage.not_used,
            "files_only_imported": coverage.only_imported,
        },
        "probes": tried.numbers,
        "out_of_reach": tried.out_of_reach,
    }


def runs_of(runs: Mapping[Any, object]) -> Sequence[Run]:
    """Return the runs among runs and reasons why there is none."""
    return [run for run in runs.values() if isinstance(run, Run)]
