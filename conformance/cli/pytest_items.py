"""Rules as pytest items, and the session's conclusion as summary and exit code.

Judges nothing itself.

``plugin.py`` registers this module on command lines that are about conformance.
"""

import gc
import importlib
import shlex
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.certificates.certificate import Conclusion
from conformance.cli._shared import POOL, REQUEST
from conformance.errors import (
    INTERRUPTED,
    KIT_ERROR,
    NOT_CERTIFIED,
    ConformanceError,
    KitError,
    ProfileError,
    RequiredProfileError,
    TargetError,
    UsageError,
)
from conformance.judging.rule import MUST, SHOULD, Rule
from conformance.judging.verdict import Judgement, Verdict
from conformance.rules import book
from conformance.session.claim_search import proposal_lines
from conformance.session.options import SUBJECTS, flag, options_of
from conformance.session.progress import default_terminal
from conformance.session.report import write_report
from conformance.session.request import set_results_aside
from conformance.session.session import Session
from conformance.session.terminal import conclusion_lines, failure_text, short_failure_text

_SESSION = pytest.StashKey["_State"]()


class _State:
    """The conformance session of one pytest run."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.error: ConformanceError | None = None
        self.conclusion: Conclusion | None = None
        self.proposed: list[str] = []
        self.collects_rules = False
        self.shows_failures = 0
        self.judges_only_rules = False


class RuleBroken(Exception):
    """A rule does not hold; the text is the whole failure."""


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Answer --list-rules."""
    if not getattr(config.option, "list_rules", False):
        return None
    for rule in book().values():
        print(f"{rule.number:<5} {rule.level:<7} {rule.title}\n              {rule.requirement}")
    return 0


def pytest_configure(config: pytest.Config) -> None:
    """Make the session; its host imports torch while pytest collects."""
    config.addinivalue_line("markers", "must: a rule that decides the certificate")
    config.addinivalue_line("markers", "should: a rule that is reported beside the certificate")
    given = vars(config.option)
    if "world_size" not in given or config.option.list_rules:
        return
    request = config.stash.get(REQUEST, None)
    if request is None:
        _require_no_kit_path(config)
        return
    if given.get("numprocesses"):
        raise pytest.UsageError("conformance runs ranks of its own: leave out -n, or pass -n 0")
    _require_kit_path(config)
    try:
        # Not before: a command line that pytest itself refuses starts no run, and touches no file.
        notes = (
            set_results_aside(options_of(config.option)) if not config.option.collectonly else []
        )
        if isinstance(request, ConformanceError):
            raise request
        session = Session(replace(request, notes=tuple(notes)), config.stash.get(POOL, None))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    except ConformanceError as error:
        pytest.exit(f"conformance: {error}", returncode=error.exit_code)
    config.stash[_SESSION] = _State(session)
    config.add_cleanup(session.close)
    if not config.option.collectonly:
        session.start()


def _require_no_kit_path(config: pytest.Config) -> None:
    """Refuse a command line that names the kit and no subject."""
    if any(_names_the_kit(argument, config.option.pyargs) for argument in config.args):
        others = ", ".join(flag(name) for name in SUBJECTS[1:])
        raise pytest.UsageError(
            f"no subject: pass --hook module:attribute (or {others}, or --replay); in CI, set "
            "CONFORMANCE_OPTIONS"
        )


def _require_kit_path(config: pytest.Config) -> None:
    """Refuse ``conformance/`` outside a clone: pytest itself would only miss the folder."""
    if config.option.pyargs:
        return
    for argument in config.args:
        path = Path(argument.partition("::")[0])
        if "conformance" in path.parts and not (config.invocation_params.dir / path).exists():
            raise pytest.UsageError(
                f"file or directory not found: {argument}; outside a clone of the kit: "
                f"{_installed_command(config)}"
            )


def _installed_command(config: pytest.Config) -> str:
    """Return the same command line in the form that works in any folder."""
    options = options_of(config.option)
    subject = options.command() or f"--replay {shlex.quote(str(options.replay))}"
    return f"pytest --pyargs conformance {subject}"


