"""The commands that repeat a certification. This module imports no torch."""

import shlex
from collections.abc import Mapping
from typing import Any

from conformance.scenarios.environment import KIT_ENVIRONMENT
from conformance.subjects.kinds import HOOK


def reproduce_commands(body: Mapping[str, Any]) -> list[str]:
    """Return the commands that repeat the run of a certificate, or of a session's header.

    Everything that a run depends on is spelt out, also if it is the default: the claims, the world
    sizes, the backend, the device, the seed and the environment variables.
    """
    subject = body["subject"]
    profile = body["profile"]
    options = {name: subject.get(name) for name in (HOOK, "state", "setup")}
    if subject["kind"] != HOOK:
        options[subject["kind"]] = subject.get("target")
    options |= {
        "claims": body["claims"]["text"],
        "backend": profile["backend"],
        "backend-import": profile.get("imports"),
        "device": profile["device"],
        "world-size": ",".join(map(str, profile["world_sizes"])),
        "seed": body.get("seed"),
        "steps": body.get("requested_steps"),
    }
    words = [*_variables(body.get("environment", {})), "pytest", "--pyargs", "conformance"]
    for name, value in options.items():
        if value is not None and value != "":
            words += [f"--{name}", str(value)]
    if body.get("coverage", {}).get("required"):
        words.append("--require-coverage")
    return [shlex.join(words)]


def _variables(environment: Mapping[str, str]) -> list[str]:
    """Return the start of a command that sets the variables that the kit does not set itself."""
    given = [
        f"{name}={value}"
        for name, value in environment.items()
        if KIT_ENVIRONMENT.get(name) != value
    ]
    return ["env", *given] if given else []
