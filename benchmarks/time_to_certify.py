"""Time to certify a hook, compared with the same number of checks in PyTorch's own style.

    python benchmarks/time_to_certify.py [--samples 2]

One machine runs both:

(a) `python -m conformance certify --hook hooks_ref:allreduce_hook`, a whole process from a cold
    start, with the number of checks in its certificate. A check is one rule judged on one run.
(b) a sample of tests built on torch.testing._internal.common_distributed.MultiProcessTestCase,
    which spawns its ranks for every test, at each world size. Their time is extrapolated to the
    same number of checks at the same world sizes, and the output marks it as extrapolated.

Only the ratio is meaningful: the seconds are those of one machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path

# Before torch's test utilities read it: a spawned test that hangs must not cost five minutes.
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import MultiProcessTestCase

import hooks_ref

WORLDS = (1, 2, 3, 4)


class SpawnPerTest(MultiProcessTestCase):
    """One check like those of section 2: a hook's gradients against those of DDP without one."""

    world = 2

    @property
    def world_size(self) -> int:
        return self.world

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _check(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        grads = []
        for hook in (None, hooks_ref.allreduce_hook):
            torch.manual_seed(0)
            model = DistributedDataParallel(torch.nn.Linear(7, 5))
            if hook:
                model.register_comm_hook(None, hook)
            for step in range(3):
                model.zero_grad()
                torch.manual_seed(step * 10 + self.rank)
                model(torch.randn(4, 7)).sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        for vanilla, hooked in zip(*grads, strict=True):
            torch.testing.assert_close(vanilla, hooked)
        dist.barrier()
        dist.destroy_process_group()


class Spawn1(SpawnPerTest):
    world = 1

    def test_check(self) -> None:
        self._check()


class Spawn2(SpawnPerTest):
    world = 2

    def test_check(self) -> None:
        self._check()


class Spawn3(SpawnPerTest):
    world = 3

    def test_check(self) -> None:
        self._check()


class Spawn4(SpawnPerTest):
    world = 4

    def test_check(self) -> None:
        self._check()


def seconds_per_spawned_test(world: int, samples: int) -> float:
    """Return the mean time of a spawned test.

    The time includes the imports of the test's ranks, but not those of this process.
    """
    case = {1: Spawn1, 2: Spawn2, 3: Spawn3, 4: Spawn4}[world]
    begin = time.perf_counter()
    for _ in range(samples):
        result = unittest.TestResult()
        case("test_check").run(result)
        if not result.wasSuccessful() or result.skipped:
            reason = result.errors or result.failures or result.skipped
            raise SystemExit(f"the spawned test did not pass: {reason}")
    return (time.perf_counter() - begin) / samples


def certify(folder: str) -> tuple[float, Counter[int]]:
    """Return the time of a whole certification and its checks by world size."""
    command = [
        *(sys.executable, "-m", "conformance", "certify", "-q"),
        *("--hook", "hooks_ref:allreduce_hook", "--certificate", "c.json"),
    ]
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=os.environ)
    seconds = time.perf_counter() - begin
    certificate = json.loads((Path(folder) / "c.json").read_text())
    # A rule that compares two runs names both; they have one world size.
    names = [name.split(" and ")[0] for rule in certificate["rules"] for name in rule["runs"]]
    return seconds, Counter(int(name.partition("@")[2]) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2, help="spawned tests per world size")
    samples = parser.parse_args().samples
    with tempfile.TemporaryDirectory() as folder:
        runs = [certify(folder) for _ in range(2)]
    (seconds, checks), (other_seconds, _) = sorted(runs, key=lambda run: run[0])
    total = sum(checks.values())
    print(
        f"certify, cold start to certificate: {seconds:.1f} s "
        f"(other run: {other_seconds:.1f} s), {total} checks"
    )
    spawned = {world: seconds_per_spawned_test(world, samples) for world in WORLDS}
    for world in WORLDS:
        print(
            f"spawn per test, {world} ranks: {spawned[world]:.2f} s a check "
            f"({samples} samples), {checks[world]} checks"
        )
    extrapolated = sum(spawned[world] * checks[world] for world in WORLDS)
    print(f"spawn per test, extrapolated to the same checks: {extrapolated:.0f} s")
    print(
        f"per check: {seconds / total:.3f} s against {extrapolated / total:.2f} s: "
        f"{extrapolated / seconds:.0f} times"
    )


if __name__ == "__main__":
    main()
