"""Installs packages beside a certain torch: ``python install.py torch==2.6.*``.

The builds of torch on the package index require Triton and, from some version on, more packages
which a CPU never loads. Together they are as large as torch itself. So torch is installed without
what it requires, and then each requirement but those of :data:`LEFT_OUT`. tox calls this script
as its ``install_command``; later calls, for the kit's own requirements, leave torch alone.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence

LEFT_OUT = ("triton",)
"""Distributions that ``import torch`` does not need on a CPU."""


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def name_of(requirement: str) -> str:
    """Return the distribution's name: ``torch`` of ``torch>=2.4; python_version < "4"``.

    Args:
        requirement: a requirement, or a path, whose name is empty.
    """
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    return match.group().lower() if match else ""


def requirements_of_torch() -> list[str] | None:
    """Return what the installed torch requires, but for extras; None if there is none."""
    for entry in json.loads(_pip("inspect", "--local"))["installed"]:
        if entry["metadata"]["name"] == "torch":
            required = entry["metadata"].get("requires_dist", [])
            return [line for line in required if "extra ==" not in line]
    return None


def install(arguments: Sequence[str]) -> None:
    """Install requirements; options of pip's begin with ``-``."""
    options = [word for word in arguments if word.startswith("-")]
    others = [word for word in arguments if not word.startswith("-") and name_of(word) != "torch"]
    torch = [word for word in arguments if not word.startswith("-") and name_of(word) == "torch"]
    if torch and requirements_of_torch() is None:
        _pip("install", "--no-deps", *options, *torch)
        others += [line for line in requirements_of_torch() or () if name_of(line) not in LEFT_OUT]
    if others:
        _pip("install", *options, *others)


if __name__ == "__main__":
    install(sys.argv[1:])
