"""The options of a session: what the command line, a test suite and the defaults agree on. Imports no torch."""

import argparse
import shlex
from dataclasses import dataclass

from conformance.subjects.claims import claims_help
from conformance.subjects.kinds import KINDS

WORLD_SIZES, DEADLINE, ATTACH_WAIT = "1,2,3,4", 30.0, 120.0
TEXT_OPTIONS = {
    "hook": "what to certify: module:attribute[,key=value...]",
    "state": "the hook's state: module:factory[,key=value...], or pg for the model's process group",
    "setup": "instead of --hook: module:function, called with the DDP module, that registers or returns (state, hook)",
    **{name: f"instead of --hook: {kind.summary}: module:attribute[,key=value...]" for name, kind in KINDS.items() if name != "hook"},
    "claims": claims_help(),
    "certificate": "where to write the certificate; default: conformance-results/<subject and settings>/certificate.json",
    "records": "folder in which the records of all runs are kept",
    "attach": "run on the hosts that torchrun has started (-m conformance.host): HOST:PORT, its --rdzv-endpoint",
    "replay": "judge the records in this folder instead of running anything",
}


@dataclass(frozen=True)
class Options:
    """A command line, as text; None means that an option was not given."""

    hook: str | None = None
    state: str | None = None
    setup: str | None = None
    averager: str | None = None
    optimizer: str | None = None
    strategy: str | None = None
    joinable: str | None = None
    collective: str | None = None
    wrapper: str | None = None
    claims: str | None = None
    backend: str = "gloo"
    device: str | None = None  # the backend's own, or cpu
    backend_import: str | None = None
    require_profile: str | None = None
    world_size: str = WORLD_SIZES
    rule: tuple[str, ...] = ()
    certificate: str | None = None
    records: str | None = None
    replay: str | None = None
    attach: str | None = None
    attach_wait: float = ATTACH_WAIT
    deadline: float = DEADLINE

    def command(self) -> str:
        """Return the options that name the subject, as one would type them."""
        names = [*KINDS, "setup", "state", "claims"]
        names += [] if self.backend == Options.backend else ["backend", "backend_import"]
        names += [] if self.device == "cpu" else ["device"]
        said = ((name.replace("_", "-"), getattr(self, name)) for name in names)
        return " ".join(f"--{name} {shlex.quote(value)}" for name, value in said if value)


def options_of(given: argparse.Namespace) -> Options:
    """Return what was given of the kit's options."""
    names = (*TEXT_OPTIONS, "backend", "device", "backend_import", "require_profile", "world_size", "deadline", "attach_wait")
    text = {name: getattr(given, name) for name in names}
    return Options(**text, rule=tuple(given.rule))
