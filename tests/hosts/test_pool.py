"""Supervision of ranks: nothing is left behind, and the report of a death names its kind."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conformance.errors import KitError
from conformance.hosts import pool as hosts_pool
from conformance.hosts.pool import Pool
from conformance.judging.run_failures import FailedRun, failed_run
from conformance.records.run import load_run
from conformance.scenarios.hook import ALL, SCHEDULES, VALUES, VALUES_AGAIN
from conformance.scenarios.model import Scenario
from conformance.session.run_sources import LocalSource
from conformance.subjects.spec import REFERENCE, SubjectSpec
from hooks_ref import allreduce_hook
from tests.cases import PATIENT
from tests.torch_marks import needs_flight_recorder_of_gloo

pytestmark = pytest.mark.ranks


def processes_of(base: str) -> list[str]:
    """Command lines of living processes that mention ``base``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if base in line:
                found.append(line)
    return found


def test_leaves_nothing_behind() -> None:
    with Pool(PATIENT) as pool:
        pool.start()
        base = pool._base
        assert LocalSource(pool).run(VALUES, 2, REFERENCE, "values@2").finished
        assert base.exists()
        assert processes_of(base.name)
    assert not base.exists()
    assert not processes_of(base.name)


def test_a_host_that_still_imports_torch_is_killed() -> None:
    pool = Pool(PATIENT)
    pool.start()
    host, base = pool._host, pool._base
    assert host is not None
    os.kill(host.pid, signal.SIGSTOP)  # it cannot greet
    pool.close()
    assert host.returncode == -signal.SIGKILL
    assert not base.exists()
    pool.close()


def test_runs_begun_ahead_end_with_the_pool() -> None:
    """Runs that were begun ahead and never used do not bring the folder back."""
    with Pool(PATIENT) as pool:
        source = LocalSource(pool)
        source.run(VALUES, 1, REFERENCE, "values@1")
        source.begin([(scenario, 2) for scenario in ALL], REFERENCE)
        base = pool._base
    assert source._threads is not None
    source._threads.shutdown()
    assert not base.exists()


def test_runs_side_by_side_do_not_mix() -> None:
    with Pool(PATIENT, lanes=3) as pool:
        source = LocalSource(pool)
        source.begin([(VALUES, world) for world in (1, 2, 3, 4)], REFERENCE)
        for world in (4, 3, 2, 1):
            run = source.run(VALUES, world, REFERENCE, f"values@{world}")
            assert run.finished
            assert [len(run.group(rank)) for rank in range(world)] == [world] * world


PLACED = """
import os
from hooks_ref import allreduce_hook

def hook(state, bucket):
    print("placed", os.getcwd(), hash("a string"))
    return allreduce_hook(state, bucket)
"""


def test_ranks_have_the_callers_folder_and_hash_seeds_of_their_own(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder is the caller's, not the one in which the pool was made."""
    (tmp_path / "placed.py").write_text(PLACED)
    monkeypatch.chdir(tmp_path)
    source = LocalSource(pool)

    def hashes(scenario: Scenario) -> list[str]:
        run = source.run(scenario, 2, SubjectSpec(hook="placed:hook"), scenario.name)
        assert run.finished
        found = []
        for rank in run.ranks:
            # Gloo of some versions of torch prints lines too.
            lines = set(str(rank.evidence["output"]).splitlines())
            (line,) = {line for line in lines if line.startswith("placed ")}
            folder, _, hash_of_string = line.removeprefix("placed ").rpartition(" ")
            assert folder == str(tmp_path)
            found.append(hash_of_string)
        return found

    one, same = hashes(VALUES)
    assert one == same
    other, same = hashes(SCHEDULES[1])
    assert other == same != one
    assert hashes(VALUES_AGAIN) == [one, other]


def test_a_rank_that_dies_ends_the_run_of_both_pools(pool: Pool) -> None:
    """The part of the run that waits does not know that a rank of the other one has died."""
    spec = SubjectSpec(hook="tests.mutants.process:raises_on_rank_1")
    run = LocalSource(pool).run(VALUES_AGAIN, 2, spec, "dies")
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert run.ranks[1].exit not in (0, None)
    assert not run.finished


KILLED_IDLE = """
import os, signal
from conformance.hosts.pool import Pool
pool = Pool(100.0)
pool.greeting()
print(pool._base, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_BUSY = """
import os, signal, threading
from conformance.hosts.pool import Pool
from conformance.scenarios.hook import VALUES
from conformance.subjects.spec import SubjectSpec
pool = Pool(100.0)
pool.greeting()
print(pool._base, flush=True)
events = pool._base / "hang" / "0" / "events.jsonl"

def kill():
    while not (events.exists() and '"returned"' in events.read_text()):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill).start()
