"""The subject's own files among all modules that ranks have imported, and the registered hooks.

A module belongs to the subject if it is in the same distribution as one of the subject's objects:
the target, the registered hook, the state and its factory. If such an object is in no distribution,
the modules of its top-level package belong to the subject, and those in the same folder as that
package.
"""

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.records.run import Run
from conformance.subjects.spec import CONTEXT_NAMES, SubjectSpec
from conformance.subjects.target import parse_target

# Folders of installed packages: modules beside a package there are no part of it.
_INSTALLED = ("site-packages", "dist-packages")
_OF_THEIR_OWN = ("conformance", "torch")


@dataclass
class SubjectFiles:
    """The subject's code.

    Attributes:
        digests: the sha256 of each file, by the name of its module.
        hooks: the qualified names of the registered hooks.
        changed: modules whose file had several digests during the session.
    """

    digests: dict[str, str] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


def subject_files(
    spec: SubjectSpec, description: Mapping[str, Any], runs: Iterable[Run]
) -> SubjectFiles:
    """Return the files of the subject's code, as all ranks of these runs have imported it.

    Args:
        spec: names the target and the state.
        description: has the module of the target, and the digests of the files that are known.
        runs: the subject's runs.
    """
    known: dict[str, str] = dict(description.get("sha256") or {})
    found = SubjectFiles(digests=dict(known))
    origins = {*known, *_modules_of(spec)}
    files: dict[str, str] = {}
    digests: dict[str, set[str]] = {name: {digest} for name, digest in known.items()}
    for run in runs:
        for rank in run.ranks:
            for event in rank.all("registered"):
                found.hooks += [name for name in event.get("hooks", ()) if name not in found.hooks]
                origins.update(event.get("modules", ()))
            for event in rank.all("sources"):
                for name, entry in event["files"].items():
                    files[name] = entry["file"]
                    digests.setdefault(name, set()).add(entry["sha256"])
    is_own = _Membership(origins, files)
    for name, file in sorted(files.items()):
        if is_own.holds(name, file):
            found.digests.setdefault(name, min(digests[name]))
    found.changed = [name for name in sorted(found.digests) if len(digests[name]) > 1]
    return found


def _modules_of(spec: SubjectSpec) -> set[str]:
    """Return the modules that the command line names."""
    targets = [spec.target or spec.hook or spec.setup, spec.state]
    return {parse_target(text, "").module for text in targets if text and text not in CONTEXT_NAMES}


class _Membership:
    """Decides whether a module belongs to the subject.

    Args:
        origins: the modules of the subject's objects.
        files: the files of all imported modules.
    """

    def __init__(self, origins: set[str], files: Mapping[str, str]) -> None:
        self._origins = origins
        self._tops = {name.partition(".")[0] for name in origins} - {*_OF_THEIR_OWN}
        distributions = importlib.metadata.packages_distributions()
        own = {name for top in self._tops for name in distributions.get(top, ())}
        siblings = {top for top, names in distributions.items() if own.intersection(names)}
        self._roots = [
            root
            for name in sorted(origins)
            if name.partition(".")[0] in self._tops
            and not distributions.get(name.partition(".")[0])
            and (root := _root(name, files.get(name))) is not None
        ]
        self._tops |= siblings.difference(_OF_THEIR_OWN)

    def holds(self, name: str, file: str) -> bool:
        """Return whether a module with this name and file belongs to the subject."""
        if name in self._origins or name.partition(".")[0] in self._tops:
            return True
        path = Path(file)
        return any(_is_beside(path, root) for root in self._roots)


def _root(name: str, file: str | None) -> Path | None:
    """Return the folder that holds a module's top-level package, if it is a project's."""
    if not file:
        return None
    depth = name.count(".") + (1 if Path(file).stem == "__init__" else 0)
    root = Path(file).parents[depth]
    return None if root.name in _INSTALLED else root


def _is_beside(path: Path, root: Path) -> bool:
    if not path.is_relative_to(root):
        return False
    return not set(path.relative_to(root).parts).intersection(_INSTALLED)
