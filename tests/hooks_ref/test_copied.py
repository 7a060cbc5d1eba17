"""A module of hooks_ref works in another project, with the helpers that the README lists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import hooks_ref

FOLDER = Path(hooks_ref.__file__).parent
README = (FOLDER / "README.md").read_text()


def listed() -> dict[str, list[str]]:
    """Return the helpers of each module, from the README's table."""
    section = README.partition("## Copy a file")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M)
    return {module: re.findall(r"`(\w+)`", helpers) for module, helpers in rows}


def needed(module: str) -> set[str]:
    """Return the modules that ``module`` imports, directly and through others."""
    found = set[str]()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hooks_ref."):
            helper = str(node.module).removeprefix("hooks_ref.")
            found |= {helper} | needed(helper)
    return found


def test_every_module_has_a_line() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    assert listed().keys() == modules


@pytest.mark.parametrize("module", listed())
def test_exactly_the_needed_helpers_are_listed(module: str) -> None:
    assert listed()[module] == sorted(needed(module))


@pytest.mark.parametrize("module", listed())
def test_a_copy_can_be_imported(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"copy_of_{module}"
    (tmp_path / package).mkdir()
    for name in (module, *listed()[module]):
        text = (FOLDER / f"{name}.py").read_text().replace("hooks_ref", package)
        (tmp_path / package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module(f"{package}.{module}")
