"""The documents name files, commands and sections that exist."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import conformance.__main__
from conformance.session.options import Options, flag
from tools import layers

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ci/README.md", "hooks_ref/README.md"),
    *("conformance/RULES.md", "conformance/UPSTREAM.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_TOP = r"(?:conformance|tests|tools|docs|benchmarks|examples|hooks_ref|ci)"
# A path from the root: it has a folder, and no placeholder in capital letters or brackets.
_PATH = re.compile(rf"(?<![\w./:<-])({_TOP}/[\w./-]*\w/?|\.ci/\w+)(?![\w<*])")
_MODULE = re.compile(r"python3? -m ([\w.]+)(?: (certify|gate|summary|compare|new|statement)\b)?")
_SCRIPT = re.compile(rf"python3? ({_TOP}/[\w./]+\.py)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# Names that stand for any kind, section or module in the recipes.
_PLACEHOLDER = re.compile(r"KIND|NAME|MODULE|_N_")


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {slug(heading) for heading in headings} | set(re.findall(r'<a name="([^"]+)"', text))


def missing_links(document: str, text: str) -> Iterator[str]:
    """Yield the relative links of a document whose file or heading does not exist."""
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = ROOT / document if not path else (ROOT / document).parent / path
        if not file.exists() or (
            anchor and anchor not in anchors(file.read_text(encoding="utf-8"))
        ):
            yield target


def missing_paths(text: str) -> Iterator[str]:
    """Yield the paths from the root that are named in a text and do not exist."""
    for path in _PATH.findall(_LINK.sub("", text)):
        if not (ROOT / path).exists() and not _PLACEHOLDER.search(path):
            yield path


def missing_commands(text: str) -> Iterator[str]:
    """Yield the modules and scripts that are started by a command in a text and do not exist."""
    for module, command in _MODULE.findall(text):
        ours = module.partition(".")[0] in ("conformance", "tests", "tools")
        if ours and importlib.util.find_spec(module) is None:
            yield module
        if module == "conformance" and command not in (
            "",
            "certify",
            *conformance.__main__.COMMANDS,
        ):
            yield f"{module} {command}"
    for script in _SCRIPT.findall(text):
        if not (ROOT / script).is_file():
            yield script


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    assert list(missing_links(document, read(document))) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_paths_exist(document: str) -> None:
    assert list(missing_paths(read(document))) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_commands_exist(document: str) -> None:
    assert list(missing_commands(read(document))) == []


def test_the_options_of_the_tables_exist() -> None:
    """A table of options names options of the kit only."""
    pages = ("README.md", "docs/your-hook.md")
    rows = [line for page in pages for line in read(page).splitlines() if line.startswith("| `--")]
    named = {option for row in rows for option in _OPTION.findall(row.split("|")[1])}
    known = {flag(name) for name in Options.__dataclass_fields__} | {"--list-rules"}
    assert named
    assert named <= known


def test_the_architecture_names_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "conformance").glob("*/__init__.py")}
    page = read("docs/architecture.md")
    assert {name for name in packages if f"[conformance/{name}]" not in page} == set()


def test_packages_import_no_more_than_the_architecture_allows() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+|none) \|$", read("docs/architecture.md"), re.M
    )
    allowed = {name: {"errors", *re.findall(r"`(\w+)`", cell)} for name, cell in rows}
    modules = layers.list_modules(ROOT)
    packages = layers.list_packages(modules)
    graph = layers.make_graph(modules, layers.read_imports(modules), ("load", "call"))
    imports = layers.merge_packages(graph, packages)
    assert set(allowed) == set(packages)
    undocumented = {name: sorted(imports[name] - allowed[name]) for name in packages}
    assert {name: found for name, found in undocumented.items() if found} == {}


def test_missing_things_are_found() -> None:
    text = (
        "[a](no.md) [b](README.md#no-heading) `conformance/no.py` and `python -m tests.no`, "
        "`python tools/no.py`"
    )
    assert list(missing_links("README.md", text)) == ["no.md", "README.md#no-heading"]
    assert list(missing_paths(text)) == ["conformance/no.py", "tools/no.py"]
    assert list(missing_commands(text)) == ["tests.no", "tools/no.py"]
