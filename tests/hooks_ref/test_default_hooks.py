"""The default hooks beside torch's, with the same bits if torch's are right; common checks."""

import ast
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.records.files import OUTCOME
from conformance.records.run import Run, load_run
from conformance.scenarios.hook import TRAINING, VALUES
from conformance.scenarios.model import Scenario
from conformance.subjects.spec import SubjectSpec
from tests.torch_marks import needs_build_for_cpu

SAME = {
    "hooks_ref:allreduce_hook": (
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook"
    ),
    "tests.peers:ours_fp16_wrapped": "tests.peers:torch_fp16_wrapped",
    "tests.peers:ours_bf16_wrapped": "tests.peers:torch_bf16_wrapped",
    "hooks_ref:noop_hook": "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks:noop_hook",
}


def run_of(pool: Pool, scenario: Scenario, target: str) -> Run:
    folder = pool.run(
        scenario,
        3 if scenario is TRAINING else 2,
        SubjectSpec(hook=target),
        f"parity-{abs(hash((scenario.name, target)))}",
    )
    try:
        return load_run(folder, scenario, len(json.loads((folder / OUTCOME).read_text())["ranks"]))
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("scenario", [VALUES, TRAINING], ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("ours", SAME)
def test_gives_the_bits_that_torch_gives(pool: Pool, ours: str, scenario: Scenario) -> None:
    """Gradients and parameters of every step, several buckets, across the rebuild."""
    one, other = (run_of(pool, scenario, target) for target in (ours, SAME[ours]))
    assert one.finished
    assert other.finished
    for mine, theirs in zip(one.ranks, other.ranks, strict=True):
        assert mine.tensors.keys() == theirs.tensors.keys()
        different = [
            name
            for name in mine.tensors
            if not torch.equal(mine.tensors[name].nan_to_num(), theirs.tensors[name].nan_to_num())
        ]
        assert different == []


def test_fp16_divides_before_it_casts(pool: Pool) -> None:
    """1e5 and 0 on two ranks have the mean 5e4, which float16 holds; torch's hook gives inf."""
    ours, theirs = (
        run_of(pool, VALUES, f"tests.peers:{whose}_fed_1e5").got(0, 0, 0)
        for whose in ("ours", "torch")
    )
    assert ours is not None
    assert theirs is not None
    assert ((ours - 5e4).abs() <= 16).all()  # half a unit in the last place of float16 there
    assert theirs.isinf().all()


def test_a_wrapper_returns_the_buckets_dtype(pool: Pool) -> None:
    """torch's leaves half precision to the hooks around it."""
    runs = [
        run_of(pool, VALUES, f"tests.peers:{whose}_fp16_wrapped") for whose in ("ours", "torch")
    ]
    assert [
        {value["dtype"] for rank in run.ranks for value in rank.all("value")} for run in runs
    ] == [{"float32"}, {"float16"}]


@needs_build_for_cpu
def test_torchs_bf16_hook_is_refused_on_cpu_by_its_name(pool: Pool) -> None:
    run = run_of(
        pool, VALUES, "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:bf16_compress_hook"
    )
    error = run.ranks[0].first("error")
    assert error, "torch's bf16_compress_hook registers on CPU by now"
    assert "BF16 all reduce communication hook required CUDA" in error["message"]
    assert run_of(pool, VALUES, "hooks_ref:bf16_compress_hook").finished


def test_signatures_and_names_are_torchs() -> None:
    import inspect

    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

    import hooks_ref

    for name in (
        "allreduce_hook",
        "fp16_compress_hook",
        "bf16_compress_hook",
        "fp16_compress_wrapper",
        "bf16_compress_wrapper",
    ):
        theirs, ours = (
            inspect.signature(getattr(module, name)) for module in (default_hooks, hooks_ref)
        )
        assert list(ours.parameters) == list(theirs.parameters), name
    assert list(inspect.signature(hooks_ref.noop_hook).parameters) == list(
        inspect.signature(debugging_hooks.noop_hook).parameters
    )


# Functions that may wait: none is a hook or a callback, and what they wait for is complete when
# they return.
MAY_WAIT = {
    "_collectives.py": {"value_on_stream"},  # of a complete future
    # Called by the trainer:
    "model_averaging.py": {"_average"},
    "quantized_collectives.py": {"wait", "_begun", "_all_reduce"},
    "sync_strategies.py": {"finish"},
}


@pytest.mark.parametrize("path", sorted(Path("hooks_ref").glob("*.py")), ids=lambda path: path.name)
def test_depends_on_torch_alone_and_never_waits(path: Path) -> None:
    text = path.read_text()
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    allowed = {"torch", "hooks_ref", *sys.stdlib_module_names}
    assert all(line.split()[1].partition(".")[0] in allowed for line in imports), shlex.join(
        imports
    )
    assert not any("torch.distributed.algorithms" in line for line in imports)
    assert set(_waiting(ast.parse(text), "")) <= MAY_WAIT.get(path.name, set())


def _waiting(node: ast.AST, inside: str) -> Iterator[str]:
    """Yield the innermost function around each call of a ``wait``."""
    if isinstance(node, ast.FunctionDef):
        inside = node.name
    elif isinstance(node, ast.Lambda):
        inside = "a lambda"
    if isinstance(node, ast.Attribute) and node.attr == "wait":
        yield inside
    for child in ast.iter_child_nodes(node):
        yield from _waiting(child, inside)
