"""The interface of a pool: a source of ranks that can carry out runs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import GLOO_CPU, Profile
from conformance.subjects.spec import SubjectSpec


class Ranks(Protocol):
    """A pool of ranks: on this machine, or on the hosts that torchrun has started.

    Attributes:
        lanes: the number of runs that may go on at the same time.
        capacity: the largest world size, known after the greeting; None if there is no limit.
        interruptions: runs that were cut short for a reason that is not the subject's, one line
            each.
    """

    lanes: int
    interruptions: list[str]

    @property
    def capacity(self) -> int | None: ...
    def start(self) -> None: ...
    def prepare(self, scenarios: Iterable[Scenario]) -> None: ...
    def greeting(self) -> dict[str, Any]: ...
    def describe(self, subject: SubjectSpec, profile: Profile = GLOO_CPU) -> dict[str, Any]: ...
    def probe_profile(self, profile: Profile) -> dict[str, Any]: ...
    def run(
        self, scenario: Scenario, world: int, subject: SubjectSpec | None, name: str
    ) -> Path: ...
    def close(self) -> None: ...
