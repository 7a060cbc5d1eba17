"""The flow of ci/first_gpu_run.py, with a device that is not there."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "ci" / "first_gpu_run.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("first_gpu_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def codes(chosen: Callable[[str], int]) -> tuple[list[str], Callable[[str, Any], int]]:
    """Return a list of the commands that were run, and a function that pretends to run them."""
    commands: list[str] = []

    def run(command: str, log: Any) -> int:
        commands.append(command)
        log.write("the output\n")
        return chosen(command)

    return commands, run


def statuses(folder: Path) -> dict[str, str]:
    return {
        path.stem: json.loads(path.read_text())["status"] for path in sorted(folder.glob("*.json"))
    }


def test_without_a_device_no_stage_is_run(script: Any, tmp_path: Path) -> None:
    commands, run = codes(lambda _: 0)
    assert script.main(["--folder", str(tmp_path)], lambda: 0, run) == 8
    assert commands == []
    assert set(statuses(tmp_path).values()) == {"not run"}
    assert len(statuses(tmp_path)) == len(script.STAGES)


def test_a_stage_that_passed_is_not_run_again(script: Any, tmp_path: Path) -> None:
    failing = "gloo-cuda"
    commands, run = codes(lambda command: 3 if failing in command else 7)
    options = ["--folder", str(tmp_path)]
    assert script.main(options, lambda: 1, run) == 1
    found = statuses(tmp_path)
    assert found["07-tox-gloo-cuda"] == "failed"
    assert found["06-tox-nccl"] == "passed"
    assert (tmp_path / "06-tox-nccl.txt").read_text() == "the output\n"
    before = len(commands)
    again, run = codes(lambda _: 0)
    script.main(options, lambda: 1, run)
    assert 0 < len(again) < before
    assert not any("tox -e nccl" in command for command in again)


def test_a_profile_that_this_machine_lacks_is_no_failure(script: Any, tmp_path: Path) -> None:
    _, run = codes(lambda _: 8)
    assert script.main(["--folder", str(tmp_path), "--stages", "6"], lambda: 1, run) == 8
    assert statuses(tmp_path) == {"06-tox-nccl": "not run"}


def test_chosen_stages_are_run_again(script: Any, tmp_path: Path) -> None:
    for _ in range(2):
        commands, run = codes(lambda _: 0)
        assert script.main(["--folder", str(tmp_path), "--stages", "6"], lambda: 4, run) == 0
        [command] = commands
        hook = "--hook hooks_ref:allreduce_hook"  # options after -- replace the default one
        assert command.endswith(f"-m tox -e nccl -- {hook} --world-size 1,2,3,4")
    with pytest.raises(SystemExit):
        script.main(["--folder", str(tmp_path), "--stages", "99"], lambda: 1, run)


def test_benchmarks_take_one_rank_for_each_gpu(script: Any, tmp_path: Path) -> None:
    commands, run = codes(lambda _: 0)
    script.main(["--folder", str(tmp_path)], lambda: 2, run)
    timed = [command for command in commands if "on_cuda.py" in command]
    assert [command.split()[-3:] for command in timed] == [
        ["hooks", "--ranks", "2"],
        ["watch", "--ranks", "2"],
    ]


def test_right_subjects_alone_share_gpus_by_the_service(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "MPS", str(tmp_path / "mps"))
    commands, run = codes(lambda command: 7 if "--rule" in command else 0)
    options = ["--folder", str(tmp_path / "results"), "--mps"]
    with pytest.raises(SystemExit):
        script.main(options, lambda: 1, run)
    assert script.main(options, lambda: 0, run) == 8, "without a device nothing is started"
    (tmp_path / "mps").write_text(f"#!/bin/sh\ncat >> {tmp_path}/said; echo $1 >> {tmp_path}/said")
    (tmp_path / "mps").chmod(0o755)
    monkeypatch.setattr(script.subprocess, "run", without_input(script.subprocess.run))
    assert script.main(options, lambda: 1, run) == 0
    assert (tmp_path / "said").read_text().split() == ["quit", "-d", "quit"], (
        "a service left behind by a run that was stopped does not keep this one from its own"
    )
    shared = [command for command in commands if "CUDA_MPS_PIPE_DIRECTORY" in command]
    assert any("powerSGD_hook" in command for command in shared)
    assert not any("is_refused" in command for command in shared)


def without_input(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``subprocess.run`` with an empty input, unless there is one."""
    return lambda *words, **options: run(*words, **{"input": "", "text": True, **options})


def test_ranks_share_one_gpu(script: Any) -> None:
    assert script.world_sizes(1, shares=False) == "1,2"
    assert script.world_sizes(1, shares=True) == "1,2,3,4"
    assert script.world_sizes(3, shares=False) == "1,2,3"


def test_the_commands_name_files_that_exist(script: Any) -> None:
    root = SCRIPT.parent.parent
    words = {
        word for stage in script.STAGES for command in stage.commands for word in command.split()
    }
    files = {word for word in words if word.startswith(("tests/", "benchmarks/"))}
    assert files
    assert all((root / file).exists() for file in files)
