"""Faults of versions of torch that keep a scenario from running with any subject.

A rule that reads such a scenario does not apply on that version, and the certificate says so among
its limits. Each fault is verified in the run: the error comes on every rank, while the kit makes
its model. A fault that subjects can avoid is none of these: torch's own subjects with such a fault
are refused. Importing this module needs no torch.
"""

from dataclasses import dataclass

from conformance.scenarios.model import Scenario
from conformance.torch_versions.tested import release


@dataclass(frozen=True)
class Fault:
    """One fault of some versions.

    Attributes:
        until: the last release that has it.
        backend: the backend that has it.
        dtypes: the beginning of the names of the parameters' dtypes.
        error: a part of the error's message.
        summary: the fault, in words that follow the version.
        issue: of torch.
        rules: the rules that do not apply for it.
    """

    until: tuple[int, int]
    backend: str
    dtypes: str
    error: str
    summary: str
    issue: str
    rules: tuple[str, ...]


FAULTS = (
    Fault(
        until=(2, 8),
        backend="gloo",
        dtypes="complex",
        error="Invalid scalar type",
        summary="cannot make a DDP model with complex parameters over Gloo",
        issue="pytorch#156632",
        rules=("2.8", "16.28"),
    ),
)


def faults_of(version: str) -> list[Fault]:
    """Return the faults of a version of torch."""
    return [fault for fault in FAULTS if release(version) <= fault.until]


def lines_of(version: str, backend: str) -> dict[str, list[str]]:
    """Return a line for each rule that a fault of this torch takes, by the number of the rule."""
    found: dict[str, list[str]] = {}
    for fault in faults_of(version):
        if fault.backend == backend:
            for rule in fault.rules:
                line = f"torch {version} {fault.summary} ({fault.issue}): {rule} does not apply"
                found.setdefault(rule, []).append(line)
    return found


def fault_behind(version: str, scenario: Scenario, message: str) -> Fault | None:
    """Return the fault that explains an error while a scenario's model was made, or None.

    Collectives have no model.
    """
    if scenario.kind == "collective":
        return None
    for fault in faults_of(version):
        dtypes = {spec.dtype for spec in scenario.params}
        has_dtype = any(dtype.startswith(fault.dtypes) for dtype in dtypes)
        if scenario.profile.backend == fault.backend and has_dtype and fault.error in message:
            return fault
    return None
