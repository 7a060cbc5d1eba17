"""The commands of the CI templates, as the systems would hand them to a shell; and the lint of the templates.

A system's own part is played as far as its documentation says what it does: inputs and their defaults, variables and ``extends``,
``$$`` for ``$``. Anything else that a template may come to use is an error here, not something to be guessed.
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
ACTION, WORKFLOW, GITLAB, BUILDKITE = (
    "github/action.yml",
    "github/conformance.yml",
    "gitlab-ci.yml",
    "buildkite.yml",
)
SCHEMAS = {
    ACTION: ("vendor.github-actions",),
    WORKFLOW: ("vendor.github-workflows",),
    GITLAB: ("vendor.gitlab-ci", "--data-transform", "gitlab-ci"),
    BUILDKITE: ("vendor.buildkite",),
}
_EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


@dataclass(frozen=True)
class Command:
    """A command as a shell gets it.

    Attributes:
        where: the template and the job.
        text: what is run; lines of one script are commands of their own.
        environment: what the template sets, beside what the system does.
    """

    where: str
    text: str
    environment: tuple[tuple[str, str], ...]


def load(text: str) -> list[Any]:
    """Return the documents of a YAML text."""
    return list(YAML(typ="safe", pure=True).load_all(text))


def read(name: str) -> Any:
    """Return a template as data."""
    (document,) = load((CI / name).read_text())
    return document


def faults(name: str, path: Path, folder: Path) -> str:
    """Return what is wrong with a template by the schema of its system; '' where nothing is. Writes to ``folder``."""
    schema, *options = SCHEMAS[name]
    checked = [path]
    if (
        name == GITLAB
    ):  # whose schema looks at no job whose name begins with a dot, but at what is made of it
        (document,) = load(path.read_text())
        checked.append(write(folder / "merged.yml", _merged(document)))
    result = CliRunner().invoke(
        check_jsonschema, ["--builtin-schema", schema, *options, *map(str, checked)]
    )
    return "" if result.exit_code == 0 else result.output


def commands(checkout: Path) -> list[Command]:
    """Return all commands of all templates, in order, as run in a checkout of the kit."""
    return [*_github(checkout), *_gitlab(), *_buildkite()]


def _github(checkout: Path) -> Iterator[Command]:
    action = read(ACTION)
    for job, said in read(WORKFLOW)["jobs"].items():
        for step in said["steps"]:
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


def _composite(
    where: str, action: Mapping[str, Any], values: Mapping[str, str]
) -> Iterator[Command]:
    for step in action["runs"]["steps"]:
        if "run" in step:
            assert not _EXPRESSION.search(step["run"]), (
                f"{step['run']!r}: an input would be run, whatever is in it"
            )
            yield Command(where, step["run"], _filled(step.get("env", {}), values))
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
    """Return a GitLab template with what its jobs extend in them."""
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
    """Write a template with a change; return where."""
    document = read(name)
    change(document)
    return write(folder / Path(name).name, document)


def write(path: Path, document: Any) -> Path:
    """Write a document as YAML; return where."""
    with open(path, "w") as file:
        YAML(typ="safe", pure=True).dump(document, file)
    return path
