"""Tests on a CUDA device: references and torch's own hooks are certified, and racing hooks are
refused.

    pytest tests/test_cuda.py                       # everything
    pytest tests/test_cuda.py -k "gate or refused"  # first: the gate, and the mutants
    pytest tests/test_cuda.py -k torchs             # torch's own hooks, PowerSGD among them
    pytest tests/test_cuda.py -k references         # our references of every kind

Each is judged over Gloo and over NCCL, at world sizes 2 and 4. On one GPU ranks share it, for which
NCCL has to be 2.30 or later. Without a device all tests are collected and skipped.
"""

import configparser
import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from conformance.errors import ProfileError
from conformance.hosts.pool import Pool
from conformance.judging.rule import MUST, Rule
from conformance.judging.verdict import Judgement, Verdict
from conformance.rules import book
from conformance.scenarios.profiles import CUDA, SHARED, Profile, requested_profile, resolve_profile
from conformance.session.engine import Engine, make_control
from conformance.session.run_sources import LocalSource
from tests.cases import Case, subject_and_claims
from tests.hooks_ref.test_certified import OURS, TORCHS
from tests.mutants import Mutant, catalogue

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.device_count(), reason="not run: no CUDA device"),
]

ROOT = Path(__file__).resolve().parent.parent
WORLDS = (2, 4)
BACKENDS = ("gloo", "nccl")
DEADLINE = 10.0  # seconds, besides the time in which devices start
POWER_SGD = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
POWER_SGD_STATE = (
    f"{POWER_SGD}:PowerSGDState,matrix_approximation_rank=4,start_powerSGD_iter=2,"
    "min_compression_rate=1"
)
# A stream keeps its collectives in order, so that it need not claim `chained`.
POWER_SGD_RULES = ("1.8", "3.1", "10.2", "13.1", "13.4", "21.1", "21.3", "21.4")
# DDP accepts a hook named bf16_compress_hook only if there is NCCL.
OF_NCCL = [
    Case(
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:bf16_compress_hook",
        "rounded(bfloat16)",
    )
]
MUTANTS: list[tuple[str, Mutant]] = [
    (module, mutant) for module, mutant in catalogue() if mutant.device == CUDA
]


@dataclass
class Place:
    """A profile, and the source of its runs."""

    profile: Profile
    source: LocalSource

    def judge(self, case: Case, numbers: tuple[str, ...] = ()) -> dict[str, Judgement]:
        """Judge a case by some rules, or by all rules for its kind and this device."""
        control = _control(self.profile.name, case.kind, case.worlds, self.source)
        engine = Engine(self.source, book(), *subject_and_claims(case), case.worlds, control)
        return {
            number: engine.judge(number)
            for number in numbers or book(case.kind, self.profile.device)
        }


@functools.cache
def _control(profile: str, kind: str, worlds: tuple[int, ...], source: LocalSource) -> Engine:
    return make_control(source, book(), kind, worlds)


@pytest.fixture(scope="module")
def devices() -> Iterator[Pool]:
    """A pool of this module's own: a device is shared by more ranks than there are cores."""
    with Pool(DEADLINE, lanes=min(4, os.cpu_count() or 1)) as pool:
        yield pool


@pytest.fixture(params=BACKENDS, scope="module")
def place(request: pytest.FixtureRequest, devices: Pool) -> Place:
    """CUDA over a backend, as far as this machine has it."""
    asked = requested_profile(request.param, CUDA)
    try:
        profile = resolve_profile(asked, devices.probe_profile(asked), WORLDS)
    except ProfileError as error:
        pytest.skip(str(error))
    return Place(profile, LocalSource(devices, profile=profile))


def not_held(judgements: dict[str, Judgement], rules: dict[str, Rule]) -> dict[str, str]:
    return {
        number: j.reason
        for number, j in judgements.items()
        if rules[number].level == MUST and not j.verdict.holds
    }


@functools.cache
def gate() -> list[str]:
    """Return the command of tox's nccl environment, without the arguments after ``--``."""
    read = configparser.ConfigParser(interpolation=None)
    read.read(ROOT / "tox.ini")
    words = shlex.split(read["testenv:nccl"]["commands"].replace("\\\n", " "))
    at = next(index for index, word in enumerate(words) if word.startswith("{posargs"))
    return [sys.executable, *words[1:at]]


