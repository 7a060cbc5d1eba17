"""Numbers that bound something without a comparison are found."""

import pytest

from conformance.judging.oracles.code_numbers import numbers_in
from conformance.judging.oracles.coverage import Coverage, SourceFile, analyse
from tests.judging.oracles.test_coverage import coverage, numbers


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("functools.lru_cache(maxsize=LIMIT)(hook)", [900]),
        ("collections.deque(maxlen=limit)", [777]),
        ("[None] * LIMIT", [900]),
        ("[True, False, False] * LIMIT", [900, 2700]),
        ("[0] * int(os.environ.get('NO_SUCH_NAME', '1_234'))", [1234]),
        ("[0] * int(os.getenv('NO_SUCH_NAME', 1_234))", [1234]),
        ("list(itertools.repeat(n, 20 * 100))", [2000]),
        ("n % LIMIT", [900]),
        ("n // LIMIT", [900]),
        ("n & (LIMIT + 1)", [901]),
        ("ROWS[n]", [1800, 50_000]),
        ("LONG[n]", [70]),
        ("{0: n, 500: n}", [500]),
        # Shapes and results, small numbers, seeds, formatting and tables to look up.
        ("(n, limit)", []),
        ("n % 64", []),
        ("n % (2**31 - 1)", []),
        ("'%d' % 5_000", []),
        ("LOOKED_UP[n]", []),
        ("n", []),
    ],
)
def test_numbers_without_a_branch(written: str, expected: list[int]) -> None:
    source = f"""
        import collections, functools, itertools, os
        LIMIT = 900
        ROWS = (dict(step=0, size=0), dict(step=1_800, size=50_000))
        LONG = [{"1, " * 70}]
        LOOKED_UP = [{", ".join(map(str, range(100, 150)))}]
        UNUSED = (1, 4_321)
        def hook(n, limit=777):
            return {written}
        """
    assert numbers(source, "hook(0)") == expected


def test_numbers_of_decorators_and_classes() -> None:
    source = """
        import functools
        class State:
            ring = [None] * 400
            @functools.lru_cache(500)
            def made(self, n):
                return self.ring[n]
        def hook(n):
            return State().made(n)
        """
    assert numbers(source, "hook(0)") == [500, 400]


def test_numbers_of_modules_that_are_only_imported() -> None:
    used = coverage(
        """
        from json import loads, dumps as ring
        def hook(n):
            return 0 if n > loads else ring
        """,
        "hook.__globals__.update(loads=5); hook(0)",
    )
    others = [
        SourceFile(
            "pkg.json",
            "/x/pkg/json.py",
            "digest",
            b"loads = 6_000\ndumps = [0] * 8_000",
            frozenset(),
        ),
        SourceFile("pkg.other", "/x/pkg/other.py", "digest", b"table = 7_000", frozenset()),
    ]
    found = Coverage(**{**vars(used), "imported": analyse(others).imported})
    assert found.only_imported == 2
    assert [number.value for number in numbers_in(found, {})] == [6_000, 8_000]