def _names_the_kit(argument: str, is_package: bool) -> bool:
    """Whether a positional argument is the kit's package or folder, and not another folder of that
    name.
    """
    name = argument.partition("::")[0]
    if is_package and name.split(".")[0] == "conformance":
        return True
    return (Path(name) / "rules" / "section_1_contract.py").exists()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print the place of the kit, and the command line of the subject."""
    state = config.stash.get(_SESSION, None)
    if state is None:
        return []
    return [
        f"conformance: {state.session.options.command()}, kit in {Path(__file__).parent.parent}"
    ]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> "RuleFile | None":
    """Collect a section of the rule book."""
    if (
        file_path.suffix == ".py"
        and file_path.name.startswith("section_")
        and file_path.parts[-3:-1] == ("conformance", "rules")
    ):
        return RuleFile.from_parent(parent, path=file_path)
    return None


class RuleFile(pytest.File):
    """A file of rules.

    The rules come from the installed kit's module of that name, wherever the path is.
    """

    def collect(self) -> Iterator["RuleItem"]:
        state = self.config.stash.get(_SESSION, None)
        if state is None:
            return
        state.collects_rules = True
        module = importlib.import_module(f"conformance.rules.{self.path.stem}")
        for rule in sorted(
            (value for value in vars(module).values() if isinstance(value, Rule)),
            key=lambda rule: rule.order,
        ):
            if rule.number in state.session.selected:
                yield RuleItem.from_parent(
                    self, name=f"{rule.number}-{_slug(rule.title)}", rule=rule
                )


class RuleItem(pytest.Item):
    """One rule."""

    def __init__(self, *, rule: Rule, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rule = rule
        self.judgement: Judgement | None = None
        self.add_marker(getattr(pytest.mark, rule.level.lower()))
        # The host has a deadline of its own: pytest-timeout cannot stop a native deadlock.
        self.add_marker(pytest.mark.timeout(0))

    def runtest(self) -> None:
        state = self.config.stash[_SESSION]
        try:
            self.judgement = judgement = state.session.judge(self.rule.number)
        except ConformanceError as error:
            state.error = error  # printed once, at the end
            self.session.shouldstop = "nothing more is judged"
            raise RuleBroken("could not be judged: see below") from None
        if judgement.verdict is Verdict.KIT_ERROR or (
            judgement.verdict is Verdict.FAIL and self.rule.level == MUST
        ):
            raise RuleBroken(self._text(state, judgement))
        if judgement.verdict in (Verdict.NOT_RUN, Verdict.NOT_APPLICABLE):
            pytest.skip(f"{judgement.verdict}: {judgement.reason}")

    def _text(self, state: _State, judgement: Judgement) -> str:
        """Return the text of a failure: whole for the first rule, and for all rules with -v."""
        state.shows_failures += 1
        is_whole = state.shows_failures == 1 or self.config.get_verbosity() > 0
        text = failure_text if is_whole else short_failure_text
        return text(state.session, self.rule, judgement)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, RuleBroken):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return (
            self.path,
            self.rule.check.__code__.co_firstlineno - 1,
            f"{self.rule.number} {self.rule.title}",
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the verdict to the report of a rule."""
    report = yield
    if isinstance(item, RuleItem) and call.when == "call" and item.judgement:
        report.conformance = (item.judgement.verdict, item.rule.level)  # type: ignore[attr-defined]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Name the verdicts that pytest does not know."""
    verdict, level = getattr(report, "conformance", (None, None))
    if verdict is Verdict.NOT_RUN:
        return "not run", "-", "NOT RUN"
    if verdict is Verdict.NOT_APPLICABLE:
        return "not applicable", "n", "NOT APPLICABLE"
    if verdict is Verdict.KIT_ERROR:
        return "kit error", "K", "KIT ERROR"
    if verdict is Verdict.FAIL and level == SHOULD:
        return "advice", "a", "ADVICE"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort rules in the order of the rule book: section 9 before section 12."""
    if items and all(isinstance(item, RuleItem) for item in items):
        items.sort(key=lambda item: item.rule.order if isinstance(item, RuleItem) else (0, 0))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Load the subject and certify the machine before the first rule."""
    state = session.config.stash.get(_SESSION, None)
    if state is None or session.config.option.collectonly:
        return None
    if not (state.collects_rules or session.testsfailed):
        state.error = UsageError(
            "no rule was collected: add --pyargs conformance, as in "
            f"{_installed_command(session.config)}"
        )
        return True
    if not session.items:
        return None
    state.judges_only_rules = all(isinstance(item, RuleItem) for item in session.items)
    # Not before: pytest makes its terminal when it is configured.
    state.session.progress.terminal = default_terminal()
    try:
        state.session.begin()
        if state.session.searches_claims:
            state.proposed = proposal_lines(state.session.search_claims())
            return True
    except ConformanceError as error:
        state.error = error
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Conclude, write the files, and set the exit code."""
    state = session.config.stash.get(_SESSION, None)
    if (
        state is None
        or session.config.option.collectonly
        or (exitstatus == INTERRUPTED and state.error is None)
    ):
        return
    if (
        state.error is None
        and state.session.engine is not None
        and not state.proposed
        and exitstatus in (0, 1, 5)
    ):
        try:
            state.conclusion = state.session.conclude(_plugins(session.config))
            write_report(state.session, state.conclusion)
        except ConformanceError as error:
            state.error = error
        except OSError as error:
            state.error = KitError(f"cannot write the report: {error.strerror}: {error.filename}")
    if state.error is not None:
        session.exitstatus = state.error.exit_code
    elif state.proposed:
        session.exitstatus = NOT_CERTIFIED
    elif state.conclusion is not None:
        # Other tests of the same run may have failed: a certificate does not hide that.
        session.exitstatus = state.conclusion.exit_code or exitstatus
    elif exitstatus == 0:
        session.exitstatus = KIT_ERROR
    # Pytest looks for garbage twice when it ends, and the records are none.
    gc.freeze()


def pytest_terminal_summary(
    terminalreporter: "pytest.TerminalReporter", config: pytest.Config
) -> None:
    """Print the conclusion, or the one line why there is none."""
    state = config.stash.get(_SESSION, None)
    if state is None:
        return
    if state.judges_only_rules and not _names_report_characters(config):
        # pytest's list of failed items would only repeat the failures that are named here, and
        # push them off the screen.
        terminalreporter.reportchars = ""
    terminalreporter.section("conformance")
    if state.error is not None:
        kinds = {
            UsageError: "usage error",
            ProfileError: "profile",
            RequiredProfileError: "profile",
            TargetError: "subject",
        }
        kind = kinds.get(type(state.error), "kit error")
        terminalreporter.line(f"{kind}: {state.error}", red=True)
        terminalreporter.line("no certificate was written")
        for note in state.session.notes:
            terminalreporter.line(note)
    elif state.proposed:
        for line in state.proposed:
            terminalreporter.line(line, green=line.startswith("proposed"))
    elif state.conclusion is not None:
        for line in conclusion_lines(state.session, state.conclusion):
            terminalreporter.line(
                line,
                green=line.startswith("CERTIFIED"),
                red=line.startswith(("REFUSED", "KIT ERROR")),
            )
        terminalreporter.line(f"report: {state.session.folder / 'report.html'}")


def _names_report_characters(config: pytest.Config) -> bool:
    """Whether the command line has pytest's option -r."""
    return any(str(argument).startswith("-r") for argument in config.invocation_params.args)


def _plugins(config: pytest.Config) -> list[str]:
    """Return the third-party plugins of this run, for the certificate: each could have changed the
    run.
    """
    found = {
        f"{dist.project_name} {dist.version}"
        for _, dist in config.pluginmanager.list_plugin_distinfo()
    }
    return sorted(name for name in found if not name.startswith("ddp-conformance"))


def _slug(title: str) -> str:
    return "-".join("".join(char if char.isalnum() else " " for char in title).split())
