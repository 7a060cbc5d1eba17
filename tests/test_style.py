"""The scripts that count habits of style and check the layers, on snippets and on the source."""

import json
import subprocess
from pathlib import Path

import pytest

from tools import layers, style_rates
from tools.style_rates import Counts, count_passage, count_source, find_habits

ROOT = Path(__file__).resolve().parent.parent


def habits(text: str) -> list[str]:
    return sorted(habit for habit, _ in find_habits(text))


def uses(source: str, habit: str, path: str = "conformance/a.py") -> list[tuple[str, int]]:
    counts = count_source(path, source)
    return [(use.medium, use.line) for use in counts.occurrences if use.habit == habit]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return what the ranks sent.", ["headless"]),
        ("What a rank writes down for rules.", ["headless"]),
        ("The note goes to whoever waits.", ["headless"]),
        ("Notice who waits for the stream.", ["headless"]),
        ("It keeps whatever was sent.", ["headless"]),
        ("The sum of what arrives is exact.", ["headless", "of_which"]),
        ("Return '' where it holds.", ["where"]),
        ("Where ranks die, others wait.", ["where"]),
        ("A rule says that sums are exact.", ["says"]),
        ("The subject is told the step.", ["says"]),
        ("Says that it averages.", ["opening"]),
        ("Take the state. Ask the rule.", ["opening"]),
        ("Two sums, of which one is exact.", ["of_which"]),
        ("Keep a copy of it.", ["of_which"]),
        ("The mean of\nthose is exact.", ["of_which"]),
    ],
)
def test_a_habit_is_found(text: str, expected: list[str]) -> None:
    assert habits(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "What is a hook? A function.",
        "Record in what order ranks arrive.",
        "It depends on what dtype the bucket has.",
        "Sort out what is what.",
        "Those who come later are refused, and a user who waits sees an error.",
        "Every step is the same, whatever the group is.",
        "Whatever other groups do, the rank waits.",
        "Return the folder where results lie, and the place where it failed.",
        "Print from where it was called.",
        "The bound is n * eps, where n is the size of the group.",
        "Call `torch.where` or ``np.where(x)``, or torch.where.",
        "Users ask for more, and people say so.",
        "The ranks are told apart by their names.",
        "said: the options.",
        "All of it is kept, and none of them is lost.",
        'The option "what it says, where of it" is quoted.',
        "```\nsay what is where\n```",
        "See [the page](https://what/where/says).",
    ],
)
def test_plain_text_has_no_habit(text: str) -> None:
    assert habits(text) == []


def test_docstrings_comments_and_messages_are_read_at_their_lines() -> None:
    source = '''"""A module.

Return what is sent.
"""
# A comment goes on
# to tell of

# what follows.
VALUE = f"{1} may be what the rank sent"  # what for
short = "what it is"
raise ValueError("one may ask what " "the rank sent")
code = """
def f(): what it is, what it was
"""
'''
    expected = [("prose", 3), ("prose", 8), ("prose", 9), ("messages", 9), ("messages", 11)]
    assert sorted(uses(source, "headless")) == sorted(expected)


def test_a_sentence_may_span_comment_lines() -> None:
    assert uses("# a sum of\n# which rows\nx = 1\n", "of_which") == [("prose", 1)]


def test_pragmas_are_no_comments() -> None:
    counts = count_source("a.py", "import a  # noqa: where it says\n")
    assert counts.words.get("prose", 0) == 0


def test_quoted_text_counts_as_words() -> None:
    passage = style_rates.Passage("a.md", 1, "markdown", "Call ``what it says`` twice.")
    assert count_passage(passage).words == {"markdown": 5}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a, b = x, y", 1),
        ("self.a, b = x, {}", 1),
        ("a, b = b, a", 0),
        ("a, b = b, a + b", 0),
        ("a, b = f()", 0),
        ("a, *b = x, y, z", 0),
    ],
)
def test_tuple_assignments(line: str, expected: int) -> None:
    assert len(uses(line + "\n", "tuples")) == expected


def test_conditional_expressions() -> None:
    source = (
        "a = b if c else d\ne = f if g else (h if i else j)\nk = f'{l if m else n}' if o else p\n"
    )
    assert sorted(uses(source, "conditionals")) == [("code", 1)] + 2 * [("code", 2)] + 2 * [
        ("code", 3)
    ]
    assert sorted(uses(source, "nested")) == [("code", 2), ("code", 3)]


