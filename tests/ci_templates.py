"""The commands of the CI templates, as each system passes them to a shell; and their lint.

This module imitates only the documented behaviour of a system: inputs and their defaults, variables
and ``extends``, ``$$`` for ``$``. A template that uses another feature fails here, instead of being
run by a guess.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner
from ruamel.yaml import YAML

CI = Path(__file__).resolve().parent.parent / "ci"
ACTION = "github/action.yml"
WORKFLOW = "github/conformance.yml"
TORCH_VERSIONS = "github/torch-versions.yml"
GITLAB = "gitlab-ci.yml"
BUILDKITE = "buildkite.yml"
SCHEMAS = {
    ACTION: ("vendor.github-actions",),
    WORKFLOW: ("vendor.github-workflows",),
    TORCH_VERSIONS: ("vendor.github-workflows",),
    GITLAB: ("vendor.gitlab-ci", "--data-transform", "gitlab-ci"),
    BUILDKITE: ("vendor.buildkite",),
}
_EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


@dataclass(frozen=True)
class Command:
    """A command as a shell receives it.

    Attributes:
        job: the template and the job.
        text: the command line; each line of a script is a command of its own.
        environment: the variables that the template sets, besides those of the system.
    """

    job: str
    text: str
    environment: tuple[tuple[str, str], ...]


def load(text: str) -> list[Any]:
    """Return the documents of a YAML text."""
    return list(YAML(typ="safe", pure=True).load_all(text))


def read(name: str) -> Any:
    """Return a template as data."""
    (document,) = load((CI / name).read_text())
    return document


def faults(name: str, path: Path, folder: Path) -> str | None:
    """Return the errors of a template by the schema of its system, or None.

    Merged documents are written to ``folder``.
    """
    schema, *options = SCHEMAS[name]
    checked = [path]
    if name == GITLAB:
        # The schema ignores jobs whose names begin with a dot, so the jobs that extend them are
        # checked after merging.
        (document,) = load(path.read_text())
        checked.append(write(folder / "merged.yml", _merged(document)))
    result = CliRunner().invoke(
        check_jsonschema, ["--builtin-schema", schema, *options, *map(str, checked)]
    )
    return None if result.exit_code == 0 else result.output


def commands(checkout: Path) -> list[Command]:
    """Return the commands of all templates in order, as run in a checkout of the kit."""
    return [*_github(checkout), *_gitlab(), *_buildkite()]


def _github(checkout: Path) -> Iterator[Command]:
    action = read(ACTION)
    for job, definition in read(WORKFLOW)["jobs"].items():
        for step in definition["steps"]:
            if "run" in step:
                yield Command(f"{WORKFLOW} {job}", step["run"], _filled(step.get("env", {}), {}))
            elif step["uses"] == "./ci/github":
                given = {
                    key: one.get("default", "") for key, one in action["inputs"].items()
                } | step.get("with", {})
                values = {f"inputs.{key}": str(value) for key, value in given.items()}
                yield from _composite(
                    f"{WORKFLOW} {job}",
                    action,
                    values | {"github.action_path": f"{checkout}/ci/github"},
                )
            else:
                assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), step


def of_torch_versions() -> Iterator[Command]:
    """Yield the commands of the kit's own workflow, those of each entry of its matrix."""
    job = read(TORCH_VERSIONS)["jobs"]["torch"]
    matrix = job["strategy"]["matrix"]
    entries = [
        {"torch": torch, "python": python}
        for torch in matrix["torch"]
        for python in matrix["python"]
    ]
    for entry in [*entries, *matrix["include"]]:
        values = {f"matrix.{key}": value for key, value in entry.items()}
        for step in job["steps"]:
            if "run" in step:
                yield Command(
                    f"{TORCH_VERSIONS} torch {entry['torch']} on Python {entry['python']}",
                    _EXPRESSION.sub(lambda found, values=values: values[found[1]], step["run"]),
                    tuple(job["env"].items()),
                )
            else:
                assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), step


def _composite(job: str, action: Mapping[str, Any], values: Mapping[str, str]) -> Iterator[Command]:
    for step in action["runs"]["steps"]:
        if "run" in step:
            assert not _EXPRESSION.search(step["run"]), (
                f"{step['run']!r}: the content of an input would be run"
            )
            yield Command(job, step["run"], _filled(step.get("env", {}), values))
        else:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), step


def _filled(
    environment: Mapping[str, str], values: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    return tuple(
        (key, _EXPRESSION.sub(lambda found: values[found[1]], value))
        for key, value in environment.items()
    )


def _gitlab() -> Iterator[Command]:
    document = read(GITLAB)
    for name, job in _merged(document).items():
        if name == "variables" or name.startswith("."):
            continue
        environment = tuple((document["variables"] | job.get("variables", {})).items())
        for text in (
            line
            for part in ("before_script", "script", "after_script")
            for line in job.get(part, ())
        ):
            yield Command(f"{GITLAB} {name}", text, environment)


def _merged(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the jobs of a GitLab template, merged with the jobs that they extend."""
    base = {name: document[job["extends"]] for name, job in document.items() if "extends" in job}
    return {
        name: {**base.get(name, {}), **{key: one for key, one in job.items() if key != "extends"}}
        for name, job in document.items()
    }


def _buildkite() -> Iterator[Command]:
    document = read(BUILDKITE)
    for step in document["steps"]:
        environment = tuple((document["env"] | step.get("env", {})).items())
        for text in step["command"]:
            assert not re.search(r"(?<!\$)\$(?!\$)", text), (
                f"{text!r}: Buildkite would fill in a single $ when it reads the steps"
            )
            yield Command(f"{BUILDKITE} {step['key']}", text.replace("$$", "$"), environment)


def changed(name: str, folder: Path, change: Callable[[Any], object]) -> Path:
    """Write a template with a change, and return the path."""
    document = read(name)
    change(document)
    return write(folder / Path(name).name, document)


def write(path: Path, document: Any) -> Path:
    """Write a document as YAML, and return the path."""
    with open(path, "w") as file:
        YAML(typ="safe", pure=True).dump(document, file)
    return path
