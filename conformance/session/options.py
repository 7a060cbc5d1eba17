"""The options of a session, declared once: the command line and ``certify()`` are made from these
fields.

Nothing is parsed here; ``request.py`` does that. Imports no torch.
"""

import argparse
import difflib
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from conformance.errors import UsageError
from conformance.subjects.claims import claims_help
from conformance.subjects.kinds import HOOK, KINDS

WORLD_SIZES = "1,2,3,4"
DEADLINE = 30.0
ATTACH_WAIT = 120.0


def _option(
    default: Any, text: str, metavar: str | None = None, read: Callable[[str], Any] | None = None
) -> Any:
    """Declare one option.

    Args:
        default: its value if it is not given.
        text: the help of the command line.
        metavar: the placeholder of its value in the help.
        read: converts the text of the command line; None keeps the text.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar, "read": read})


def _subject(kind: str) -> Any:
    summary = KINDS[kind].summary
    return _option(None, f"instead of --hook: {summary}: module:attribute[,key=value...]")


@dataclass(frozen=True)
class Options:
    """A command line as text. None means that an option was not given.

    The field ``world_size`` is the option ``--world-size``.
    """

    hook: str | None = _option(None, "the hook to certify: module:attribute[,key=value...]")
    state: str | None = _option(
        None, "the hook's state: module:factory[,key=value...], or pg for the model's process group"
    )
    setup: str | None = _option(
        None,
        "instead of --hook: module:function, called with the DDP module; it registers the hook "
        "itself or returns (state, hook)",
    )
    averager: str | None = _subject("averager")
    optimizer: str | None = _subject("optimizer")
    strategy: str | None = _subject("strategy")
    joinable: str | None = _subject("joinable")
    collective: str | None = _subject("collective")
    wrapper: str | None = _subject("wrapper")
    claims: str | None = _option(None, claims_help())
    backend: str = _option("gloo", "process group backend; default: %(default)s", "NAME")
    device: str | None = _option(
        None, "device of the models; default: the backend's own, or cpu", "NAME"
    )
    backend_import: str | None = _option(
        None, "a module that registers the backend when it is imported", "MODULE"
    )
    require_profile: str | None = _option(
        None, "exit with code 1 unless this profile is the one that runs", "NAME"
    )
    world_size: str = _option(
        WORLD_SIZES, f"world sizes; default: {WORLD_SIZES}; may be repeated", "N,N"
    )
    rule: tuple[str, ...] = _option((), "judge only this rule or section; may be repeated", "N.N")
    seed: int | None = _option(
        None,
        "the seed that sizes, counts, step numbers and scales are drawn from; default: a new one, "
        "which the certificate names",
        "N",
        int,
    )
    steps: int | None = _option(
        None,
        "the number of steps that the long run of a hook has at least, after its warm-up; default: "
        "1200 to 1500, drawn",
        "N",
        int,
    )
    require_coverage: bool = _option(
        False,
        "refuse the subject if no run took some branch of its own code, and list these branches",
        read=bool,
    )
    certificate: str | None = _option(
        None,
        "path of the certificate; default: "
        "conformance-results/<subject and settings>/certificate.json",
    )
    records: str | None = _option(None, "keep the records of all runs in this folder")
    replay: str | None = _option(
        None, "judge the records in this folder instead of running anything"
    )
    attach: str | None = _option(
        None,
        "run on the hosts that torchrun has started (-m conformance.host): HOST:PORT, its "
        "--rdzv-endpoint",
    )
    attach_wait: float = _option(
        ATTACH_WAIT,
        "seconds to wait for all hosts, at the start and after one was lost; default: %(default)s",
        "SECONDS",
        float,
    )
    deadline: float = _option(
        DEADLINE,
        "seconds after which a run counts as hanging; default: %(default)s",
        "SECONDS",
        float,
    )

    def command(self) -> str:
        """Return the options that name the subject, as a person would type them."""
        names = [*KINDS, "setup", "state", "claims"]
        if self.backend != Options.backend:
            names += ["backend", "backend_import"]
        if self.device != "cpu":
            names.append("device")
        given = [(name, getattr(self, name)) for name in names]
        return " ".join(f"{flag(name)} {shlex.quote(value)}" for name, value in given if value)

    @property
    def named_subjects(self) -> list[str]:
        """The fields that name a subject and are given."""
        return [name for name in SUBJECTS if getattr(self, name)]


SUBJECTS = (HOOK, "setup", *(kind for kind in KINDS if kind != HOOK))


# Lists in one text: an option that is repeated adds to it.
_LISTS = ("world_size", "claims")


def flag(name: str) -> str:
    """Return the option of a field: ``--world-size`` of ``world_size``."""
    return f"--{name.replace('_', '-')}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar name, if there is one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def add_options(add: Callable[..., object]) -> None:
    """Declare every option with ``add``, which is argparse's ``add_argument`` or pytest's
    ``addoption``.
    """
    for option in fields(Options):
        settings: dict[str, Any] = {
            "help": option.metadata["help"],
            "metavar": option.metadata["metavar"] or option.name.upper(),
            "default": option.default,
        }
        if option.name in ("rule", "state", *_LISTS, *SUBJECTS):
            settings.update(action="append", default=[])
        elif option.metadata["read"] is bool:
            settings = {"help": settings["help"], "action": "store_true"}
        elif option.metadata["read"]:
            settings["type"] = option.metadata["read"]
        add(flag(option.name), **settings)
    add("--list-rules", action="store_true", help="list the rules and exit")


def options_of(namespace: argparse.Namespace) -> Options:
    """Return the options that a command line was parsed into.

    Raises:
        UsageError: it names two subjects, or two states, with one option.
    """
    values = {option.name: getattr(namespace, option.name) for option in fields(Options)}
    values["rule"] = tuple(values["rule"])
    for name in _LISTS:
        values[name] = ",".join(values[name]) or getattr(Options, name)
    for name in ("state", *SUBJECTS):
        given = dict.fromkeys(values[name])
        if len(given) > 1:
            # The last one alone would be judged, and nobody would miss the other.
            texts = " and ".join(f"{flag(name)} {shlex.quote(text)}" for text in given)
            raise UsageError(f"{texts}: a run judges one; type one of them, and run pytest twice")
        values[name] = next(iter(given), None)
    return Options(**values)
