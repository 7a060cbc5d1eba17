"""Arguments that the oldest supported versions lack: no call passes them to torch.distributed."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("conformance", "hooks_ref", "tests", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# torch 2.6 added them; every version has src=dist.get_global_rank(group, rank).
NEWER = ("group_src", "group_dst")


def test_no_call_passes_an_argument_that_torch_2_4_lacks() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {argument}"
        for path in SOURCES
        for line, argument in newer_arguments(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("dist.broadcast(tensor, group=group, group_src=0)", ["group_src"]),
        ("torch.distributed.send(tensor, group_dst=0)", ["group_dst"]),
        ("works = [dist.irecv(part, group_src=peer) for peer in peers]", ["group_src"]),
        ("dist.broadcast(tensor, src=0)", []),
        # The arguments of other functions of the same names, such as hooks_ref's scatter.
        ("scatter(tensor, group_src=1)", []),
    ],
)
def test_the_walk_finds_newer_arguments(source: str, found: list[str]) -> None:
    assert [argument for _, argument in newer_arguments(source)] == found


def newer_arguments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each such argument in a call of torch.distributed."""
    if not any(argument in source for argument in NEWER):
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func.value) not in ("dist", "torch.distributed"):
            continue
        for keyword in node.keywords:
            if keyword.arg in NEWER:
                yield node.lineno, keyword.arg
