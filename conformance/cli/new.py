"""``python -m conformance new NAME``: a package with a hook, its claim, a test and a CI file."""

import keyword
from importlib.resources import files
from pathlib import Path

from conformance.cli._arguments import Arguments, write
from conformance.errors import UsageError

# The files of the package, each with its template in ``templates``.
_FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "readme.md.txt",
    ".gitignore": "gitignore.txt",
    "src/{name}/__init__.py": "hook.py.txt",
    "tests/test_conformance.py": "test.py.txt",
    ".github/workflows/conformance.yml": "workflow.yml.txt",
}


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UsageError: the name is no name of a package, or the folder exists.
    """
    parser = Arguments(
        "python -m conformance new",
        description="Write a package with a hook, its claim, a test and a CI file.",
    )
    parser.add_argument("name", help="the package's name, such as myhook")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="the new folder; default: the package's name"
    )
    options = parser.parse_args(arguments)
    folder = options.folder or Path(options.name)
    texts = package(options.name)
    if folder.exists():
        raise UsageError(f"{folder}: there is something already; name another folder by --folder")
    for path, text in texts.items():
        write(folder / path, text)
    print(
        f"{folder}: a package with a hook. Certify it:\n"
        f"  cd {folder}\n"
        "  python -m pip install -e .\n"
        f"  python -m conformance certify --hook {options.name}:mean_hook"
    )
    return 0


def package(name: str) -> dict[str, str]:
    """Return the files of a package, by their path in it.

    Raises:
        UsageError: the name is no name of a package.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name == "conformance":
        raise UsageError(f"{name}: no name of a package; use letters, digits and _, such as myhook")
    folder = files("conformance.cli").joinpath("templates")
    texts = {
        path: folder.joinpath(template).read_text(encoding="utf-8")
        for path, template in _FILES.items()
    }
    return {
        path.replace("{name}", name): text.replace("@NAME@", name) for path, text in texts.items()
    }
