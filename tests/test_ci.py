"""The files in ci/: held against the schemas of their systems, and every command in them run as it is written.

Templates call tox, which would build a virtual environment with a torch of its own: minutes, and gigabytes. tox-current-env leaves
that out and nothing else: tox reads the command line and tox.ini, and runs what is there, here. What that cannot show is what tox
installs; it is asked for it instead. The commands of the templates are the same but for the profile, so each is run once.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from conformance.__main__ import main
from conformance.errors import ProfileError, UsageError
from tests import ci_templates
from tests.certificates import certificate, written
from tests.ci_templates import ACTION, BUILDKITE, CI, GITLAB, SCHEMAS, WORKFLOW, Command
from tests.test_statement import lint

ROOT = CI.parent
RESULTS = "conformance-results"
OF_CI = ("GITHUB_", "CI_", "BUILDKITE_", "CONFORMANCE_", "TOX")


@dataclass
class Done:
    """What a command of the templates came to: its exit code and all that it printed."""

    code: int
    said: str


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the kit, as far as a job needs one; what it writes stays out of this one."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("tox.ini", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(CI, folder / "ci")
    return folder


def shell(text: str, folder: Path, *arguments: str, **environment: str) -> Done:
    """Run a command as CI systems do: by a shell that stops at the first error."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(OF_CI)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # tox-current-env runs this Python by a link of its own, from which Python does not find the virtual environment that it is in.
    packages = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    settings = {
        "PATH": path,
        "PYTHONPATH": packages,
        "TOX_CURRENT_ENV": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", text, "ci", *arguments],
        cwd=folder, env={**inherited, **settings, **environment}, text=True, check=False, timeout=600,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return Done(done.returncode, done.stdout)


def unlike(command: Command, checkout: Path) -> tuple[str, tuple[tuple[str, str], ...]]:
    """What makes a difference between commands: where the kit is, however it is written, makes none."""
    variables = dict(command.environment)
    kit = (
        {"CONFORMANCE_KIT": str((checkout / variables["CONFORMANCE_KIT"]).resolve())}
        if "CONFORMANCE_KIT" in variables
        else {}
    )
    uses = re.findall(r"\$\{?(\w+)", command.text) + (
        ["CONFORMANCE_OPTIONS", "CONFORMANCE_GATE"] if "tox -c" in command.text else []
    )
    return command.text, tuple(
        sorted((key, value) for key, value in (variables | kit).items() if key in uses)
    )


@pytest.fixture(scope="module")
def ran(checkout: Path) -> dict[Command, Done]:
    """Every command of every template, each run where the one before it was; those that are the same, once."""
    done: dict[Any, Done] = {}
    page = {"GITHUB_STEP_SUMMARY": str(checkout / "page.md")}
    every = ci_templates.commands(checkout)
    for command in every:
        if (what := unlike(command, checkout)) not in done:
            folder = checkout / (dict(command.environment).get("CONFORMANCE_PROFILE", "gloo"))
            folder.mkdir(exist_ok=True)
            # A kit that is said to be in "." is beside the job here, whose folder is of its profile.
            variables = {
                key: str(checkout) if value == "." else value for key, value in command.environment
            }
            done[what] = shell(
                command.text, folder, **variables, **page, TOX_WORK_DIR=str(checkout / "tox")
            )
    return {command: done[unlike(command, checkout)] for command in every}


def of(ran: dict[Command, Done], word: str, profile: str = "") -> Iterator[tuple[Command, Done]]:
    for command, done in ran.items():
        if word in command.text and profile in (
            "",
            dict(command.environment).get("CONFORMANCE_PROFILE"),
        ):
            yield command, done


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schemas_hold(name: str, tmp_path: Path) -> None:
    assert ci_templates.faults(name, CI / name, tmp_path) == ""


BROKEN: list[tuple[str, Callable[[Any], object]]] = [
    (ACTION, lambda d: d["runs"].update(using="composit")),
    (ACTION, lambda d: d["runs"]["steps"][1].pop("shell")),
    (ACTION, lambda d: d["inputs"].update(gate="--baseline x")),
    (ACTION, lambda d: d.pop("description")),
    (WORKFLOW, lambda d: d.pop("on")),
    (WORKFLOW, lambda d: d["jobs"]["gpu"].pop("runs-on")),
    (WORKFLOW, lambda d: d["jobs"]["cpu"]["permissions"].update({"id-token": "yes"})),
    (WORKFLOW, lambda d: d["on"].update(labelled=None)),
    (WORKFLOW, lambda d: d["jobs"]["cpu"]["steps"][0].pop("uses")),
    (GITLAB, lambda d: d["conformance-gpu"].update(rules="nightly")),
    (GITLAB, lambda d: d[".conformance"]["artifacts"].update(when="ever")),
    (GITLAB, lambda d: d["conformance-cpu"].update(scripts=["tox"])),
    (BUILDKITE, lambda d: d["steps"][0].update(command=3)),
    (BUILDKITE, lambda d: d["steps"][1].update(timeout_in_minutes="an hour")),
    (BUILDKITE, lambda d: d.pop("steps")),
]


@pytest.mark.parametrize(
    ("name", "change"), BROKEN, ids=[f"{name}-{number}" for number, (name, _) in enumerate(BROKEN)]
)
def test_the_schemas_refuse_what_is_broken(
    name: str, change: Callable[[Any], object], tmp_path: Path
) -> None:
    assert ci_templates.faults(name, ci_templates.changed(name, tmp_path, change), tmp_path)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_template_that_is_only_rewritten_holds(name: str, tmp_path: Path) -> None:
    assert (
        ci_templates.faults(
            name, ci_templates.changed(name, tmp_path, lambda document: None), tmp_path
        )
        == ""
    )


def test_what_the_schemas_do_not_see(checkout: Path) -> None:
    """Inputs that are given or used are there; every job certifies; the nightly and labelled jobs are those with GPUs."""
    action, workflow = ci_templates.read(ACTION), ci_templates.read(WORKFLOW)
    used = set(re.findall(r"inputs\.([\w-]+)", (CI / ACTION).read_text()))
    assert used == set(action["inputs"])
    for job in workflow["jobs"].values():
        given = job["steps"][1]["with"]
        assert set(given) <= set(action["inputs"])
        assert {name for name, one in action["inputs"].items() if one.get("required")} <= set(given)
    assert "schedule" in workflow["jobs"]["gpu"]["if"]
    assert "'gpu'" in workflow["jobs"]["gpu"]["if"]
    assert "push" in workflow["jobs"]["cpu"]["if"]
    jobs = {
        (command.where, dict(command.environment)["CONFORMANCE_PROFILE"])
        for command in ci_templates.commands(checkout)
        if "tox -c" in command.text
    }
    assert sorted(profile for _, profile in jobs) == ["gloo"] * 3 + ["nccl"] * 3


def test_tox_is_there_when_it_is_installed(ran: dict[Command, Done]) -> None:
    assert len({done.said for _, done in of(ran, "pip install")}) == 1
    assert all(done.code == 0 for _, done in of(ran, "pip install"))


def test_a_job_on_cpu(ran: dict[Command, Done], checkout: Path) -> None:
    jobs = [done for _, done in of(ran, "tox -c", "gloo")]
    assert len(jobs) == 3
    for done in jobs:
        assert done.code == 0, done.said
        assert "CERTIFIED  hooks_ref:allreduce_hook  as exact" in done.said
        assert "GATE HOLDS  hooks_ref:allreduce_hook as exact, profile gloo-cpu" in done.said
    results = checkout / "gloo" / RESULTS
    assert {path.name for path in results.iterdir()} == {
        *(
            "certificate.json",
            "junit.xml",
            "predicate.json",
            "statement.json",
            "subjects.sha256",
            "summary.md",
            "hooks_ref_allreduce_hook",
        ),
    }
    assert {path.name for path in (results / "hooks_ref_allreduce_hook").iterdir()} == {
        "report.html",
        "report.json",
    }
    statement = json.loads((results / "statement.json").read_text())
    lint(statement)
    assert statement["predicate"]["result"] in ("PASSED", "WARNED")
    page = (checkout / "page.md").read_text()
    assert "### Gate: holds" in page
    assert "### CERTIFIED `hooks_ref:allreduce_hook` as `exact`" in page


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="not run: there is a CUDA device, and this is what happens where there is none",
)
def test_a_job_on_gpu_where_there_is_none(ran: dict[Command, Done], checkout: Path) -> None:
    jobs = [done for _, done in of(ran, "tox -c", "nccl")]
    assert len(jobs) == 3
    for done in jobs:
        assert done.code == ProfileError.exit_code == 8, done.said
        assert "nothing was certified" in done.said or "not run" in done.said
        assert "GATE" not in done.said
    assert not (checkout / "nccl" / RESULTS / "certificate.json").exists()
    assert "### NOT JUDGED" in (checkout / "nccl" / RESULTS / "summary.md").read_text()


