"""The commands of the files in ci/, run once for all tests of them: minutes of work, which the test
run begins ahead.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import ci_templates
from tests.ci_templates import CI, Command

ROOT = CI.parent
RECORDS = "kept"
OF_CI = ("GITHUB_", "CI_", "BUILDKITE_", "CONFORMANCE_", "TOX")
# Commands that run ahead give way to the tests that run meanwhile.
NICE = 10


@dataclass
class Done:
    """The result of a command: its exit code, and its output with its errors."""

    code: int
    output: str


def make_checkout(folder: Path) -> Path:
    """Copy the parts of a checkout that a job needs to a folder for its results; return it."""
    for name in ("tox.ini", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(CI, folder / "ci")
    return folder


def shell(text: str, folder: Path, *arguments: str, nice: int = 0, **environment: str) -> Done:
    """Run a command like CI systems: by a shell that stops at the first error."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(OF_CI)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # tox-current-env runs this Python through a link of its own. Python does not find its virtual
    # environment from there, so its packages are on PYTHONPATH.
    packages = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    settings = {
        "PATH": path,
        "PYTHONPATH": packages,
        "TOX_CURRENT_ENV": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    done = subprocess.run(
        ["nice", "-n", str(nice), "bash", "-eo", "pipefail", "-c", text, "ci", *arguments],
        cwd=folder,
        env={**inherited, **settings, **environment},
        text=True,
        check=False,
        timeout=600,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Done(done.returncode, done.stdout)


def identity(command: Command, checkout: Path) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return a command with the variables that it uses. Commands of one identity are run once."""
    variables = dict(command.environment)
    if "CONFORMANCE_KIT" in variables:
        # Templates write the path of the kit in different ways.
        variables["CONFORMANCE_KIT"] = str((checkout / variables["CONFORMANCE_KIT"]).resolve())
    uses = re.findall(r"\$\{?(\w+)", command.text)
    if "tox -c" in command.text:
        uses += ["CONFORMANCE_OPTIONS", "CONFORMANCE_GATE"]
    used = sorted((key, value) for key, value in variables.items() if key in uses)
    return command.text, tuple(used)


def run_all(checkout: Path) -> dict[Command, Done]:
    """Run all commands of all templates, in order, in a folder for each profile."""
    done: dict[Any, Done] = {}
    page = {"GITHUB_STEP_SUMMARY": str(checkout / "page.md")}
    every = ci_templates.commands(checkout)
    for command in every:
        if (key := identity(command, checkout)) not in done:
            folder = checkout / (dict(command.environment).get("CONFORMANCE_PROFILE", "gloo"))
            folder.mkdir(exist_ok=True)
            # The folder of the profile is inside the checkout, so a kit in "." is one level up.
            variables = {
                name: str(checkout) if value == "." else value
                for name, value in command.environment
            }
            if "CONFORMANCE_OPTIONS" in variables:
                variables["CONFORMANCE_OPTIONS"] += f" --records {folder / RECORDS}"
            done[key] = shell(
                command.text,
                folder,
                nice=NICE,
                **variables,
                **page,
                TOX_WORK_DIR=str(checkout / "tox"),
            )
    return {command: done[identity(command, checkout)] for command in every}
