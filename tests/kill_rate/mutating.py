"""The mutations of a module: one change of its source at a time.

Left alone: docstrings, messages of errors, checks that only raise, saving and loading of a state,
statistics (no rule covers them), defaults of arguments, and ``strict=`` and ``sorted=``, which
change nothing.
"""

import ast
import collections
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = (
    "__getstate__",
    "__setstate__",
    "__repr__",
    "state_dict",
    "load_state_dict",
    "compression_stats",
)
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Div,
        ast.Div: ast.Mult,
        ast.FloorDiv: ast.Mult,
        ast.MatMult: ast.Mult,
    },
    **{
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
    },
    **{
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
        ast.And: ast.Or,
        ast.Or: ast.And,
    },
}
DROPPED_CALLS = (
    "clone",
    "contiguous",
    "t",
    "neg_",
    "abs",
    "sign",
    "clamp",
    "clamp_",
    "round",
    "floor",
    "add_",
    "sub_",
    "mul_",
    "div_",
)


@dataclass(frozen=True)
class Mutation:
    """One change of one module."""

    module: str
    line: int
    change: str
    source: str
    place: str = ""  # the function, and the first line of the statement as it was: lines move

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line}: {self.change}"

    @property
    def key(self) -> str:
        """The mutation's name in ``kill_rate.toml``."""
        return f"{self.module}.{self.place} | {self.change}"


def mutations(module: str) -> Iterator[Mutation]:
    """Make every change of a module, one at a time."""
    for line, change, place, tree in _changes(module):
        yield Mutation(module, line, change, ast.unparse(ast.fix_missing_locations(tree)), place)


def keys(module: str) -> Iterator[str]:
    """Yield the names of a module's mutations in ``kill_rate.toml``."""
    for line, change, place, _ in _changes(module):
        yield Mutation(module, line, change, "", place).key


def _changes(module: str) -> Iterator[tuple[int, str, str, ast.Module]]:
    """Yield (line, change, place, changed tree), the tree until the next one is made."""
    tree = ast.parse((ROOT / "hooks_ref" / f"{module}.py").read_text())
    named = collections.Counter[tuple[str, str]]()
    for path in [list(path) for path in _places(tree, [])]:
        node, place = _at(tree, path), _place(tree, path)
        for variant in itertools.count():
            if (mutated := _mutated(copy.deepcopy(node), variant)) is None:
                break
            change = f"{_short(ast.unparse(node))}  ->  {_short(ast.unparse(mutated))}"
            named[place, change] += 1
            again = f" (no. {named[place, change]})" if named[place, change] > 1 else ""
            _put(tree, path, mutated)
            yield getattr(node, "lineno", 0), change + again, place, tree
            _put(tree, path, node)


def _places(
    node: ast.AST, path: list[tuple[str, int | None]]
) -> Iterator[list[tuple[str, int | None]]]:
    for name, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_left_alone(child, name):
                continue
            here = [*path, (name, index)]
            if any(_mutated(copy.deepcopy(child), variant) for variant in (0,)) and _is_code(path):
                yield here
            yield from _places(child, here)


def _place(tree: ast.AST, path: list[tuple[str, int | None]]) -> str:
    around = [_at(tree, path[:end]) for end in range(1, len(path) + 1)]
    names = ".".join(
        node.name for node in around if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    )
    statement = [node for node in around if isinstance(node, ast.stmt)][-1]
    return f"{names}: {ast.unparse(statement).splitlines()[0]}"


def _is_code(path: list[tuple[str, int | None]]) -> bool:
    """Whether a place is inside a function: hooks do not go wrong in definitions of a module."""
    return len(path) >= 2


def _is_left_alone(node: ast.AST, field: str) -> bool:
    statistics = (
        isinstance(node, ast.stmt)
        and not isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and _is_statistics(node)
    )
    only_raises = (
        isinstance(node, ast.If)
        and all(isinstance(one, ast.Raise) for one in node.body)
        and not node.orelse
    )
    skipped = isinstance(node, ast.FunctionDef) and node.name in SKIPPED
    # Checks of arguments are no part of a hook's result; ``strict`` and ``sorted`` change nothing.
    checked = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.startswith("check_")
    )
    equal = isinstance(node, ast.keyword) and node.arg in ("strict", "sorted")
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    abstract = any(isinstance(one, ast.Name) and one.id == "abstractmethod" for one in decorators)
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    # Another default is no broken hook; that defaults are torch's is compared elsewhere.
    default = field in ("defaults", "kw_defaults")
    typing = field in ("annotation", "returns", "bases", "decorator_list", "type_comment") or (
        isinstance(node, ast.AnnAssign) and not node.value
    )
    return bool(
        statistics
        or only_raises
        or skipped
        or checked
        or equal
        or abstract
        or docstring
        or default
        or typing
        or isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr))
    )


def _is_statistics(node: ast.stmt) -> bool:
    """Whether a statement logs, and does nothing else, or counts elements sent."""
    if isinstance(node, ast.If):
        return not node.orelse and all(map(_is_statistics, node.body))
    text = ast.unparse(node)
    return text.startswith("logger.") or text.partition("=")[0].strip(" +").endswith(
        ("numel_before", "numel_after")
    )


def _mutated(node: ast.AST, variant: int) -> ast.AST | None:
    """Return the node with a defect, or None if it has no such variant."""
    found: list[ast.AST] = []
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in SWAPS:
        found.append(_with(node, op=SWAPS[type(node.op)]()))
    if isinstance(node, ast.AugAssign):
        found.append(ast.Pass())
    if isinstance(node, ast.BoolOp):
        found.append(_with(node, op=SWAPS[type(node.op)]()))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        found.append(_with(node, ops=[SWAPS[type(node.ops[0])]()]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        found.append(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        found.append(ast.Constant(node.value + 1))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        found.append(ast.Constant(not node.value))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        found.append(ast.Pass())
    if isinstance(node, ast.If):
        found += [_with(node, test=ast.Constant(True)), _with(node, test=ast.Constant(False))]
    if isinstance(node, ast.IfExp):
        found += [node.body, node.orelse]
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED_CALLS:
            found.append(node.func.value)
        if any(keyword.arg == "group" for keyword in node.keywords):
            found.append(
                _with(
                    node, keywords=[keyword for keyword in node.keywords if keyword.arg != "group"]
                )
            )
    return found[variant] if variant < len(found) else None


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _at(tree: ast.AST, path: list[tuple[str, int | None]]) -> ast.AST:
    node: ast.AST = tree
    for name, index in path:
        node = getattr(node, name) if index is None else getattr(node, name)[index]
    return node


def _put(tree: ast.AST, path: list[tuple[str, int | None]], node: ast.AST) -> None:
    parent, (name, index) = _at(tree, path[:-1]), path[-1]
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else line[:87] + "..."