@pytest.mark.parametrize("required", ["", "chosen", "nccl-nowhere"])
def test_gate(place: Place, tmp_path: Path, required: str) -> None:
    """The command of tox -e nccl certifies the reference on real NCCL, and names the profile."""
    if place.profile.backend != "nccl":
        pytest.skip("the gate is NCCL's")
    name = place.profile.name if required == "chosen" else required
    command = [
        *gate(),
        "--hook",
        "hooks_ref:allreduce_hook",
        "--certificate",
        "c.json",
        *(["--require-profile", name] if name else []),
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )
    if required == "nccl-nowhere":
        assert done.returncode == 1, done.stdout + done.stderr
        assert "the profile of this run is" in done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    profile = json.loads((tmp_path / "c.json").read_text())["profile"]
    assert profile["name"] in ("nccl", SHARED)
    assert (profile["backend"], profile["device"]) == ("nccl", "cuda")
    assert profile["devices"] == torch.cuda.device_count()
    assert (profile["name"] == SHARED) == (profile["devices"] < 4)
    assert profile["nccl"] >= [2, 0, 0]


@pytest.mark.parametrize(("module", "mutant"), MUTANTS, ids=[mutant.name for _, mutant in MUTANTS])
def test_is_refused(place: Place, rules: dict[str, Rule], module: str, mutant: Mutant) -> None:
    """A mutant is refused by the rule that it breaks; the rules that this rule needs hold."""
    number = mutant.breaks[0]
    judgement = place.judge(Case(f"{module}:{mutant.name}", worlds=mutant.worlds), (number,))[
        number
    ]
    if judgement.verdict is Verdict.NOT_APPLICABLE and rules[number].may_refuse:
        pytest.skip(f"not run: {judgement.reason}")
    assert judgement.verdict is Verdict.FAIL, judgement.reason


def test_a_hang_is_refused_and_the_run_goes_on(place: Place) -> None:
    """Ranks that disagree on their collectives wait for the device for good: they are ended, with
    evidence, and others are judged.
    """
    hangs = Case("tests.cuda_subjects:stays_out_on_rank_1", worlds=(2,))
    judgement = place.judge(hangs, ("1.5",))["1.5"]
    assert judgement.verdict is Verdict.FAIL, judgement.reason
    evidence = judgement.failures[0].evidence
    assert any(kept.get("last collectives") or kept.get("stacks") for kept in evidence.values()), (
        evidence
    )
    right = Case("hooks_ref:fp16_compress_hook", "rounded(float16)", worlds=(2,))
    assert place.judge(right, ("2.1",))["2.1"].verdict is Verdict.PASS


@pytest.mark.parametrize("buckets", ["several"])
def test_torchs_power_sgd(place: Place, buckets: str) -> None:
    """As it comes over NCCL, whose stream orders it; one collective at a time over Gloo."""
    chained = "" if place.profile.ordered else ", chained"
    case = Case(
        f"{POWER_SGD}:powerSGD_hook",
        (f"compressed(delta=0.25), warmup(2){chained}"),
        POWER_SGD_STATE,
        worlds=WORLDS,
    )
    judgements = place.judge(case, POWER_SGD_RULES)
    assert {number: one.reason for number, one in judgements.items() if not one.verdict.holds} == {}


@pytest.mark.parametrize("subject", [*TORCHS, *OF_NCCL], ids=str)
def test_torchs_own_are_certified(place: Place, rules: dict[str, Rule], subject: Case) -> None:
    if subject in OF_NCCL and place.profile.backend != "nccl":
        pytest.skip("DDP takes it over NCCL alone")
    assert not_held(place.judge(replace(subject, worlds=WORLDS)), rules) == {}


@pytest.mark.parametrize("subject", OURS, ids=str)
def test_references_are_certified(place: Place, rules: dict[str, Rule], subject: Case) -> None:
    assert not_held(place.judge(replace(subject, worlds=WORLDS)), rules) == {}
