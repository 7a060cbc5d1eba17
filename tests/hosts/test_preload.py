"""The imports of a host: ranks find the same modules that they would have imported themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.hosts.pool import Pool
from conformance.judging.run_failures import failed_run
from conformance.scenarios.hook import VALUES
from conformance.session.run_sources import LocalSource
from conformance.subjects.spec import SubjectSpec

OTHERS = """
import torch.distributed as dist

def theirs(group, bucket):
    raise ValueError("of another package")
"""

# For a thousand new blocks of each size: the number of pages on which they lie, divided by the
# number of pages that would hold them. It is up to 1.1, with headers and the ends of pools, and 2.1
# or more if the blocks are scattered.
DENSE = """
import ctypes, json
from conformance.hosts.preload import preload
preload()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
makers = {size: lambda size=size: bytes(size - 33) for size in range(48, 513, 16)}
makers[4096] = lambda: libc.malloc(4096)
found = {}
for size, make in makers.items():
    made = [make() for _ in range(1000)]
    addresses = made if size == 4096 else [id(block) for block in made]
    pages = {address // 4096 for address in addresses}
    found[size] = len(pages) / (1000 * size / 4096)
print(json.dumps(found))
"""


# What a rank notes as imported by the subject, and whether it may write to the names of the host's.
LATER = """
import os, sys
from conformance.hosts.preload import preload
preload()
from conformance.ranks.instruments.forgotten_modules import forget_package
from conformance.ranks.instruments.source_files import imported_modules
host = set(sys.modules)
forget_package("hooks_ref")
print(*(name for name in sys.modules if name.partition(".")[0] == "hooks_ref"))
before = imported_modules()
import sched, hooks_ref.ema
print(sorted(name for name in imported_modules() - before if name[:4] in ("sche", "hook"))[-1:])
print(*(name for name in imported_modules() & host if name[:9] != "hooks_ref"))
"""


DRAWS = """
import random
from conformance.hosts.preload import preload
preload()
import torch
print(random.random(), torch.rand(()).item())
"""


@pytest.mark.ranks
def test_ranks_of_any_host_draw_the_same() -> None:
    """A subject that draws from a global generator breaks 9.1, and not 3.3 because of two hosts."""
    drawn = [
        subprocess.Popen([sys.executable, "-c", DRAWS], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    one, other = [process.communicate()[0] for process in drawn]
    assert one
    assert one == other


@pytest.mark.ranks
def test_a_rank_tells_the_modules_of_the_subject_from_those_of_its_host() -> None:
    forgotten, later, of_host = subprocess.run(
        [sys.executable, "-c", LATER], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert forgotten == ""
    assert later == "['sched']"
    assert of_host == ""


def test_new_objects_of_a_rank_lie_together() -> None:
    """Scattered between objects of the host, blocks of 48 bytes would cost 8 times as many copied
    pages."""
    output = subprocess.run(
        [sys.executable, "-c", DENSE], capture_output=True, text=True, check=True
    ).stdout
    assert {size: times for size, times in json.loads(output).items() if times > 1.5} == {}


def test_references_on_the_callers_path_are_used(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout in the current directory has precedence over the references of the kit."""
    (tmp_path / "hooks_ref").mkdir()
    (tmp_path / "hooks_ref" / "__init__.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    spec = SubjectSpec("hooks_ref:theirs")
    assert pool.describe(spec)["module"] == "hooks_ref"
    broken = failed_run(LocalSource(pool).run(VALUES, 2, spec, "others@2"))
    assert broken is not None
    assert "of another package" in broken.line
    assert "error" in pool.describe(SubjectSpec("hooks_ref:allreduce_hook"))
    monkeypatch.undo()
    assert "error" not in pool.describe(SubjectSpec("hooks_ref:allreduce_hook"))
