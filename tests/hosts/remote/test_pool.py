"""Runs on two hosts that torchrun has started on one machine (two: ``test_two_machines.py``)."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.errors import ProfileError, UsageError
from conformance.hosts.remote import attached_hosts, rendezvous
from conformance.hosts.remote.attached_hosts import AttachedHost, AttachedHosts
from conformance.hosts.remote.pool import AttachedPool, placement, rank_environments
from conformance.hosts.remote.rendezvous import Announcement, HostsNotFound, kit_digest
from conformance.hosts.remote.wire import Stream
from conformance.judging.run_failures import failed_run
from conformance.judging.verdict import Verdict
from conformance.scenarios.hook import VALUES
from conformance.session.options import Options
from conformance.session.rank_source import ranks_for
from conformance.session.run_sources import LocalSource
from conformance.session.session import Session
from conformance.subjects.spec import REFERENCE, SubjectSpec
from tests import ROOT
from tests.cases import PATIENT
from tests.hosts.remote.test_run import host_of

HELD = '''
"""A right hook. If the file hold exists, the second of two ranks stays inside."""
import threading
from pathlib import Path
import torch.distributed as dist

folder = Path(__file__).parent

def hook(state, bucket):
    is_last = dist.get_rank() == 1
    if is_last and (folder / "hold").exists() and not (folder / "inside").exists():
        (folder / "inside").touch()
        threading.Event().wait()
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda fut: fut.value()[0])
'''


class Torchrun:
    """One agent with two hosts."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("localhost", 0)) as free:
            self.endpoint = f"localhost:{free.getsockname()[1]}"
        self.folder = folder
        (folder / "held.py").write_text(HELD)
        rendezvous = [
            "--nnodes=1",
            "--nproc-per-node=2",
            "--max-restarts=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
        ]
        command = [sys.executable, "-m", "torch.distributed.run"]
        with open(folder / "output", "w") as output:
            self.agent = subprocess.Popen(
                [*command, *rendezvous, "-m", "conformance.host"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def pool(self, deadline: float = PATIENT, wait: float = 120.0) -> AttachedPool:
        return AttachedPool(self.endpoint, deadline, wait)

    def once_inside(self, kill: int) -> threading.Thread:
        """Kill a process when the last rank is held inside the hook."""

        def waiting() -> None:
            while not (self.folder / "inside").exists():
                threading.Event().wait(0.02)
            os.kill(kill, signal.SIGKILL)

        (self.folder / "inside").unlink(missing_ok=True)
        (self.folder / "hold").touch()
        thread = threading.Thread(target=waiting)
        thread.start()
        return thread


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torchrun]:
    started = Torchrun(tmp_path_factory.mktemp("torchrun"))
    yield started
    started.agent.terminate()
    started.agent.wait(timeout=60)


def judged(
    torchrun: Torchrun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: str, **given: Any
) -> Session:
    """Judge some rules, and conclude."""
    monkeypatch.chdir(tmp_path)
    with Session.of(Options(**given, attach=torchrun.endpoint, rule=(rules,))) as session:
        session.begin()
        for number in session.selected:
            session.judge(number)
        session.conclude()
    return session


def verdicts(session: Session) -> dict[str, Verdict]:
    return {number: judgement.verdict for number, judgement in session.judgements.items()}


@pytest.mark.parametrize(
    ("rules", "given"),
    [
        # 10.1: ranks take turns through the store. 12.1: a peer dies, and the others notice it.
        pytest.param(
            "2.1,2.6,10.1,12.1",
            {"hook": "hooks_ref:allreduce_hook", "world_size": "1,2"},
            marks=pytest.mark.rarely,
        ),
        # New processes resume from saved files.
        pytest.param(
            "11.2",
            {"hook": "hooks_ref:allreduce_hook", "claims": "checkpointable", "world_size": "1,2"},
            marks=pytest.mark.rarely,
        ),
        (
            "15.13,15.15",
            {"optimizer": "torch.distributed.optim:ZeroRedundancyOptimizer", "world_size": "2"},
        ),
    ],
    ids=["hook", "saved", "optimizer"],
)
def test_right_subjects_pass(
    torchrun: Torchrun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rules: str,
    given: dict[str, str],
) -> None:
    session = judged(torchrun, tmp_path, monkeypatch, rules, **given)
    assert verdicts(session) == dict.fromkeys(rules.split(","), Verdict.PASS), session.judgements
    assert [node["slots"] for node in session.header["profile"]["nodes"]] == [2]


@pytest.mark.parametrize(
    ("hook", "kind", "line"),
    [
        pytest.param(
            "never_completes_on_rank_1",
            "hang",
            "the future was never completed",
            marks=pytest.mark.rarely,
        ),
        ("kills_parent", "host", "signal SIGKILL"),
        ("prints_a_gigabyte", "flood", "printed more than 64 MiB"),
    ],
)
def test_a_hostile_hook_is_reported_as_on_one_machine(
    torchrun: Torchrun, hook: str, kind: str, line: str
) -> None:
    # Only a hang needs a short deadline; runs that come to their end may be slow on a busy machine.
    with torchrun.pool(deadline=8.0 if kind == "hang" else PATIENT) as pool:
        source = LocalSource(pool)
        broken = failed_run(
            source.run(VALUES, 2, SubjectSpec(hook=f"tests.mutants.process:{hook}"), hook)
        )
        assert broken is not None
        assert (broken.kind, line in broken.line) == (kind, True), broken.line
        assert kind == "host" or "stacks" in broken.evidence["rank 1"]
        pool.deadline = PATIENT
        assert source.run(VALUES, 2, REFERENCE, "values@2").finished
        assert pool.interruptions == []


def test_errors_of_attaching_are_one_line(
    torchrun: Torchrun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProfileError, match="--world-size 5: 2 hosts are attached"):
        judged(
            torchrun, tmp_path, monkeypatch, "2.1", hook="hooks_ref:allreduce_hook", world_size="5"
        )
    with torchrun.pool() as first, torchrun.pool() as second:
        first.greeting()
        with pytest.raises(
            ProfileError,
            match=f"another controller has these hosts already: process {os.getpid()} on",
        ):
            second.greeting()
    with (
        AttachedPool("localhost:1", 1.0, 0.0) as nowhere,
        pytest.raises(ProfileError, match="nobody answers at localhost:1"),
    ):
        nowhere.greeting()
    with torchrun.pool() as pool:
        assert "no attribute 'nothing'" in pool.describe(SubjectSpec(hook="held:nothing"))["error"]


def test_larger_world_sizes_are_left_out(
    torchrun: Torchrun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = judged(
        torchrun, tmp_path, monkeypatch, "1.1", hook="hooks_ref:allreduce_hook", world_size="1,6,8"
    )
    assert session.worlds == (1,)
    # Some versions of torch have notes of their own.
    about_sizes = [note for note in session.notes if "world size" in note]
    assert about_sizes == ["world size 6, 8 was not run: 2 hosts are attached"]


def test_a_dead_host_is_named_and_the_run_is_repeated_after_the_restart(
    torchrun: Torchrun,
) -> None:
    with torchrun.pool() as pool:
        pool.greeting()
        killing = torchrun.once_inside(
            next(
                host.announcement.pid
                for host in pool._hosts.hosts
                if host.announcement.host_rank == 1
            )
        )
        source = LocalSource(pool)
        held = SubjectSpec(hook="held:hook")
        assert source.run(VALUES, 2, held, "values@2").finished
        killing.join()
        [interruption] = pool.interruptions
        # torchrun ends the other hosts too. How many of them have ended by then depends on the
        # clock.
        node = re.escape(f"node 0 ({socket.gethostname()})")
        assert re.match(
            rf"values@2 was interrupted: {node}, ranks? (0, )?1: its process ended",
            interruption,
        )


def test_an_interrupted_session_certifies_nothing(
    torchrun: Torchrun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test with this torchrun: it is killed."""
    monkeypatch.chdir(tmp_path)
    # The port of a process that is being killed accepts connections for a moment more.
    monkeypatch.setattr(rendezvous, "STORE_TIMEOUT", 3.0)
    options = Options(
        hook="held:hook",
        attach=torchrun.endpoint,
        attach_wait=30.0,
        world_size="1,2",
        rule=("2.1,2.4,8.4",),
    )
    with Session.of(options) as session:
        session.begin()
        session.judge("2.1")
        session.pool.wait = 0.0  # type: ignore[union-attr]
        killing = torchrun.once_inside(torchrun.agent.pid)
        for number in ("2.4", "8.4"):
            session.judge(number)
        killing.join()
        conclusion = session.conclude()
    assert conclusion.exit_code == 7
    assert "dtypes@2 was interrupted: node 0" in conclusion.reasons[0]
    assert verdicts(session) == {
        "2.1": Verdict.PASS,
        "2.4": Verdict.NOT_RUN,
        "8.4": Verdict.NOT_RUN,
    }
    assert "it has not come back within 0 seconds" in session.judgements["8.4"].reason


def test_placement_and_environment_of_ranks() -> None:
    hosts = [host_of(rank) for rank in range(4)]
    assert [[host.node for host in placement(world, hosts)] for world in (1, 2, 3, 4)] == [
        [0],
        [0, 1],
        [0, 0, 1],
        [0, 0, 1, 1],
    ]
    found = rank_environments(placement(3, hosts))
    assert [
        (found[str(rank)]["LOCAL_RANK"], found[str(rank)]["GROUP_RANK"]) for rank in range(3)
    ] == [("0", "0"), ("1", "0"), ("0", "1")]
    assert {(own["WORLD_SIZE"], own["GROUP_WORLD_SIZE"]) for own in found.values()} == {("3", "2")}


def test_different_hosts_are_refused() -> None:
    def attached(*greetings: dict[str, Any]) -> AttachedHosts:
        hosts = AttachedHosts("anna:1")
        like = {"kit": kit_digest(), "torch": torch.__version__, "python": "3", "platform": "p"}
        no_stream: Any = None
        hosts.hosts = [
            AttachedHost(host_of(2 * node), no_stream, no_stream, {**like, **greeting})
            for node, greeting in enumerate(greetings)
        ]
        return hosts

    assert [node["host"] for node in attached({}, {}).common_greeting()["nodes"]] == ["a", "b"]
    with pytest.raises(ProfileError, match=r"node 1 \(b\) has another version of the kit"):
        attached({}, {"kit": "other"}).common_greeting()
    with pytest.raises(ProfileError, match=r"node 1 \(b\) has torch 1\.0"):
        attached({}, {"torch": "1.0"}).common_greeting()
    with pytest.raises(ProfileError, match=r"the nodes have torch 1\.0, this machine has"):
        attached({"torch": "1.0"}, {"torch": "1.0"}).common_greeting()


def test_a_subject_that_differs_between_nodes_is_refused() -> None:
    pool = AttachedPool("anna:1", 5.0, 0.0)
    ends = []
    for node, digest in enumerate("xxy"):
        ours, theirs = (Stream(end) for end in socket.socketpair())
        theirs.send({"answer": {"sha256": {"mypkg": digest}}})
        pool._hosts.hosts.append(AttachedHost(host_of(2 * node), ours, ours, {}))
        ends += [ours, theirs]
    pool._common = {"torch": "any"}
    assert pool.describe(SubjectSpec(hook="mypkg:hook"))["error"].startswith(
        "node 2 (c) has another mypkg:hook than the nodes before it"
    )
    for stream in ends:
        stream.close()


def test_old_and_new_hosts_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun restarts all hosts together: the old ones are about to end."""
    hosts = AttachedHosts("anna:1")
    hosts._last_ids = {"host 0", "host 1"}
    tried: list[str] = []

    def connect(host: Announcement) -> AttachedHost:
        tried.append(host.id)
        raise HostsNotFound("this is but a test")

    monkeypatch.setattr(hosts, "_connect", connect)
    for ids, tries in (
        ({"host 0", "host 7"}, 0),
        ({"host 0", "host 1"}, 1),
        ({"host 7", "host 8"}, 2),
    ):
        monkeypatch.setattr(
            attached_hosts,
            "find_hosts",
            lambda *_, ids=ids: [host_of(0, id=identity) for identity in sorted(ids)],
        )
        reason = "this is but a test" if tries else "torchrun has not started all of its hosts anew"
        with pytest.raises(HostsNotFound, match=f"^{reason}$"):
            hosts.attach(0.0)
        assert len(tried) == tries


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--attach and --replay do not go together"):
        Session.of(Options(attach="anna:1", replay=str(tmp_path)))
    with pytest.raises(UsageError, match="not HOST:PORT"):
        Session.of(Options(hook="held:hook", attach="anna:port"))
    assert isinstance(ranks_for(replace(Options(hook="held:hook"), attach="anna")), AttachedPool)


@pytest.mark.ranks
def test_a_host_without_torchrun_prints_its_usage() -> None:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "MASTER_ADDR")
    }
    alone = subprocess.run(
        [sys.executable, "-m", "conformance.host"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert alone.returncode == 1
    assert "conformance.host is started by torchrun" in alone.stderr
