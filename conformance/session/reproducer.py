"""A script that shows a failure without the kit: ``repro_<rule>.py``, to attach to an issue.

It needs torch and the subject only, and runs under torchrun. There is one for a failure whose run
trains a scripted model in the ordinary way, because the script feeds such a model by itself: no
faults, forced orders, resumed states or simulated ranks.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import torch

from conformance.certificates.certificate import kit_identity
from conformance.judging.rule import Rule
from conformance.judging.verdict import Judgement
from conformance.scenarios.model import Scenario
from conformance.subjects.claims import Claims
from conformance.subjects.kinds import HOOK
from conformance.subjects.spec import SubjectSpec
from conformance.subjects.target import parse_target

_TEMPLATE = "reproducer.py.txt"
_LAYOUTS = ("contiguous", "channels_last", "channels_last_3d", "transposed")
# A script is to be read by people, and to end soon.
_MOST_STEPS = 40
_MOST_PARAMETERS = 400


@dataclass(frozen=True)
class Reproducer:
    """A script that shows a failure.

    Attributes:
        path: the file, beside the report.
        text: its content.
        world: the number of ranks that it needs.
    """

    path: Path
    text: str
    world: int

    @property
    def command(self) -> str:
        """The command that runs it."""
        return f"torchrun --nproc-per-node={self.world} {shlex.quote(str(self.path))}"


def write_reproducers(folder: Path, scripts: Iterable[Reproducer]) -> None:
    """Write scripts into a folder, and remove the scripts of an earlier run."""
    for earlier in folder.glob("repro_*.py"):
        earlier.unlink()
    for script in scripts:
        script.path.write_text(script.text, encoding="utf-8")


def reproducer(
    folder: Path,
    subject: SubjectSpec,
    claims: Claims,
    rule: Rule,
    judgement: Judgement,
    scenario: Scenario,
    world: int,
) -> Reproducer | None:
    """Return the script for a failed rule, or None if the failed run is not an ordinary one.

    Args:
        folder: the folder of the report.
        subject: the refused subject.
        claims: its claims.
        rule: the rule that failed.
        judgement: the judgement on it.
        scenario: the scenario of the failed run.
        world: the number of ranks of that run.
    """
    if subject.kind != HOOK or claims.lossy or claims.fused or claims.poststep:
        return None
    if not _is_ordinary(scenario) or not judgement.failures:
        return None
    failure = judgement.failures[0]
    reported = {
        "Requirement": rule.requirement,
        "Expected": failure.expected,
        "Actual": failure.actual,
        "Likely cause": failure.cause,
    }
    path = folder / f"repro_{rule.number.replace('.', '_')}.py"
    size = len(scenario.group_of(0, world))
    values = {
        "TITLE": _plain(f"{subject.name}: {rule.title}, rule {rule.number} of the kit"),
        "WORLD": str(world),
        "FILE": path.name,
        "MODULE": _plain((subject.hook or subject.setup or "").partition(":")[0]),
        "VERSION": str(kit_identity()["version"]),
        "RUN": f"{scenario.name}@{world}",
        "REPORTED": "\n".join(
            f"    {label}: {_plain(text)}" for label, text in reported.items() if text
        ),
        "HOOK": _target(subject.hook, "--hook"),
        "STATE": repr("pg") if subject.state == "pg" else _target(subject.state, "--state"),
        "SETUP": _target(subject.setup, "--setup"),
        "PARAMETERS": _lines(
            (spec.shape, spec.dtype, spec.frozen, spec.exponents or (spec.exponent,))
            for spec in scenario.params
        ),
        "STEPS": repr(scenario.steps[:_MOST_STEPS]),
        "DDP_OPTIONS": repr(asdict(scenario.ddp)),
        "MICROBATCHES": repr(scenario.microbatch_weights),
        "GROUPS": repr(scenario.groups),
        "FACTOR": str(size if claims.sum else 1),
        "UNIT": repr(_unit(claims)),
    }
    text = files("conformance.session").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    script = re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], text)
    return Reproducer(path, script, world)


def _is_ordinary(scenario: Scenario) -> bool:
    """Whether the run trains a scripted model, step by step, on every rank."""
    special = (
        scenario.uneven,
        scenario.twin,
        scenario.training_loop,
        scenario.captured,
        scenario.clocks_jump,
        bool(scenario.default_dtypes),
        bool(scenario.matmul_precisions),
        bool(scenario.variant),
        scenario.ddp.find_unused_parameters,
        bool(scenario.simulated),
        bool(scenario.resume.saves_at),
        bool(scenario.rewraps),
        scenario.fault.kind != "none",
        not scenario.params,
        len(scenario.params) > _MOST_PARAMETERS,
        any(spec.layout not in _LAYOUTS or spec.uses > 1 for spec in scenario.params),
        any(spec.dtype.startswith("complex") for spec in scenario.params),
    )
    return not any(special)


def _unit(claims: Claims) -> float:
    """Return the unit roundoff of the promised result; parameters of the scripts are float32."""
    return torch.finfo(getattr(torch, claims.rounded or "float32")).eps / 2


def _target(text: str | None, option: str) -> str:
    """Return a target as the source of a tuple: module, attribute, arguments."""
    if not text or text == "pg":
        return "None"
    target = parse_target(text, option)
    return repr((target.module, target.attribute, target.kwargs if target.call else None))


def _lines(entries: Iterable[object]) -> str:
    items = "".join(f"    {entry!r},\n" for entry in entries)
    return f"(\n{items})"


def _plain(text: str) -> str:
    """Return a text that can stand in a docstring."""
    line = " ".join(text.split())
    return line.encode("unicode_escape").decode("ascii").replace('"', "'")
