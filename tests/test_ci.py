"""Tests of the files in ci/, by the schemas of their systems and by running every command in them.

Templates call tox, which would build a virtual environment with a torch of its own: minutes, and
gigabytes. tox-current-env omits only that: tox reads the command line and tox.ini, and runs the
commands in the current environment. It installs nothing, so a test of ``tox config`` covers the
installation. The commands of the templates differ only in the profile, so each is run once.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from conformance.__main__ import main
from conformance.certificates.canonical import digest
from conformance.certificates.schema import misfit
from conformance.errors import ProfileError, UsageError
from conformance.torch_versions.tested import NEWEST, OLDEST
from tests import ci_templates
from tests.ci_runs import RECORDS, ROOT, Done, shell
from tests.ci_templates import (
    ACTION,
    BUILDKITE,
    CI,
    GITLAB,
    SCHEMAS,
    TORCH_VERSIONS,
    WORKFLOW,
    Command,
    of_torch_versions,
)
from tests.cli.test_statement import lint
from tests.made_certificates import certificate, written

DEVELOPMENT_RUN = 7  # nothing failed, and not all rules were judged
RESULTS = "conformance-results"


def of(ran: dict[Command, Done], word: str, profile: str = "") -> Iterator[tuple[Command, Done]]:
    """Yield the commands with a word in them, and of a profile if one is given."""
    for command, done in ran.items():
        environment = dict(command.environment)
        if profile and environment.get("CONFORMANCE_PROFILE") != profile:
            continue
        if word in command.text:
            yield command, done


@pytest.mark.parametrize("name", SCHEMAS)
def test_templates_follow_their_schemas(name: str, tmp_path: Path) -> None:
    assert ci_templates.faults(name, CI / name, tmp_path) is None


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
    (TORCH_VERSIONS, lambda d: d["jobs"]["torch"]["strategy"].update(matrix="all")),
    (TORCH_VERSIONS, lambda d: d["jobs"]["torch"]["steps"][2].update(runs="tox")),
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
    rewritten = ci_templates.changed(name, tmp_path, lambda document: None)
    assert ci_templates.faults(name, rewritten, tmp_path) is None


def test_inputs_and_jobs_fit_together(checkout: Path) -> None:
    """Schemas do not check these: every input that is used exists, and every job certifies.

    The nightly and labelled jobs are those with GPUs.
    """
    action = ci_templates.read(ACTION)
    workflow = ci_templates.read(WORKFLOW)
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
        (command.job, dict(command.environment)["CONFORMANCE_PROFILE"])
        for command in ci_templates.commands(checkout)
        if "tox -c" in command.text
    }
    assert sorted(profile for _, profile in jobs) == ["gloo"] * 3 + ["nccl"] * 3


def test_templates_install_tox(ran: dict[Command, Done]) -> None:
    assert len({done.output for _, done in of(ran, "pip install")}) == 1
    assert all(done.code == 0 for _, done in of(ran, "pip install"))


def test_a_job_on_cpu(ran: dict[Command, Done], checkout: Path) -> None:
    jobs = [done for _, done in of(ran, "tox -c", "gloo")]
    assert len(jobs) == 3
    for done in jobs:
        assert done.code == 0, done.output
        assert "CERTIFIED  hooks_ref:allreduce_hook  as exact" in done.output
        assert "GATE HOLDS  hooks_ref:allreduce_hook as exact, profile gloo-cpu" in done.output
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


def test_the_certificate_of_a_whole_run(ran: dict[Command, Done], checkout: Path) -> None:
    path = checkout / "gloo" / RESULTS / "certificate.json"
    made = json.loads(path.read_text())
    assert made["digest"] == digest(made)
    assert made["profile"]["world_sizes"] == [1, 2, 3, 4]
    assert misfit(made) is None
    sources = made["subject"]["sha256"].keys()
    assert "hooks_ref.default_hooks" in sources
    # The state is the default process group: its class in torch is no source of the subject.
    assert {name.partition(".")[0] for name in sources} == {"hooks_ref"}
    assert main(["gate", "--sources", str(ROOT), str(path)]) == 0
    report = checkout / "gloo" / RESULTS / "hooks_ref_allreduce_hook" / "report.html"
    assert report.read_text().startswith("<!doctype html>")
    assert 'errors="0" failures="0"' in (checkout / "gloo" / RESULTS / "junit.xml").read_text()


@pytest.mark.rarely  # It judges the records of a whole run again.
def test_a_certificate_does_not_hide_failures_of_other_tests(
    ran: dict[Command, Done], checkout: Path, tmp_path: Path
) -> None:
    (tmp_path / "test_own.py").write_text("def test_own():\n    assert False\n")
    kept = checkout / "gloo" / RECORDS
    done = shell(f"python -m conformance certify --replay {kept} test_own.py", tmp_path)
    assert "CERTIFIED  hooks_ref:allreduce_hook" in done.output, done.output
    assert done.code == 1
    replayed = tmp_path / RESULTS / "hooks_ref_allreduce_hook" / "certificate.json"
    recorded = checkout / "gloo" / RESULTS / "certificate.json"
    assert (
        json.loads(replayed.read_text())["replayed_from"]
        == json.loads(recorded.read_text())["date"]
    )


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="not run: it needs a machine without a CUDA device",
)
def test_a_gpu_job_on_a_machine_without_gpu(ran: dict[Command, Done], checkout: Path) -> None:
    jobs = [done for _, done in of(ran, "tox -c", "nccl")]
    assert len(jobs) == 3
    for done in jobs:
        assert done.code == ProfileError.exit_code == 8, done.output
        assert "nothing was certified" in done.output or "not run" in done.output
        assert "GATE" not in done.output
    assert not (checkout / "nccl" / RESULTS / "certificate.json").exists()
    assert "### NOT JUDGED" in (checkout / "nccl" / RESULTS / "summary.md").read_text()


def test_templates_keep_files_that_exist(ran: dict[Command, Done], checkout: Path) -> None:
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


def test_the_commands_of_the_page_make_a_baseline(
    ran: dict[Command, Done], checkout: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The first command of ci/README.md gates on the job's certificate; the second renews."""
    monkeypatch.chdir(checkout / "gloo")
    gate, renew = (
        line.split()[3:]
        for line in (CI / "README.md").read_text().splitlines()
        if line.startswith("    python -m conformance gate --baseline")
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


@pytest.mark.ranks
def test_variables_reach_the_commands(checkout: Path) -> None:
    """``tox config`` shows quoted words kept together, the gate's options, and the dependencies."""
    options = {
        "CONFORMANCE_OPTIONS": "--hook mypkg:half --claims 'rounded(float16), world_only'",
        "CONFORMANCE_INSTALL": "/somewhere/mypkg",
    }
    output = shell(
        f"tox config -c {ROOT} -e gate-gloo -k commands deps change_dir",
        checkout,
        CONFORMANCE_GATE="--baseline 'my base.json'",
        **options,
    ).output
    assert "--hook mypkg:half --claims 'rounded(float16), world_only'\n" in output
    assert (
        "conformance gate --baseline 'my base.json' conformance-results/certificate.json\n"
        in output
    )
    assert "deps = /somewhere/mypkg\n" in output
    assert f"change_dir = {checkout}\n" in output


def test_tox_runs_nothing_but_the_environments_python(checkout: Path) -> None:
    """With system_site_packages, pip installs no script of a package that the machine has.

    tox would refuse to run the machine's script, and exit with 1.
    """
    output = shell(
        f"tox config -c {ROOT} -e ALL -k commands_pre commands commands_post", checkout
    ).output
    keys = re.findall(r"^(?:commands\w*) =(.*(?:\n  .*)*)", output, re.MULTILINE)
    found = [line.strip() for key in keys for line in key.splitlines() if line.strip()]
    environments = re.findall(r"^\[testenv:.*\]", output, re.MULTILINE)
    assert len(keys) == 3 * len(environments), output
    assert len(found) >= len(keys) / 3
    assert [line for line in found if not line.startswith("python ")] == []


def test_each_version_of_torch_has_an_environment_and_a_job(checkout: Path) -> None:
    """The jobs' environments are all those of tox.ini, and each installs the torch of its name."""
    called = {
        found[1]
        for command in of_torch_versions()
        if (found := re.fullmatch(r"tox -e (\S+) -- --small", command.text))
    }
    output = shell("tox config -e ALL -k deps install_command commands", checkout).output
    installed = dict(re.findall(r"^\[testenv:(torch\S+)\]\s+deps = (.*)$", output, re.MULTILINE))
    minors = range(OLDEST[1], NEWEST[1] + 1)
    assert installed == {
        **{f"torch2.{minor}": f"torch==2.{minor}.*" for minor in minors},
        "torch-newest": "torch",
    }
    assert called == set(installed)


def test_the_commands_of_the_job_for_a_version_of_torch(
    ran: dict[Command, Done], checkout: Path, tmp_path: Path
) -> None:
    """Each command is one that another test runs, or is run here with ``--help`` behind it."""
    tox, install = sorted({command.text.split()[0] for command in of_torch_versions()}, key=len)
    assert (tox, install) == ("tox", "python")
    texts = {command.text for command in ran}
    for command in of_torch_versions():
        assert command.text.startswith("tox ") or command.text in texts
    newest = f"tox -c {checkout} -e torch{NEWEST[0]}.{NEWEST[1]} -- --small --help"
    done = shell(newest, ROOT, TOX_WORK_DIR=str(tmp_path / "tox"))
    assert done.code == 0, done.output
    assert "A subset of the tests for one version of torch" in done.output


@pytest.mark.ranks
def test_another_project_is_certified_from_its_own_folder(checkout: Path, tmp_path: Path) -> None:
    """Its addopts may name plugins that the environment does not have."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --cov=mypkg -n 2\n")
    package = tmp_path / "mypkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "hooks.py").write_text("from hooks_ref import allreduce_hook as my_hook\n")
    rule = "--rule 1.1 --world-size 2"
    done = shell(
        f"tox -c {checkout} -e gloo -- --hook mypkg.hooks:my_hook {rule}",
        tmp_path,
        TOX_WORK_DIR=str(checkout / "tox"),
    )
    assert done.code == DEVELOPMENT_RUN, done.output
    assert (tmp_path / RESULTS / "mypkg.hooks_my_hook" / "report.json").exists()


@pytest.mark.parametrize("profile", [pytest.param("gloo", marks=pytest.mark.rarely), "nccl"])
@pytest.mark.ranks
def test_a_job_that_names_no_subject_fails(profile: str, checkout: Path, tmp_path: Path) -> None:
    """Its page shows no results of an earlier job, even if the folder was kept."""
    results = tmp_path / RESULTS
    results.mkdir()
    written(results / "certificate.json", certificate())
    (results / "statement.json").write_text("{}")
    for _ in range(2):
        done = shell(
            f"tox -c {checkout} -e gate-{profile}", tmp_path, TOX_WORK_DIR=str(checkout / "tox")
        )
        assert done.code == UsageError.exit_code == 4, done.output
        (line,) = (line for line in done.output.splitlines() if "no subject: pass --hook" in line)
        assert "set CONFORMANCE_OPTIONS" in line
        assert {path.name for path in results.iterdir()} == {"summary.md"}
        assert "### NOT JUDGED" in (results / "summary.md").read_text()


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder of stand-ins for the commands of SLURM and torchrun; each records its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    # Hosts stay until they are stopped, like real ones. The controller waits until they exist.
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
    """Check a command line by torchrun's own parser, and by the controller's endpoint."""
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
@pytest.mark.ranks
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
    assert done.code == code, done.output
    assert "scontrol show hostnames node-[a-b]\n" in (tmp_path / "calls").read_text()
    check_hosts(
        (tmp_path / "torchrun").read_text().splitlines(), "node-a:29400", once=False
    )  # the script ends them itself
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
    """Check ci/pytorchjob.yaml by the requirements of the training operator and of the kit.

    Raises:
        AssertionError, KeyError, SystemExit: the file does not meet them.
    """
    hosts, controller = documents
    assert (hosts["apiVersion"], hosts["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert (controller["apiVersion"], controller["kind"]) == ("batch/v1", "Job")
    replicas = hosts["spec"]["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 1}
    endpoint = f"{hosts['metadata']['name']}-master-0:29400"  # the pod's service
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
def test_broken_pods_are_found(old: str, new: str, capsys: Any) -> None:
    text = (CI / "pytorchjob.yaml").read_text()
    assert old in text
    with pytest.raises((AssertionError, KeyError, SystemExit)):
        check_pods(ci_templates.load(text.replace(old, new, 1)))
    capsys.readouterr()


def test_the_page_links_every_file() -> None:
    page = (CI / "README.md").read_text()
    files = {path for path in CI.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    for path in files - {CI / "README.md"}:
        assert f"({path.relative_to(CI)})" in page