def test_lines_comments_and_fields() -> None:
    source = f'''def f(self):
    """Return why not; '' if so."""
    # A reason.
    self.where = 1  # not a comment line
    where = "{"x" * 100}"
'''
    counts = count_source("a.py", source)
    assert (counts.lines, counts.comment_lines) == (5, 1)
    assert uses(source, "fine_strings") == [("code", 2)]
    assert uses(source, "where_fields") == [("code", 4)]
    assert uses(source, "long_lines") == [("code", 5)]
    assert counts.rate("code", "long_lines") == 20.0
    assert counts.rate("code", "comment_lines") == 200.0


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("README.md", "(root)"),
        ("tests/mutants/hooks.py", "tests"),
        ("conformance/errors.py", "conformance"),
        ("conformance/judging/oracles/mean.py", "conformance/judging"),
    ],
)
def test_packages(path: str, package: str) -> None:
    assert style_rates.package_of(path) == package


def counted(text: str, times: int) -> dict[str, Counts]:
    return {"p": count_source("p/a.md", text * times)}


def test_an_excess_names_the_worst_files() -> None:
    packages = counted("Return what the ranks have sent in this step. ", 100)
    excess = "p: headless in markdown: 111.11, limit 2; most in p/a.md (100)"
    assert style_rates.find_excesses(packages, style_rates.LIMITS, {}) == [excess]
    assert style_rates.find_excesses(packages, style_rates.LIMITS, {"p": {"headless": 200}}) == []


def test_few_words_have_no_rate() -> None:
    packages = counted("Return what the ranks have sent in this step. ", 10)
    assert style_rates.find_excesses(packages, style_rates.LIMITS, {}) == []
    assert style_rates.find_excesses(packages, style_rates.LIMITS, {}, min_words=50)


