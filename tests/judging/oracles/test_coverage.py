"""Branches that no run took are named, and others are counted."""

import textwrap

import pytest

from conformance.judging.oracles.code_numbers import dtypes_in, numbers_in
from conformance.judging.oracles.coverage import Coverage, SourceFile, analyse, merge
from conformance.records.source_marks import LIST_NAME, marked


def coverage(source: str, calls: str) -> Coverage:
    """Return the coverage of calls of functions in a source."""
    text = textwrap.dedent(source).encode()
    tree, count = marked(text)
    ran = [0] * count
    space = {"__name__": "made", LIST_NAME: ran}
    exec(compile(tree, "<made>", "exec"), space)
    at_import = frozenset(mark for mark in range(count) if ran[mark])
    ran[:] = [0] * count
    exec(calls, space)
    after = frozenset(mark for mark in range(count) if ran[mark])
    return analyse([SourceFile("pkg.made", "/x/pkg/made.py", "digest", text, after, at_import)])


def numbers(source: str, calls: str, **arguments: object) -> list[int]:
    return [number.value for number in numbers_in(coverage(source, calls), arguments)]


def test_names_the_outermost_branch_with_its_place_and_source() -> None:
    found = coverage(
        """
        def hook(n):
            if n > 100:
                if n > 200:
                    return 2
                return 1
            return 0
        """,
        "hook(1)",
    )
    assert found.lines == ["pkg/made.py:3: if n > 100:  (never true)"]


def test_a_condition_of_several_lines_is_named_once() -> None:
    found = coverage(
        """
        def hook(n):
            if (
                n > 100
                and n < 1000
            ):
                return 1
            return 0
        """,
        "hook(1)",
    )
    assert found.lines == ["pkg/made.py:3: if ( n > 100 and n < 1000  (never true)"]


def test_validation_and_imports_are_counted() -> None:
    found = coverage(
        """
        import typing
        if typing.TYPE_CHECKING:
            import os
        try:
            import json
        except ImportError:
            json = None

        def hook(n):
            if n < 0:
                message = f"{n}"
                raise ValueError(message)
            return n

        class Base:
            def step(self):
                return self.inner()
            def inner(self):
                raise NotImplementedError

        class Mine(Base):
            def inner(self):
                return 1
        """,
        "hook(1); Mine().step()",
    )
    assert found.lines == []
    assert found.only_raise == 2
    assert found.at_import == 2


def test_functions_that_were_never_called_are_named_once_if_they_are_used() -> None:
    found = coverage(
        """
        def helper(n):
            if n:
                return 1
            return 2

        def unrelated(n):
            return n

        class State:
            def __init__(self):
                self.x = 1
            def state_dict(self):
                return {"x": self.x}

        class Other:
            def method(self):
                return 1

        def hook(n):
            State()
            if n > 5:
                return helper(n)
            return n
        """,
        "hook(1)",
    )
    assert found.lines == [
        "pkg/made.py:22: if n > 5:  (never true)",
        "pkg/made.py:2: helper was never called",
        "pkg/made.py:13: State.state_dict was never called",
    ]
    assert found.not_used == 2


def test_what_runs_only_at_import_is_not_used() -> None:
    source = """
        def factory(flag):
            def hook(n):
                return n if flag else -n
            if flag == 2:
                return None
            return hook

        used = factory(1)
        """
    assert coverage(source, "").files == []
    found = coverage(source, "used(1)")
    assert found.lines == [
        "pkg/made.py:4: return n if flag else -n  (never false)",
        "pkg/made.py:5: if flag == 2:  (never true)",
    ]


