"""TODO: conformance/hosts/ranks_protocol.py."""

from pathlib import Path
from typing import Any, Protocol

from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import GLOO_CPU, Profile
from conformance.subjects.spec import SubjectSpec


class Ranks(Protocol):
    """Where ranks come from: this machine, or the hosts that torchrun has started.

    Attributes:
        lanes: runs that may go on at the same time.
        capacity: the largest world size, once it has greeted; None where there is no limit.
        interruptions: runs that were cut short by what is not the subject's doing, one line each.
    """

    lanes: int
    interruptions: list[str]

    @property
    def capacity(self) -> int | None: ...
    def start(self) -> None: ...
    def greeting(self) -> dict[str, Any]: ...
    def describe(self, subject: SubjectSpec, profile: Profile = GLOO_CPU) -> dict[str, Any]: ...
    def look(self, profile: Profile) -> dict[str, Any]: ...
    def run(self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str) -> Path: ...
    def close(self) -> None: ...
