"""What a host has imported is what a rank would have imported itself."""

from pathlib import Path

import pytest

from conformance.breakage import breakage
from conformance.pool import Pool
from conformance.scenario import VALUES
from conformance.sources import LocalSource
from conformance.subject import SubjectSpec

OTHERS = """
import torch.distributed as dist

def theirs(group, bucket):
    raise ValueError("of another package")
"""


def test_references_that_the_path_leads_to_are_the_ones_that_run(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