def test_limits_come_from_the_project(tmp_path: Path) -> None:
    assert style_rates.read_limits(tmp_path) == (style_rates.LIMITS, {}, style_rates.MIN_WORDS)
    project = tmp_path / "pyproject.toml"
    project.write_text(
        "[tool.style]\nmin_words = 5\n[tool.style.limits]\nsays = 3\ntuples = "
        '2\n[tool.style.packages."conformance/rules"]\nwhere = 4\n'
    )
    limits, packages, min_words = style_rates.read_limits(tmp_path)
    assert (limits["says"], limits["tuples"], limits["headless"]) == (3, 2, 2.0)
    assert packages == {"conformance/rules": {"where": 4}}
    assert min_words == 5
    project.write_text("[tool.style.limits]\nspeaks = 3\n")
    with pytest.raises(SystemExit, match="no such habit"):
        style_rates.read_limits(tmp_path)


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    subprocess.run(command, check=True, capture_output=True)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(tmp_path, "init")
    (tmp_path / "old.md").write_text("Return what was sent.\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "pyproject.toml").write_text("[tool.style]\nmin_words = 1\n")
    (tmp_path / "new.md").write_text("Plain.\nKeep what is left.\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "Note what is new")

    def run(*arguments: str) -> tuple[int, list[str]]:
        code = style_rates.main(["--root", str(tmp_path), *arguments])
        return code, capsys.readouterr().out.splitlines()

    assert run("--list", "headless", "new.md") == (0, ["new.md:2: Plain. Keep what is left."])
    assert len(run("--list", "headless")[1]) == 2
    assert run("--list", "says") == (0, [])
    code, lines = run("--check", "--base", "HEAD~1")
    assert code == 1
    assert [line.split(":")[0] for line in lines] == ["(root)", "(commits)"]
    assert "new.md" in lines[0]
    assert "old.md" not in lines[0]
    assert run("--check", "--base", "HEAD") == (0, [])
    assert "| (root) | 9 | 222.2 |" in "\n".join(run()[1])
    assert json.loads("\n".join(run("--json")[1]))["markdown"]["(root)"]["headless"] == 222.22


def tree(root: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, source in files.items():
        path = root / "conformance" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return layers.list_modules(root)


def test_imports_are_resolved() -> None:
    known = {"conformance", "conformance.a", "conformance.a.b", "conformance.a.c", "conformance.d"}
    source = """
import conformance.a.b as b, os
from conformance import d
from conformance.a import b, name
from . import c
from .c import name
from .. import d as e
if TYPE_CHECKING:
    from conformance.d import T
else:
    import conformance.d
try:
    import conformance.a
except ImportError:
    pass
class C:
    import conformance.d
def f():
    from conformance import missing
    g = lambda: import_module("conformance.a.c")
"""
    found = layers.find_imports("conformance.a.b", source, known)
    assert [
        (item.imported.removeprefix("conformance."), item.line, item.when) for item in found
    ] == [
        ("d", 3, "load"),
        ("a", 4, "load"),
        ("a.c", 5, "load"),
        ("a.c", 6, "load"),
        ("d", 7, "load"),
        ("d", 9, "typing"),
        ("d", 11, "load"),
        ("a", 13, "load"),
        ("d", 17, "load"),
        ("conformance", 19, "call"),
        ("a.c", 20, "call"),
    ]
    inside = layers.find_imports("conformance.a", "from .b import x\n", known, is_package=True)
    assert [item.imported for item in inside] == ["conformance.a.b"]


def test_layers_and_circles() -> None:
    graph = {"a": {"b", "c"}, "b": {"d"}, "c": set(), "d": {"e"}, "e": {"d", "c"}}
    assert layers.find_circles(graph) == [["d", "e"]]
    assert layers.assign_layers(graph) == {"c": 0, "d": 1, "e": 1, "b": 2, "a": 3}


GOOD = {
    "__init__.py": "from conformance.session.engine import run\n",
    "errors.py": "",
    "cli/__init__.py": "",
    "hosts/__init__.py": "",
    "records/__init__.py": "import conformance.errors\n",
    "ranks/__init__.py": "",
    "ranks/rank.py": "from conformance.records import Run\n",
    "judging/__init__.py": "from conformance.errors import KitError\n",
    "certificates/__init__.py": "",
    "rules/__init__.py": "from conformance import judging\n",
    "session/__init__.py": "",
    "session/engine.py": "from conformance.rules import book\nimport conformance.ranks.rank\n",
}


def breaches(root: Path, **changes: str) -> list[str]:
    files = {f"{name.replace('__', '/')}.py": source for name, source in changes.items()}
    modules = tree(root, GOOD | files)
    return layers.find_breaches(modules, layers.read_imports(modules))


def test_a_tree_that_keeps_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert breaches(tmp_path) == []
    assert layers.main(["--root", str(tmp_path), "--check"]) == 0
    assert capsys.readouterr().out == ""
    assert layers.main(["--root", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "12 modules in 8 packages" in text
    assert "  session            2  ranks, rules\n" in text


@pytest.mark.parametrize("package", ["judging", "rules", "certificates"])
@pytest.mark.parametrize("target", ["ranks.rank", "hosts", "session.engine", "cli"])
def test_judging_code_imports_no_running_code(tmp_path: Path, package: str, target: str) -> None:
    found = breaches(
        tmp_path, **{f"{package}__new": f"def f():\n    import conformance.{target}\n"}
    )
    assert found == [
        f"conformance.{package}.new:2 imports conformance.{target} (call): {package} may not "
        f"import {target.split('.')[0]}"
    ]


@pytest.mark.parametrize("target", ["judging", "rules", "hosts", "session"])
def test_ranks_import_no_judging_code(tmp_path: Path, target: str) -> None:
    [found] = breaches(tmp_path, ranks__new=f"from conformance import {target}\n")
    assert found.endswith(f"(load): ranks may not import {target}")


def test_imports_for_typing_are_allowed(tmp_path: Path) -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import conformance.ranks\n"
    assert breaches(tmp_path, judging__new=source) == []


def test_a_circle_breaks_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = "def f():\n    import conformance.records.a\n"
    assert breaches(tmp_path, records__a="import conformance.records.b\n", records__b=late) == []
    early = "import conformance.records.a\n"
    assert breaches(tmp_path, records__a="import conformance.records.b\n", records__b=early) == [
        "circle of 2 modules: conformance.records.a, conformance.records.b"
    ]
    assert layers.main(["--root", str(tmp_path), "--check"]) == 1
    assert "circle of 2 modules" in capsys.readouterr().out


def test_indirect_imports_are_reported(tmp_path: Path) -> None:
    files = {
        "records/new.py": "import conformance.hosts\n",
        "judging/new.py": "import conformance.records.new\n",
    }
    modules = tree(tmp_path, GOOD | files)
    imports = layers.read_imports(modules)
    assert layers.find_breaches(modules, imports) == []
    graph = layers.make_graph(modules, imports)
    assert layers.find_indirect_imports(graph, layers.list_packages(modules)) == [
        ["conformance.judging.new", "conformance.records.new", "conformance.hosts"]
    ]


def test_a_missing_package_breaks_the_contract(tmp_path: Path) -> None:
    modules = tree(tmp_path, {"ranks/__init__.py": ""})
    [*missing] = layers.find_breaches(modules, [])
    assert len(missing) == 3
    assert "conformance/judging/ does not exist" in missing[0]


class TestSource:
    """The source of this repository keeps the import contract and the limits of style."""

    def test_import_contract(self) -> None:
        modules = layers.list_modules(ROOT)
        assert layers.find_breaches(modules, layers.read_imports(modules)) == []
