"""What a host has imported is what a rank would have imported itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.hosts.pool import Pool
from conformance.judging.run_failures import breakage
from conformance.scenarios.hook import VALUES
from conformance.session.run_sources import LocalSource
from conformance.subjects.spec import SubjectSpec

OTHERS = """
import torch.distributed as dist

def theirs(group, bucket):
    raise ValueError("of another package")
"""

# Of a thousand new blocks of each size, the pages that they lie in beside how many would hold them: up to 1.1 with headers and ends
# of pools, 2.1 and more where they lie scattered.
DENSE = """
import ctypes, json
from conformance.hosts.preload import preload
preload()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
makers = {size: lambda size=size: bytes(size - 33) for size in range(48, 513, 16)} | {4096: lambda: libc.malloc(4096)}
found = {}
for size, make in makers.items():
    made = [make() for _ in range(1000)]
    found[size] = len({(at if size == 4096 else id(at)) // 4096 for at in made}) / (1000 * size / 4096)
print(json.dumps(found))
"""


DRAWS = """
import random
from conformance.hosts.preload import preload
preload()
import torch
print(random.random(), torch.rand(()).item())
"""


def test_ranks_of_any_host_draw_the_same() -> None:
    """Whoever draws from a global generator is told of that (9.1), and not of two hosts that draw otherwise (3.3)."""
    drawn = [
        subprocess.Popen([sys.executable, "-c", DRAWS], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    one, other = [process.communicate()[0] for process in drawn]
    assert one
    assert one == other


def test_what_a_rank_makes_lies_together() -> None:
    """Scattered between what a host has imported, a rank would copy a page for each few: of 48 bytes, 8 times as many."""
    said = subprocess.run(
        [sys.executable, "-c", DENSE], capture_output=True, text=True, check=True
    ).stdout
    assert {size: times for size, times in json.loads(said).items() if times > 1.5} == {}


def test_references_that_the_path_leads_to_are_the_ones_that_run(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout of its own in the current directory goes before those that the kit came with, as for everything else."""
    (tmp_path / "hooks_ref").mkdir()
    (tmp_path / "hooks_ref" / "__init__.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    spec = SubjectSpec("hooks_ref:theirs")
    assert pool.describe(spec)["module"] == "hooks_ref"
    broken = breakage(LocalSource(pool).run(VALUES, 2, spec, "others@2"))
    assert broken is not None
    assert "of another package" in broken.line
    assert "error" in pool.describe(SubjectSpec("hooks_ref:allreduce_hook"))
    monkeypatch.undo()
    assert "error" not in pool.describe(SubjectSpec("hooks_ref:allreduce_hook"))
