"""The pytest plugin's entry point: the options, and the decision to take part.

pytest loads this module in every run of an environment that has the kit. It imports no torch,
and it adds no option and registers nothing unless a command line is about conformance: other suites
have a --device of their own.
"""

import argparse
import gc
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from conformance.cli._shared import POOL
from conformance.errors import ConformanceError, UsageError
from conformance.session.options import ATTACH_WAIT, DEADLINE, TEXT_OPTIONS, WORLD_SIZES, Options, options_of
from conformance.session.preflight import check, set_aside
from conformance.session.session import ranks_for
from conformance.subjects.kinds import KINDS

_SUBJECTS = ("setup", *KINDS)
_OURS = ("--hook", "--setup", "--replay", "--list-rules")  # other suites may well have an --optimizer


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Add the options and register the rest of the plugin, where the command line asks for it."""
    if not _about_conformance(args):
        return
    group = parser.getgroup("conformance", "conformance of gradient synchronisation")
    try:
        for name, text in TEXT_OPTIONS.items():
            group.addoption(f"--{name}", metavar=name.upper(), help=text)
        group.addoption("--backend", default="gloo", help="process group backend; default: %(default)s")
        group.addoption("--device", default=None, help="device of the models; default: the backend's own, or cpu")
        group.addoption("--backend-import", metavar="MODULE", help="a module that registers the backend when it is imported")
        group.addoption("--require-profile", metavar="NAME", help="fail, with exit code 1, unless this profile is the one that is run")
        group.addoption("--world-size", default=WORLD_SIZES, metavar="N,N", help="world sizes; default: %(default)s")
        group.addoption("--rule", action="append", default=[], metavar="N.N", help="judge only this rule or section; may be repeated")
        group.addoption("--deadline", type=float, default=DEADLINE, help="seconds until a run is taken to hang; default: %(default)s")
        group.addoption(
            "--attach-wait",
            type=float,
            default=ATTACH_WAIT,
            help="seconds for all hosts to be there, at first and again; default: %(default)s",
        )
        group.addoption("--list-rules", action="store_true", help="list the rules and exit")
    except ValueError as error:
        raise pytest.UsageError(
            f"another pytest plugin has an option of the conformance kit ({error}); disable it with -p no:NAME"
        ) from None
    if not {"-h", "--help"} & set(args):
        given = parser.parse_known_args(args)
        judges = any(getattr(given, name) for name in _SUBJECTS) and not (given.replay or given.list_rules)
        if judges and _can_run(given) and not given.collectonly:
            _start_host(early_config, options_of(given))
        early_config.pluginmanager.register(_import_the_rest(), "conformance.cli.pytest_items")


def _can_run(given: argparse.Namespace) -> bool:
    """Refuse what can be refused before torch is imported."""
    options = options_of(given)
    try:
        _check(options, judges=not given.collectonly)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    except ConformanceError:
        return False  # pytest_configure says so: only from there on does pytest know exit codes
    return True


def _check(options: Options, *, judges: bool) -> None:
    try:
        check(options)
    except UsageError:
        # There will be no session that would do this.
        if judges:
            set_aside(options)
        raise


def _start_host(config: pytest.Config, options: Options) -> None:
    """Start the host: it imports torch while this process does."""
    config.stash[POOL] = pool = ranks_for(options)
    config.add_cleanup(pool.close)
    pool.start()


def _import_the_rest() -> ModuleType:
    """Import torch and what judges; a third of the time would go into looking for garbage among modules, where there is none.

    Nor is it looked for there later: pytest collects garbage several times when it ends, and so does Python.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module("conformance.cli.pytest_items")
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def _about_conformance(args: list[str]) -> bool:
    """Whether an argument names the kit's folder or package, or is an option that only the kit has."""
    named = {part for arg in args if not arg.startswith("-") for part in Path(arg.partition("::")[0].replace(".", "/")).parts}
    return "conformance" in named or any(arg.partition("=")[0] in (*_OURS, "-h", "--help") for arg in args)
