"""Tests of the scripts that show a failure without the kit."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.judging.rule import Rule
from conformance.judging.verdict import Failure, Judgement, Verdict
from conformance.scenarios.hook import (
    ACCUMULATED,
    AT_SCALE,
    DTYPES,
    PEER_DIES,
    RESUMED,
    SUBGROUPS,
    TRAINING,
    UNEVEN,
    VALUES,
)
from conformance.scenarios.model import Scenario
from conformance.session.reproducer import Reproducer, reproducer, write_reproducers
from conformance.subjects.claims import Claims, parse_claims
from conformance.subjects.spec import SubjectSpec, parse_subject

ROOT = Path(__file__).resolve().parents[2]
RIGHT = parse_subject("hooks_ref:allreduce_hook", None, None)
FAILED = Judgement("2.1", Verdict.FAIL, failures=[Failure("a \"mean\" \\ of '''", "\x1b[31m no")])


def script_of(
    folder: Path,
    rules: dict[str, Rule],
    subject: SubjectSpec = RIGHT,
    scenario: Scenario = VALUES,
    claims: Claims | None = None,
    world: int = 2,
) -> Reproducer | None:
    return reproducer(folder, subject, claims or Claims(), rules["2.1"], FAILED, scenario, world)


@pytest.mark.parametrize("scenario", [VALUES, DTYPES, SUBGROUPS, ACCUMULATED])
def test_a_script_is_python(tmp_path: Path, rules: dict[str, Rule], scenario: Scenario) -> None:
    script = script_of(tmp_path, rules, scenario=scenario)
    assert script is not None
    compile(script.text, str(script.path), "exec")
    assert "@" not in script.text.replace("@staticmethod", "").replace(f"{scenario.name}@2", "")
    assert script.command == f"torchrun --nproc-per-node=2 {tmp_path}/repro_2_1.py"


@pytest.mark.parametrize("scenario", [TRAINING, PEER_DIES, RESUMED, AT_SCALE, UNEVEN])
def test_a_run_that_is_not_ordinary_has_no_script(
    tmp_path: Path, rules: dict[str, Rule], scenario: Scenario
) -> None:
    assert script_of(tmp_path, rules, scenario=scenario) is None


def test_a_lossy_claim_has_no_script(tmp_path: Path, rules: dict[str, Rule]) -> None:
    assert script_of(tmp_path, rules, claims=parse_claims("compressed")) is None


def test_scripts_of_an_earlier_run_are_removed(tmp_path: Path, rules: dict[str, Rule]) -> None:
    (tmp_path / "repro_1_1.py").write_text("# earlier")
    (tmp_path / "mine.py").write_text("# mine")
    script = script_of(tmp_path, rules)
    assert script is not None
    write_reproducers(tmp_path, [script])
    assert {path.name for path in tmp_path.iterdir()} == {"repro_2_1.py", "mine.py"}


WRONG = """
import torch.distributed as dist

def undivided(state, bucket):
    group = state or dist.group.WORLD
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("hook", "scenario", "code"),
    [
        ("wrong:undivided", replace(VALUES, steps=VALUES.steps[:4]), 1),
        pytest.param(
            "hooks_ref:allreduce_hook",
            replace(SUBGROUPS, ddp=ACCUMULATED.ddp),
            0,
            marks=pytest.mark.rarely,
        ),
    ],
    ids=["wrong", "right"],
)
def test_a_script_shows_a_wrong_hook_and_no_right_one(
    tmp_path: Path, rules: dict[str, Rule], hook: str, scenario: Scenario, code: int
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    world = sum(map(len, scenario.groups)) or 2
    subject = parse_subject(hook, None, None)
    # As a user types it: in the folder of the package, which is not on Python's path.
    results = tmp_path / "results"
    results.mkdir()
    script = script_of(results, rules, subject, scenario, world=world)
    assert script is not None
    write_reproducers(results, [script])
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", str(script.path)]
    done = subprocess.run(
        [sys.executable, *torchrun],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert bool(done.returncode) == bool(code), done.stdout + done.stderr
    expected = "WRONG" if code else "nothing wrong was seen"
    assert done.stdout.count(expected) == world, done.stdout + done.stderr
    if code:
        assert "rank 0, step 0 (crafted), parameter p0, element (0, 0): expected" in done.stdout