def test_what_templates_keep_is_there(ran: dict[Command, Done], checkout: Path) -> None:
    made = checkout / "gloo"
    steps = {
        step["uses"].split("@")[0]: step["with"]
        for step in ci_templates.read(ACTION)["runs"]["steps"]
        if "uses" in step
    }
    assert (made / steps["actions/upload-artifact"]["path"]).is_dir()
    assert (made / steps["actions/attest"]["subject-checksums"]).is_file()
    signed = json.loads((made / RESULTS / "statement.json").read_text())
    assert signed["predicateType"] == steps["actions/attest"]["predicate-type"]
    assert (
        json.loads((made / steps["actions/attest"]["predicate-path"]).read_text())
        == signed["predicate"]
    )
    artifacts = ci_templates.read(GITLAB)[".conformance"]["artifacts"]
    assert all((made / path).is_dir() for path in artifacts["paths"])
    assert (made / artifacts["reports"]["junit"]).is_file()
    for step in ci_templates.read(BUILDKITE)["steps"]:
        assert list(made.glob(step["artifact_paths"]))


def test_a_baseline_is_made_as_the_page_says(
    ran: dict[Command, Done], checkout: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The commands of ci/README.md, on the certificate that the job has left: the first of them gates, the second makes a baseline."""
    monkeypatch.chdir(checkout / "gloo")
    gate, renew = (
        line.split()[3:]
        for line in (CI / "README.md").read_text().splitlines()
        if line.startswith("    python -m conformance")
    )
    assert main(gate) == 4  # there is no baseline yet
    assert main(renew) == 0
    assert main(gate) == 0
    baseline = Path(gate[2])
    traffic = [
        run["traffic"]
        for rule in json.loads(baseline.read_text())["rules"]
        for run in rule["runs"].values()
        if "traffic" in run
    ]
    assert traffic == [{"largest": 1.0, "mean": 1.0}]  # an allreduce sends its gradients, once
    capsys.readouterr()


def test_variables_come_to_where_they_are_meant_for(checkout: Path) -> None:
    """As tox says itself: quotes hold words together, the gate has its options, and what the subject needs is installed."""
    options = {
        "CONFORMANCE_OPTIONS": "--hook mypkg:half --claims 'rounded(float16), world_only'",
        "CONFORMANCE_INSTALL": "/somewhere/mypkg",
    }
    said = shell(
        f"tox config -c {ROOT} -e gate-gloo -k commands deps change_dir",
        checkout,
        CONFORMANCE_GATE="--baseline 'my base.json'",
        **options,
    ).said
    assert "--hook mypkg:half --claims 'rounded(float16), world_only'\n" in said
    assert (
        "conformance gate --baseline 'my base.json' conformance-results/certificate.json\n" in said
    )
    assert "deps = /somewhere/mypkg\n" in said
    assert f"change_dir = {checkout}\n" in said


def test_tox_runs_nothing_but_the_environments_python(checkout: Path) -> None:
    """With system_site_packages pip installs no script of a package that the machine has; tox would refuse it and exit with 1."""
    said = shell(
        f"tox config -c {ROOT} -e ALL -k commands_pre commands commands_post", checkout
    ).said
    keys = re.findall(r"^(?:commands\w*) =(.*(?:\n  .*)*)", said, re.MULTILINE)
    found = [line.strip() for key in keys for line in key.splitlines() if line.strip()]
    assert len(keys) == 3 * len(
        re.findall(r"^\[testenv:", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    ), said
    assert len(found) >= len(keys) / 3
    assert [line for line in found if not line.startswith("python ")] == []


@pytest.mark.parametrize("profile", ["gloo", "nccl"])
def test_a_job_that_names_no_subject_fails(profile: str, checkout: Path, tmp_path: Path) -> None:
    """Its page does not show the results of an earlier job, in a folder that was kept."""
    results = tmp_path / RESULTS
    results.mkdir()
    written(results / "certificate.json", certificate())
    (results / "statement.json").write_text("{}")
    for _ in range(2):
        done = shell(
            f"tox -c {checkout} -e gate-{profile}", tmp_path, TOX_WORK_DIR=str(checkout / "tox")
        )
        assert done.code == UsageError.exit_code == 4, done.said
        (line,) = (line for line in done.said.splitlines() if "no subject: pass --hook" in line)
        assert "set CONFORMANCE_OPTIONS" in line
        assert {path.name for path in results.iterdir()} == {"summary.md"}
        assert "### NOT JUDGED" in (results / "summary.md").read_text()


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder of commands that SLURM and torchrun would bring; each writes down what it was called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    # Hosts stay until they are stopped, as real ones do; the controller goes on when they are there.
    hosts = [
        'printf "%s\\n" "$@" > "$LOG/torchrun"',
        'echo $$ > "$LOG/pid"',
        'echo here > "$LOG/there"',
        'read -r _ < "$LOG/never"',
    ]
    controller = [
        'printf "%s\\n" "$@" > "$LOG/pytest"',
        'read -r _ < "$LOG/there"',
        'exit "$CONTROLLER"',
    ]
    scripts = {
        "scontrol": 'printf "node-a\\nnode-b\\n"',
        "srun": 'exec "$@"',
        "torchrun": "\n".join(hosts),
        "pytest": "\n".join(controller),
    }
    for fifo in ("there", "never"):
        os.mkfifo(tmp_path / fifo)
    for name, script in scripts.items():
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "$LOG/calls"\n{script}\n')
        (folder / name).chmod(0o755)
    return folder


def check_hosts(words: list[str], endpoint: str, *, once: bool) -> None:
    """Hold a command line against torchrun's own parser, and against what the controller attaches to."""
    given = get_args_parser().parse_args(words)
    assert (given.nnodes, given.nproc_per_node, given.rdzv_backend, given.rdzv_endpoint) == (
        "2",
        "2",
        "c10d",
        endpoint,
    )
    assert (given.module, given.training_script, given.training_script_args) == (
        True,
        "conformance.host",
        ["--once"] if once else [],
    )


@pytest.mark.parametrize("code", [0, 1, 7])
def test_the_slurm_script(code: int, stand_ins: Path, tmp_path: Path) -> None:
    slurm = {
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": "2",
        "LOG": str(tmp_path),
        "CONTROLLER": str(code),
    }
    path = os.pathsep.join([str(stand_ins), os.environ["PATH"]])
    options = ["--hook", "mypkg:half", "--claims", "rounded(float16), world_only"]
    done = shell(f'bash {CI}/slurm.sbatch "$@"', tmp_path, *options, **slurm | {"PATH": path})
    assert done.code == code, done.said
    assert "scontrol show hostnames node-[a-b]\n" in (tmp_path / "calls").read_text()
    check_hosts(
        (tmp_path / "torchrun").read_text().splitlines(), "node-a:29400", once=False
    )  # the script ends them
    assert (tmp_path / "pytest").read_text().splitlines() == [
        "--pyargs",
        "conformance",
        *options,
        "--attach",
        "node-a:29400",
    ]
    assert not Path(
        f"/proc/{(tmp_path / 'pid').read_text().strip()}"
    ).exists()  # the hosts have ended with it


def check_pods(documents: list[Any]) -> None:
    """Hold ci/pytorchjob.yaml against what the training operator and the kit ask for.

    Raises:
        AssertionError, KeyError, SystemExit: it is not so.
    """
    hosts, controller = documents
    assert (hosts["apiVersion"], hosts["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert (controller["apiVersion"], controller["kind"]) == ("batch/v1", "Job")
    replicas = hosts["spec"]["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 1}
    endpoint = f"{hosts['metadata']['name']}-master-0:29400"  # the operator makes a service of this name for the pod
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the only one that the operator knows
        assert container["command"][0] == "torchrun"
        check_hosts(container["command"][1:], endpoint, once=True)
    pod = controller["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["command"] == [
        "pytest",
        "--pyargs",
        "conformance",
        "--hook",
        "hooks_ref:allreduce_hook",
        "--attach",
        endpoint,
    ]


def test_the_pods() -> None:
    check_pods(ci_templates.load((CI / "pytorchjob.yaml").read_text()))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kubeflow.org/v1", "kubeflow.org/v2"),
        ("name: pytorch\n", "name: main\n"),
        ("name: conformance-hosts", "name: hosts"),
        ("--nnodes=2", "--nnodes=3"),
        ("--rdzv-backend", "--rendezvous"),
        ("conformance.host\n", "conformance\n"),
        ("replicas: 1", "replicas: 2"),
        ("--once", "--twice"),
        ("--attach, ", "--endpoint, "),
    ],
)
def test_broken_pods_are_found_out(old: str, new: str, capsys: Any) -> None:
    text = (CI / "pytorchjob.yaml").read_text()
    assert old in text
    with pytest.raises((AssertionError, KeyError, SystemExit)):
        check_pods(ci_templates.load(text.replace(old, new, 1)))
    capsys.readouterr()


def test_the_page_names_every_file() -> None:
    page = (CI / "README.md").read_text()
    for path in (path for path in CI.rglob("*") if path.is_file() and path.name != "README.md"):
        assert f"({path.relative_to(CI)})" in page
