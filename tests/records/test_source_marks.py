"""Marked source does what the source does, and its marks mean what they say."""

import ast
import dataclasses
import inspect
import pickle
import sys
import textwrap
import traceback
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import hooks_ref
from conformance.records.source_marks import LIST_NAME, marked, marks_of


def run(source: str, name: str = "made") -> tuple[dict[str, Any], list[int]]:
    """Execute marked source; return its globals, and the list of marks."""
    tree, count = marked(textwrap.dedent(source).encode())
    ran = [0] * count
    space = {"__name__": name, LIST_NAME: ran}
    exec(compile(tree, f"<{name}>", "exec"), space)
    return space, ran


def untaken(source: str, calls: str) -> list[tuple[int, str]]:
    """Return the arms of functions that no call took."""
    text = textwrap.dedent(source)
    space, ran = run(text)
    exec(calls, space)
    arms = marks_of(text.encode()).arms
    return [(arm.line, arm.side) for arm in arms if arm.function and not ran[arm.mark]]


@pytest.mark.parametrize(
    ("body", "calls", "expected"),
    [
        ("if x > 3:\n    return 1", "f(1)", [(2, "never true")]),
        ("if x > 3:\n    return 1", "f(4)", [(2, "never false")]),
        ("if x > 3:\n    return 1", "f(1); f(4)", []),
        (
            "if x > 3:\n    y = 1\nelif x > 1:\n    y = 2\nelse:\n    y = 3",
            "f(1); f(4)",
            [(4, "never true")],
        ),
        ("return 1 if x else 2", "f(1)", [(2, "never false")]),
        ("return x and x > 2", "f(0)", [(2, 'never true before "and"')]),
        ("return x or x > 2", "f(1)", [(2, 'never false before "or"')]),
        ("for _ in range(x):\n    pass", "f(0)", [(2, "a loop that never ran")]),
        ("while x:\n    x -= 1", "f(0)", [(2, "never true")]),
        ("return [y for y in range(x) if y > 2]", "f(2)", [(2, "never true")]),
        ("return {y: 1 for y in range(x) if y > 2}", "f(5)", []),
        (
            "try:\n    y = 1 / x\nexcept ZeroDivisionError:\n    y = 0",
            "f(1)",
            [(4, "a handler that never ran")],
        ),
        (
            "match x:\n    case 1:\n        pass\n    case _:\n        pass",
            "f(1)",
            [(5, "a case that never matched")],
        ),
    ],
)
def test_arms(body: str, calls: str, expected: list[tuple[int, str]]) -> None:
    source = "def f(x):\n" + textwrap.indent(body, "    ")
    assert untaken(source, calls) == expected


def test_results_signatures_tracebacks_and_closures_stay_as_they_are() -> None:
    source = '''
    """Text."""
    from __future__ import annotations

    def outer(a: int, *, b: str = "x" if True else "y"):
        """Make."""
        kept = a
        def inner(c: int | None = None):
            nonlocal kept
            kept += c or 1
            return kept
        return inner

    class Thing:
        """Class."""
        __slots__ = ("x",)
        limit = 3 if True else 4
        def __init__(self):
            self.x = super().__init__()
        @property
        def double(self):
            return self.x
        def fails(self):
            if self.limit:
                raise ValueError(
                    "no")

    def generate(n):
        for i in range(n):
            yield i if i % 2 else -i

    short = lambda q: q * 2 if q else None
    '''
    space, _ = run(source)
    plain: dict[str, Any] = {"__name__": "made"}
    exec(textwrap.dedent(source), plain)
    for name in ("outer", "generate", "short"):
        assert inspect.signature(space[name]) == inspect.signature(plain[name])
        assert space[name].__code__.co_freevars == plain[name].__code__.co_freevars
        assert space[name].__code__.co_varnames == plain[name].__code__.co_varnames
        assert space[name].__doc__ == plain[name].__doc__
        assert space[name].__code__.co_firstlineno == plain[name].__code__.co_firstlineno
    assert vars(space["Thing"]).keys() == vars(plain["Thing"]).keys()
    assert list(space["generate"](5)) == list(plain["generate"](5))
    assert space["outer"](1)(2) == plain["outer"](1)(2) == 3
    assert space["short"](0) is None
    assert space["__doc__"] == "Text."
    lines = []
    for found in (space, plain):
        with pytest.raises(ValueError, match="no") as raised:
            found["Thing"]().fails()
        lines.append(traceback.extract_tb(raised.value.__traceback__)[-1].lineno)
    assert lines[0] == lines[1]


def test_a_compiled_function_is_marked_without_a_graph_break() -> None:
    """slipcover's bytecode makes torch.compile raise on Python 3.11; marks are plain statements."""
    space, ran = run(
        """
        def f(x, n=3):
            y = x * 2 if x.numel() > n else x + 1
            if x.dim() == 2:
                y = y + 5
            return y
        """
    )
    compiled = torch.compile(space["f"], backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 2.0))
    assert sum(ran) > 1


def test_pickles_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("made_for_pickle")
    space, _ = run("class State:\n    def __init__(self):\n        self.x = 3\n", "made_for_pickle")
    module.__dict__.update(space)
    monkeypatch.setitem(sys.modules, "made_for_pickle", module)
    made = pickle.loads(pickle.dumps(space["State"]()))
    assert made.x == 3


def sources() -> list[Path]:
    libraries = [Path(ast.__file__), Path(dataclasses.__file__)]
    return [*libraries, *sorted(Path(str(hooks_ref.__file__)).parent.glob("*.py"))]


def test_every_source_can_be_marked_and_numbers_are_those_of_the_meanings() -> None:
    for path in sources():
        source = path.read_bytes()
        tree, count = marked(source)
        compile(tree, str(path), "exec")
        meanings = marks_of(source)
        assert meanings.count == count
        numbers = [arm.mark for arm in meanings.arms]
        assert len(set(numbers)) == len(numbers)
        assert all(0 <= number < count for number in numbers)
