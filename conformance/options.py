"""The options of a session: what the command line, a test suite and the defaults agree on. Imports nothing."""

import shlex
from dataclasses import dataclass

WORLD_SIZES, DEADLINE = "1,2,3,4", 30.0
TEXT_OPTIONS = {
    "hook": "what to certify: module:attribute[,key=value...]",
    "state": "the hook's state: module:factory[,key=value...], or pg for the model's process group",
    "setup": "instead of --hook: module:function, called with the DDP module, that registers or returns (state, hook)",
    "claims": 'what the subject says of itself, e.g. "rounded(float16), world_only"; auto proposes some; default: exact',
    "certificate": "where to write the certificate; default: conformance-results/<subject>/certificate.json",
    "records": "folder in which the records of all runs are kept",
    "replay": "judge the records in this folder instead of running anything",
}


@dataclass(frozen=True)
class Options:
    """A command line, as text; None means that an option was not given."""

    hook: str | None = None
    state: str | None = None
    setup: str | None = None
    claims: str | None = None
    backend: str = "gloo"
    device: str = "cpu"
    world_size: str = WORLD_SIZES
    rule: tuple[str, ...] = ()
    certificate: str | None = None
    records: str | None = None
    replay: str | None = None
    deadline: float = DEADLINE

    def command(self) -> str:
        """Return the options that name the subject, as one would type them."""
        words = [f"--{name} {shlex.quote(value)}" for name in ("hook", "setup", "state", "claims") if (value := getattr(self, name))]
        return " ".join(words)
