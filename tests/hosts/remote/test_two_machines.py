"""torchrun on two machines, made of network namespaces, with a controller on one or on a third."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conformance.certificates.flaws import flaws
from conformance.certificates.reader import read_certificate
from tests import ROOT
from tests.machines import Machine, machines, reason_for_none

THIRD_PARTY = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook"
HELD = '''
"""A right hook. The last of as many ranks as the file hold says stays inside until go exists."""
import os, time
from pathlib import Path
import torch.distributed as dist

folder = Path(__file__).parent

def hook(state, bucket):
    size = dist.get_world_size()
    is_last = dist.get_rank() == size - 1
    hold = folder / "hold"
    if is_last and hold.exists() and hold.read_text() == str(size):
        hold.unlink()
        (folder / "inside").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    buffer = bucket.buffer().div_(size)
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda fut: fut.value()[0])
'''
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module", autouse=True)
def _can_make_machines() -> None:
    # Asked when a test of this module runs, not when it is collected: the answer starts processes.
    if reason := reason_for_none():
        pytest.skip(reason)


class Cluster:
    """Two machines with torchrun on them, a third without, and a folder that they share."""

    def __init__(self, folder: Path, made: list[Machine], *more: str) -> None:
        self.folder = folder
        self.anna, self.bert, self.carl = made
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.environment.pop("GLOO_SOCKET_IFNAME", None)
        (folder / "held.py").write_text(HELD)
        self.torchruns = [self._torchrun(machine, *more) for machine in (self.anna, self.bert)]

    def _torchrun(self, machine: Machine, *more: str) -> "subprocess.Popen[str]":
        rendezvous = [
            "--nnodes=2",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=anna:29400",
            *more,
        ]
        command = [sys.executable, "-m", "torch.distributed.run"]
        with open(self.folder / f"{machine.name}.txt", "w") as output:
            return machine.start(
                [*command, *rendezvous, "-m", "conformance.host"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env=self.environment,
            )

    def controller(self, machine: Machine, hook: str, *arguments: str) -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--pyargs",
            "conformance",
            "--hook",
            hook,
        ]
        return machine.start(
            [*command, "--attach", "anna:29400", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env=self.environment,
        )

    def until_inside(self, controller: "subprocess.Popen[str]") -> None:
        """Wait until a rank is inside the hook that is to hold it."""
        self.until(lambda: (self.folder / "inside").exists() or controller.poll() is not None)
        assert controller.poll() is None, controller.communicate()[0] + self.outputs()

    def until(self, happened: Callable[[], bool]) -> None:
        waits = threading.Event()
        while not happened():
            waits.wait(0.05)  # pytest's own timeout is the limit

    def outputs(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.txt"))


@contextmanager
def cluster(folder: Path, *more: str) -> Iterator[Cluster]:
    with machines("anna", "bert", "carl") as made:
        there = Cluster(folder, made, *more)
        try:
            yield there
        finally:
            there.bert.plug_in()
            for torchrun in there.torchruns:
                torchrun.send_signal(signal.SIGTERM)  # hosts then remove their folders
            for torchrun in there.torchruns:
                torchrun.wait(timeout=60)


# A whole certification takes a minute here. The other test and test_pool.py attach hosts too.
@pytest.mark.rarely
def test_certified_across_two_machines_until_one_of_them_is_killed(tmp_path: Path) -> None:
    with cluster(tmp_path) as there:
        whole = there.controller(there.carl, THIRD_PARTY, "--certificate", "c.json")
        output, _ = whole.communicate()
        assert whole.returncode == 0, output + there.outputs()
        assert "on 2 nodes, world sizes 1, 2, 3, 4" in output
        certificate = json.loads((tmp_path / "c.json").read_text())
        assert flaws(read_certificate(tmp_path / "c.json")) == []
        assert [(node["host"], node["slots"]) for node in certificate["profile"]["nodes"]] == [
            ("anna", 2),
            ("bert", 2),
        ]
        # The controller may be on one of them as well. All that runs on a machine ends at once.
        (tmp_path / "hold").write_text("4")
        killed = there.controller(
            there.anna, "held:hook", "--attach-wait", "3", "--certificate", "never.json"
        )
        there.until_inside(killed)
        there.bert.kill()
        output, _ = killed.communicate()
        assert killed.returncode == 7, output + there.outputs()
        assert "was interrupted: node 1 (bert), ranks 2, 3: its process ended" in output
        assert "it has not come back within 3 seconds" in output
        assert not (tmp_path / "never.json").exists()


# Until TCP gives a machine up takes a minute.
@pytest.mark.rarely
def test_a_machine_that_is_cut_off_is_named(tmp_path: Path) -> None:
    with cluster(tmp_path, "--nproc-per-node=1") as there:
        (tmp_path / "hold").write_text("2")
        there.until(lambda: there.outputs().count("waits for a controller") == 2)
        cut = there.controller(
            there.carl, "held:hook", "--attach-wait", "3", "--certificate", "never.json"
        )
        there.until_inside(cut)
        there.bert.cut_off()
        (tmp_path / "go").touch()
        output, _ = cut.communicate()
        assert cut.returncode == 7, output + there.outputs()
        assert "was interrupted: node 1 (bert), rank 1: no answer from its machine" in output
        assert not (tmp_path / "never.json").exists()
        # The machine that was cut off notices too that nobody answers, and ends its ranks.
        there.until(lambda: not _ranks_of(there.bert))
        assert not (tmp_path / "never.json").exists()


def _ranks_of(machine: Machine) -> list[str]:
    """Return the processes of a machine below torchrun and its host; none without a run."""
    listed = subprocess.run(
        ["ip", "netns", "pids", machine.namespace], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()[2:]
