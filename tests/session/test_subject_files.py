"""Tests of the files that belong to a subject, on records written by hand."""

from pathlib import Path
from typing import Any

from conformance.session.subject_files import subject_files
from conformance.subjects.spec import parse_subject
from tests.made_runs import event, made_run


def files_of(*paths: str, root: Path, digest: str = "d") -> dict[str, dict[str, str]]:
    """Return the entry of a ``sources`` event for modules in a folder."""
    found = {}
    for path in paths:
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found[name] = {"file": str(root / path), "sha256": f"{digest} of {name}"}
    return found


def run_with(files: dict[str, dict[str, str]], **registered: Any) -> Any:
    run = made_run()
    for rank in run.ranks:
        rank.events.append(event("registered", -1, count=1, logged="hook", **registered))
        rank.events.append(event("sources", -1, files=files))
    return run


SETUP = parse_subject(None, None, "train:setup")
DESCRIBED = {"module": "train", "sha256": {"train": "d of train"}}


def test_modules_in_the_folder_of_a_set_up_belong_to_it() -> None:
    root = Path("/project")
    files = files_of("train.py", "helper.py", "mypkg/__init__.py", "mypkg/hooks.py", root=root)
    files |= files_of("venv/lib/site-packages/numpyro/__init__.py", root=root)
    found = subject_files(SETUP, DESCRIBED, [run_with(files, hooks=["mypkg.hooks.average"])])
    assert sorted(found.digests) == ["helper", "mypkg", "mypkg.hooks", "train"]
    assert found.hooks == ["mypkg.hooks.average"]
    assert found.changed == []


def test_the_package_of_the_registered_hook_belongs_to_it() -> None:
    files = files_of("train.py", root=Path("/project"))
    files |= files_of("far/hooks.py", "far/codec.py", "other/x.py", root=Path("/site-packages"))
    run = run_with(files, hooks=["far.hooks.average"], modules=["far.hooks"])
    found = subject_files(SETUP, DESCRIBED, [run])
    # The folder of installed packages holds other packages, too.
    assert sorted(found.digests) == ["far.codec", "far.hooks", "train"]


def test_a_distribution_is_told_apart_from_its_neighbours() -> None:
    """pytest is a distribution of the packages ``pytest`` and ``_pytest``."""
    spec = parse_subject("pytest:hook", None, None)
    files = files_of("pytest/__init__.py", "_pytest/main.py", "numpy/x.py", root=Path("/s"))
    found = subject_files(spec, {"sha256": {}}, [run_with(files)])
    assert sorted(found.digests) == ["_pytest.main", "pytest"]


def test_an_edited_file_is_named() -> None:
    root = Path("/project")
    before = run_with(files_of("train.py", "helper.py", root=root))
    after = run_with(files_of("train.py", "helper.py", root=root, digest="e"))
    found = subject_files(SETUP, DESCRIBED, [before, after])
    assert found.changed == ["helper", "train"]


def test_old_records_have_the_described_files_alone() -> None:
    assert subject_files(SETUP, DESCRIBED, [made_run()]).digests == DESCRIBED["sha256"]