pool.run(VALUES, 2, SubjectSpec(hook="tests.mutants.process:never_completes"), "hang")
"""


@pytest.mark.parametrize("script", [KILLED_IDLE, KILLED_BUSY], ids=["idle", "busy"])
def test_a_killed_controller_leaves_nothing_behind(script: str) -> None:
    """The host sees its controller hang up, kills its ranks, removes the folder and ends."""
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert child.returncode == -signal.SIGKILL
    base = Path(child.stdout.strip())
    while base.exists() or processes_of(base.name):
        threading.Event().wait(0.05)  # pytest's own timeout is the limit


def test_goes_on_after_the_host_was_killed() -> None:
    with Pool(PATIENT) as pool:
        killed = LocalSource(pool).run(
            VALUES, 2, SubjectSpec(hook="tests.mutants.process:kills_parent"), "killed"
        )
        broken = failed_run(killed)
        assert broken is not None
        assert broken.kind == "host"
        assert "signal SIGKILL" in broken.line
        assert LocalSource(pool).run(VALUES, 2, REFERENCE, "values@2").finished


def stops_parent(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Stop the process that has forked this rank, but not this rank."""
    os.kill(os.getppid(), signal.SIGSTOP)
    return allreduce_hook(None, bucket)


def test_goes_on_after_a_lane_fell_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped lane answers no more than one that gets no time on a busy machine."""
    monkeypatch.setattr(hosts_pool, "PATIENCE", 2.0)
    monkeypatch.setattr(hosts_pool, "SLOWEST", 0.0)
    with Pool(PATIENT) as pool:
        subject = SubjectSpec(hook="tests.hosts.test_pool:stops_parent")
        silent = pool.run(VALUES, 2, subject, "silent")
        broken = failed_run(load_run(silent, VALUES, 2))
        assert broken is not None
        assert broken.kind == "host"
        assert "the subject stopped it, or this machine is too busy" in broken.line
        monkeypatch.undo()
        assert LocalSource(pool).run(VALUES, 2, REFERENCE, "values@2").finished


def test_a_gigabyte_of_output_is_not_kept(pool: Pool) -> None:
    run = LocalSource(pool).run(
        VALUES, 2, SubjectSpec(hook="tests.mutants.process:prints_a_gigabyte"), "flood"
    )
    broken = failed_run(run)
    assert broken is not None
    assert broken.kind == "flood"
    assert all(len(rank.evidence["output"]) < 100_000 for rank in run.ranks)


def hang(impatient: Pool, name: str, seen: str) -> FailedRun:
    """Run a hook that hangs, and return what its evidence shows.

    On a busy machine the short deadline may pass before the ranks are where they hang. If the
    evidence does not mention ``seen``, the run is repeated with a longer deadline.
    """
    spec = SubjectSpec(hook=f"tests.mutants.process:{name}")
    broken = failed_run(LocalSource(impatient).run(VALUES, 2, spec, f"hang-{name}"))
    if broken is None or seen not in json.dumps(broken.evidence):
        with Pool(PATIENT, lanes=1) as pool:
            broken = failed_run(LocalSource(pool).run(VALUES, 2, spec, f"hang-{name}"))
    assert broken is not None
    return broken


@pytest.mark.parametrize("name", [pytest.param("spins", marks=pytest.mark.rarely), "sleeps_in_c"])
def test_a_hang_is_reported_with_its_line(impatient: Pool, name: str) -> None:
    broken = hang(impatient, name, f"in {name}")
    assert broken.kind == "hang"
    assert "the hook did not return" in broken.line
    assert f"in {name}" in broken.line
    assert "stacks" in broken.evidence["rank 0"]


@needs_flight_recorder_of_gloo
def test_the_flight_recorder_names_the_last_collectives(impatient: Pool) -> None:
    broken = hang(impatient, "never_completes_on_rank_1", "gloo:all_reduce")
    assert "gloo:all_reduce" in json.dumps(broken.evidence)


def test_a_subject_whose_import_does_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waits.py").write_text("import threading\nthreading.Event().wait()\n")
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    with Pool(1.0) as pool:
        assert (
            pool.describe(SubjectSpec(hook="waits:hook"))["error"] == "importing it did not return"
        )
    with Pool(PATIENT) as pool:
        assert (
            pool.describe(SubjectSpec(hook="dies:hook"))["error"]
            == "importing it ended its process with status 3"
        )
        assert "SystemExit" in pool.describe(SubjectSpec(hook="leaves:hook"))["error"]


def test_a_user_module_cannot_shadow_what_the_host_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    with Pool(PATIENT) as pool:
        assert pool.greeting()["gloo"]


IGNORED = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from conformance.hosts.pool import Pool
from conformance.scenarios.hook import VALUES
from conformance.session.run_sources import LocalSource
from conformance.subjects.spec import REFERENCE
with Pool(30.0) as pool:
    run = LocalSource(pool).run(VALUES, 1, REFERENCE, "values@1")
    print(run.ranks[0].first("state", at="start")["process"]["signal handlers"])
"""


def test_ranks_do_not_ignore_interrupts() -> None:
    """A shell starts background jobs with SIGINT ignored. If ranks inherited that, a subject that
    ignores SIGINT would not be noticed."""
    child = subprocess.run(
        [sys.executable, "-c", IGNORED], capture_output=True, text=True, check=True
    )
    assert "default_int_handler" in child.stdout


def test_a_host_without_torch_is_the_kits_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Pool(1.0) as pool, pytest.raises(KitError, match="is torch installed for /bin/false"):
        pool.greeting()


def test_the_callers_debug_level_does_not_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """DETAIL crashes DDP in torch 2.13."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with Pool(PATIENT) as pool:
        assert LocalSource(pool).run(VALUES, 2, REFERENCE, "values@2").finished
    assert os.environ["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