def test_marks_of_all_ranks_count_together() -> None:
    one = {"files": {"p": {"module": "m", "sha256": "a", "ran": [1], "at_import": []}}}
    two = {"files": {"p": {"module": "m", "sha256": "a", "ran": [2], "at_import": [0]}}}
    changed = {"files": {"p": {"module": "m", "sha256": "b", "ran": [7], "at_import": []}}}
    merged = merge([one, two, changed])["p"]
    assert merged.ran == {1, 2}
    assert merged.at_import == {0}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("n > 65_536", [65536]),
        ("n > 1 << 20", [1 << 20]),
        ("n * 4 >= 25 * 1024 * 1024", [4, 26214400, 104857600, 26214404]),
        ("n > LIMIT", [5000]),
        ("n > limit", [777]),
        ("n > State.limit", [321]),
        ("n > int(1e6)", [1_000_000]),
        ("n // 1024 > 16", [1024, 16, 16384, 1040]),
        ("3 < n < 10**5 and n != 4", [3, 100_000, 4, 1_200_000, 100_007]),
        ("n > -70", [70]),
        ("n > 0.5", [0.5]),
        ("bool(n)", []),
    ],
)
def test_numbers_of_untaken_conditions(written: str, expected: list[int]) -> None:
    source = f"""
        LIMIT = 5_000
        class State:
            limit = 321
        def hook(n, limit=777):
            if {written}:
                return 1
            return 0
        """
    values = {"n > -70": "hook(-99)", "n > 0.5": "hook(0)"}
    assert numbers(source, values.get(written, "hook(0)")) == expected


def test_numbers_of_closures_attributes_and_arguments_of_the_target() -> None:
    source = """
        class State:
            def __init__(self, threshold, period=99):
                self.threshold = threshold
                self.every = period * 2
                self.step = 0

        def make(limit=10):
            bound = limit * 3
            def hook(state, n):
                if n > bound:
                    return 1
                if n > state.threshold:
                    return 2
                is_late = state.step > state.every
                return 3 if is_late else 4
            return hook
        """
    calls = "make()(State(4096), 1)"
    assert numbers(source, calls, threshold=4096) == [30, 4096, 198]
    assert numbers(source, calls, threshold=4096, limit=50, every=7) == [150, 4096, 7]


def test_numbers_of_kept_comparisons_and_not_of_conditions_that_went_both_ways() -> None:
    source = """
        def hook(n):
            large = n > 1000
            if n > 5:
                n += 1
            return n * (1 + large)
        """
    assert numbers(source, "hook(1); hook(6)") == [1000]


def test_numbers_of_which_marks_show_one_side_alone() -> None:
    source = """
        def hook(n, given):
            few = [one for one in given if one < 2_000]
            return n > 3_000 or bool(few)
        """
    assert numbers(source, "hook(1, [1])") == [2_000, 3_000]


def test_quantities_follow_the_names() -> None:
    found = coverage(
        """
        def hook(step, numel, other):
            if step > 40:
                return 1
            if numel > 5_000:
                return 2
            if other > 60:
                return 3
        """,
        "hook(1, 1, 1)",
    )
    kinds = {number.value: number.quantities for number in numbers_in(found, {})}
    assert kinds[40] == {"steps"}
    assert kinds[5_000] == {"sizes"}
    assert kinds[60] == {"steps", "sizes", "counts", "worlds", "values"}


def test_dtypes_of_untaken_conditions() -> None:
    found = coverage(
        """
        import torch
        def hook(t):
            if t.dtype == torch.float64 or t.dtype is torch.half:
                return 1
            return 0
        """,
        "hook(torch.zeros(1))",
    )
    assert [dtype.value for dtype in dtypes_in(found)] == ["float64", "float16"]


def test_numbers_of_slices_and_of_calls_that_decide_without_a_branch() -> None:
    source = """
        OPTIONS = {"cap": 3_000}
        def hook(n, values):
            parts = values[: 5_000]
            parts = values[:OPTIONS["cap"]]
            other = list(range(0, n, 2**14))
            few = min(n, 7)
            return parts, other, few
        """
    assert numbers(source, "hook(1, [])") == [5000, 3000, 16384]


def test_a_default_of_the_environment_is_a_number() -> None:
    source = """
        import os
        LIMIT = int(os.environ.get("NO_SUCH_NAME", "0")) or 81_931
        def hook(n):
            big = n > LIMIT
            if big and n < 0:
                return 1
            return 0
        """
    assert numbers(source, "hook(1)") == [81_931]


def test_a_number_that_a_function_checks_is_known() -> None:
    source = """
        def positive(name, value):
            return value
        class State:
            def __init__(self, start=1_000):
                self.start = positive("start", start)
        def hook(state, step):
            if step >= state.start:
                return 1
            return 0
        """
    assert numbers(source, "hook(State(), 1)") == [1000]
