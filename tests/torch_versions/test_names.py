"""Private names of torch: used in one module alone, listed, and there in this version or not."""

import ast
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed

from conformance.torch_versions.names import OF_REFERENCES, OF_THE_KIT, PrivateName
from conformance.torch_versions.startup import has_part, missing_parts
from conformance.torch_versions.tested import release

ROOT = Path(__file__).resolve().parents[2]
LAYER = ROOT / "conformance" / "torch_versions"
PRIVATE = LAYER / "private.py"
SOURCES = sorted(
    path for package in ("conformance", "hooks_ref") for path in (ROOT / package).rglob("*.py")
)
_PRIVATE = re.compile(r"_(?!_)\w+")
_IN_TEXT = re.compile(r"torch(?:\.\w+)*\._(?!_)\w+(?:\.\w+)*")
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
# Private names of Python, which are not torch's.
PYTHONS = {"_filters_mutated", "_ncallbacks", "_threads_queues", "_type"}


def test_no_private_name_of_torch_is_used_outside_the_layer() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        if LAYER not in path.parents
        for line, name in private_names(nodes_of(path), own_names())
        if not any(is_listed_for(path, name, one) for one in OF_REFERENCES)
    }
    assert found == set()


def is_listed_for(path: Path, name: str, one: PrivateName) -> bool:
    return path.parent.name == "hooks_ref" and path.stem in one.modules and name in parts(one)


def parts(one: PrivateName) -> set[str]:
    return {part for part in one.name.split(".") if _PRIVATE.fullmatch(part)}


def test_every_name_in_the_layer_is_listed() -> None:
    listed = {part for one in OF_THE_KIT for part in parts(one)}
    used = {name for _, name in private_names(nodes_of(PRIVATE), own_names())}
    assert used <= listed


def test_every_listed_name_is_used() -> None:
    text = PRIVATE.read_text()
    assert [one.name for one in OF_THE_KIT if not re.search(rf"\b{last(one)}", text)] == []
    for one in OF_REFERENCES:
        for module in one.modules:
            assert last(one) in (ROOT / "hooks_ref" / f"{module}.py").read_text(), one.name


def last(one: PrivateName) -> str:
    return next(part for part in reversed(one.name.split(".")) if _PRIVATE.fullmatch(part))


def test_each_name_is_listed_once() -> None:
    names = [one.name for one in OF_THE_KIT]
    assert len(names) == len(set(names))


def test_this_torch_has_the_names_that_the_list_promises() -> None:
    assert missing_parts(torch.__version__) == []


@pytest.mark.parametrize(
    "one",
    [one for one in OF_THE_KIT if one.since or one.until],
    ids=lambda one: one.name,
)
def test_this_torch_lacks_the_names_of_other_versions(one: PrivateName) -> None:
    here = release(torch.__version__)
    older = bool(one.since) and here < release(one.since)
    newer = bool(one.until) and here > release(one.until)
    if not (older or newer):
        assert has_part(one.name)
    else:
        assert not has_part(one.name)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C.x()", ["_C"]),
        ("import torch.distributed as dist\ndist.distributed_c10d._world.pg_map", ["_world"]),
        ("from torch.distributed import distributed_c10d as c\nc._world", ["_world"]),
        ("from torch._utils import flatten", ["_utils"]),
        ("from torch.nn.parallel.distributed import _find_tensors", ["_find_tensors"]),
        ("import torch._dynamo", ["_dynamo"]),
        ("def f(ddp):\n    return ddp._sync_buffers()", ["_sync_buffers"]),
        (
            "def f(ddp):\n    return getattr(ddp, '_use_python_reducer', False)",
            ["_use_python_reducer"],
        ),
        ("NAMES = ('torch._C.Future',)", ["_C"]),
        ("def f(self):\n    return self._own", []),
        ("import os\nos._exit(0)", []),
        ("def f(x):\n    '''See torch._C.Future.'''\n    return x.__dict__", []),
    ],
)
def test_the_walk_finds_private_names(source: str, found: list[str]) -> None:
    nodes = list(ast.walk(ast.parse(source)))
    assert [name for _, name in private_names(nodes, frozenset({"_own"}))] == found


# --- the walk -------------------------------------------------------------------------------------


@cache
def own_names() -> frozenset[str]:
    """Return the names that the kit's sources bind themselves."""
    return frozenset(name for path in SOURCES for name in bound_names(nodes_of(path)))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            # Only an object of the kit's own gets attributes by way of self and cls.
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def private_names(nodes: Sequence[ast.AST], own: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the first private part of each use of a private name that is torch's.

    An attribute counts if its object comes from torch by name, or if neither the kit nor a module
    of Python has such an attribute.
    """
    modules = imported(nodes)
    texts = docstrings(nodes)
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        name: str | None = None
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = of_attribute(node, modules, own)
        elif isinstance(node, ast.ImportFrom) and is_of_torch(node.module or ""):
            name = private_part(".".join([node.module or "", *(one.name for one in node.names)]))
        elif isinstance(node, ast.Import):
            name = private_part(".".join(one.name for one in node.names if is_of_torch(one.name)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in texts and _IN_TEXT.fullmatch(node.value):
                name = private_part(node.value)
        elif isinstance(node, ast.Call):
            name = of_call_by_name(node, own)
        if name is not None and name not in PYTHONS:
            yield getattr(node, "lineno", 0), name


def imported(nodes: Iterable[ast.AST]) -> Mapping[str, str]:
    """Return the full name behind each name that a module imports."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                found[one.asname or one.name.partition(".")[0]] = one.name
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                found[one.asname or one.name] = f"{node.module}.{one.name}"
    return found


def docstrings(nodes: Iterable[ast.AST]) -> set[int]:
    return {id(node.value) for node in nodes if isinstance(node, ast.Expr)}


def of_attribute(
    node: ast.Attribute, modules: Mapping[str, str], own: frozenset[str]
) -> str | None:
    chain: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        chain.append(value.attr)
        value = value.value
    chain.reverse()
    root = modules.get(value.id, "") if isinstance(value, ast.Name) else ""
    private = [part for part in chain if _PRIVATE.fullmatch(part)]
    if is_of_torch(root):
        return private[0] if private else None
    if root.partition(".")[0] in sys.stdlib_module_names:
        return None
    return next((part for part in private if part not in own), None)


def of_call_by_name(node: ast.Call, own: frozenset[str]) -> str | None:
    """Return the private name that getattr() or the like looks up."""
    function = node.func
    if not isinstance(function, ast.Name) or function.id not in _BY_NAME or len(node.args) < 2:
        return None
    looked_up = node.args[1]
    if not isinstance(looked_up, ast.Constant) or not isinstance(looked_up.value, str):
        return None
    name = looked_up.value
    return name if _PRIVATE.fullmatch(name) and name not in own else None


def private_part(dotted: str) -> str | None:
    return next((part for part in dotted.split(".") if _PRIVATE.fullmatch(part)), None)


def is_of_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def test_modules_that_need_no_torch_import_none() -> None:
    for name in ("names", "tested"):
        module = importlib.import_module(f"conformance.torch_versions.{name}")
        nodes = nodes_of(Path(str(module.__file__)))
        assert not any(is_of_torch(full) for full in imported(nodes).values()), name
