"""The pytest plugin's entry point: declares the options, and decides whether to take part.

pytest loads this module in every run of an environment that has the kit. It imports no torch, and
it adds no option and registers nothing unless the command line is about conformance: other suites
have a ``--device`` of their own.
"""

import argparse
import contextlib
import gc
import importlib
import shlex
from collections.abc import Generator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from conformance.cli._shared import POOL, REQUEST
from conformance.errors import ConformanceError, UsageError
from conformance.session.options import Options, add_options, flag, options_of, suggestion
from conformance.session.progress import Terminal, shows_progress, use_terminal
from conformance.session.rank_source import ranks_for
from conformance.session.request import Request, read_request, set_results_aside
from conformance.subjects.kinds import HOOK, KINDS
from conformance.torch_versions.tested import installed_version, reason_unsupported

# Options that only the kit has. Other suites may well have an --optimizer.
_OWN_OPTIONS = ("--hook", "--setup", "--replay", "--list-rules")
_HELP = ("-h", "--help")
_KINDS = tuple(flag(kind) for kind in KINDS if kind != HOOK)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> None:
    """Add the options and register the rest of the plugin, if the command line is about
    conformance.
    """
    if not _is_about_conformance(args):
        return
    group = parser.getgroup("conformance", "conformance of gradient synchronisation")
    try:
        add_options(group.addoption)
    except ValueError as error:
        raise pytest.UsageError(
            f"another pytest plugin has an option of the conformance kit ({error}); disable it "
            "with -p no:NAME"
        ) from None
    if set(_HELP) & set(args):
        return
    _prepare(early_config, parser.parse_known_args(args))
    early_config.pluginmanager.register(_import_the_rest(), "conformance.cli.pytest_items")


@pytest.hookimpl(wrapper=True, specname="pytest_load_initial_conftests")
def pytest_refuse_unknown_options(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None]:
    """Refuse options that nothing has declared, once conftests have declared theirs.

    pytest would refuse them next, without the name of the kit.
    """
    yield
    if set(_HELP) & set(args):
        return
    _, unknown = parser.parse_known_and_unknown_args(args)
    names = [arg.partition("=")[0] for arg in unknown if arg.startswith("--")]
    if _is_about_conformance(args):
        if names:
            raise pytest.UsageError(_unknown_option(names[0]))
        return
    for name in names:
        if name in _KINDS:
            command = shlex.join(["pytest", "--pyargs", "conformance", *_typed(early_config)])
            raise pytest.UsageError(
                f"{name} is an option of the conformance kit: add --pyargs conformance, as in "
                f"{command}"
            )


def _typed(config: pytest.Config) -> list[str]:
    return [str(argument) for argument in config.invocation_params.args]


def _unknown_option(name: str) -> str:
    known = [*(flag(option.name) for option in fields(Options)), "--list-rules"]
    end = suggestion(name, known) or "."
    return f"{name} is no option{end} See python -m conformance certify --help"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Lend the terminal of pytest to sessions, and to calls of ``certify()`` in tests."""
    use_terminal(lambda: _terminal(config))


def _terminal(config: pytest.Config) -> Terminal | None:
    """Return pytest's terminal; None if its output is none, as in a worker of pytest-xdist."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not shows_progress(reporter.isatty):
        return None
    writer = config.get_terminal_writer()

    def write(text: str) -> None:
        capture = config.pluginmanager.get_plugin("capturemanager")
        # The stream of a running test is captured, and so is that of a rule.
        lifted = capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()
        with lifted:
            reporter.write_raw(text, flush=True)

    return Terminal(write, lambda: writer.fullwidth - writer.width_of_current_line)


def _prepare(config: pytest.Config, namespace: argparse.Namespace) -> None:
    """Parse the command line once, and start the host: it imports torch while this process does.

    An error that has an exit code of its own is kept: pytest knows exit codes from
    ``pytest_configure`` on only.
    """
    try:
        options = options_of(namespace)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    if namespace.list_rules or not (options.named_subjects or options.replay):
        return
    if reason := reason_unsupported(installed_version()):
        raise pytest.UsageError(reason)
    try:
        request = read_request(options)
    except UsageError as error:
        # There will be no session that sets the results of an earlier run aside.
        if not namespace.collectonly:
            set_results_aside(options)
        raise pytest.UsageError(str(error)) from error
    except ConformanceError as error:
        config.stash[REQUEST] = error
        return
    config.stash[REQUEST] = request
    if not (options.replay or namespace.collectonly):
        _start_host(config, request)


def _start_host(config: pytest.Config, request: Request) -> None:
    pool = ranks_for(request.options)
    config.stash[POOL] = pool
    config.add_cleanup(pool.close)
    pool.start()


def _import_the_rest() -> ModuleType:
    """Import torch and the judging code, with the garbage collector off.

    It would spend a third of the time looking for garbage among modules, which there is none of.
    Modules are frozen, so that it does not look there later either: pytest and Python collect
    several times when they end.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module("conformance.cli.pytest_items")
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def _is_about_conformance(args: list[str]) -> bool:
    """Whether an argument names the kit's folder or package, or an option only the kit has."""
    positional = [arg.partition("::")[0] for arg in args if not arg.startswith("-")]
    parts = {part for arg in positional for part in Path(arg.replace(".", "/")).parts}
    return "conformance" in parts or any(
        arg.partition("=")[0] in (*_OWN_OPTIONS, *_HELP) for arg in args
    )
