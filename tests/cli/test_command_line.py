"""The command line in every form: its output, its exit code, and the things that it never does."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tomllib

from conformance.__main__ import COMMANDS, main
from conformance.errors import ConformanceError, UsageError
from conformance.hosts.pool import Pool
from conformance.judging.verdict import Verdict
from conformance.session.options import Options, flag
from conformance.session.request import read_request
from conformance.session.session import Session
from tests import ROOT
from tests.cases import PATIENT, in_turns
from tests.made_certificates import certificate, written

pytestmark = pytest.mark.ranks


FORMS = {
    "clone": ([sys.executable, "-m", "pytest", "conformance/"], ROOT),
    "clone, script": (["pytest", "conformance/"], ROOT),
    "installed": (["pytest", "--pyargs", "conformance"], None),
    "module": ([sys.executable, "-m", "conformance", "certify"], None),
}
HOOKS = """
import os, torch, torch.distributed as dist
from conformance import Subject

def mean(state, bucket):
    buffer = bucket.buffer().div_(dist.get_world_size(state))
    future = dist.all_reduce(buffer, group=state, async_op=True).get_future()
    return future.then(lambda fut: fut.value()[0])

def total(state, bucket):
    future = dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()
    return future.then(lambda fut: fut.value()[0])

def half(state, bucket):
    buffer = bucket.buffer()
    sent = buffer.to(torch.float16).div_(dist.get_world_size(state))
    future = dist.all_reduce(sent, group=state, async_op=True).get_future()
    return future.then(lambda fut: buffer.copy_(fut.value()[0]))

__conformance__ = {"half": "rounded(float16)"}
described = Subject(hook=total, claims="sum")
number = 3

def waits(state, bucket):
    open(os.path.join(os.environ["MARKER_FOLDER"], "waiting"), "w").close()
    return torch.futures.Future()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a hook of its own, outside the kit."""
    (tmp_path / "mypkg.py").write_text(HOOKS)
    return tmp_path


STARTED: list[int] = []  # process ids of the controllers that tests have started


def run(arguments: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    How long it takes depends on the machine: pytest's own timeout is the limit.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with subprocess.Popen(
        arguments,
        cwd=cwd,
        env={**os.environ, "PATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        STARTED.append(child.pid)
        stdout, stderr = child.communicate()
    return subprocess.CompletedProcess(arguments, child.returncode, stdout, stderr)


def certify(project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "conformance", "certify", *arguments], project, **environment)


@pytest.mark.rarely
def test_a_project_that_makes_warnings_errors(project: Path) -> None:
    (project / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    done = certify(project, "--hook", "mypkg:mean", "--rule", "2.1", "--world-size", "2")
    assert done.returncode == 7, done.stdout + done.stderr


@pytest.mark.parametrize(
    "form",
    [
        # Most other tests have the form "module".
        pytest.param(form, marks=[pytest.mark.rarely] * (form in ("clone, script", "module")))
        for form in FORMS
    ],
)
def test_every_form(project: Path, form: str) -> None:
    command, cwd = FORMS[form]
    options = {
        "--hook": "mypkg:mean",
        "--rule": "2.1",
        "--world-size": "2",
        "--certificate": str(project / "c.json"),
    }
    words = [word for pair in options.items() for word in pair]
    done = run([*command, *words], cwd or project, PYTHONPATH=str(project))
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "nothing failed, and there is no certificate:\n  " in done.stdout
    assert done.returncode == 7
    assert not (project / "c.json").exists()


def test_options_with_an_equals_sign(project: Path) -> None:
    """What is read of the options is said before anything runs."""
    options = ["--collect-only", "--hook=mypkg:mean", "--rule=2.1", "--world-size=2"]
    done = certify(project, *options)
    assert "conformance: --hook mypkg:mean, kit in" in done.stdout, done.stdout + done.stderr
    assert "1 test collected" in done.stdout


def test_a_refusal_says_why_and_what_would_hold(project: Path) -> None:
    folder = project / "conformance-results" / "mypkg_total"
    folder.mkdir(parents=True)
    earlier = written(folder / "certificate.json", certificate()).read_bytes()
    done = certify(project, "--hook=mypkg:total", "--rule", "2")
    assert done.returncode == 1
    assert not (folder / "certificate.json").exists()
    assert (folder / "certificate.previous.json").read_bytes() == earlier
    for said in (
        "the certificate of an earlier run is now "
        "conformance-results/mypkg_total/certificate.previous.json",
        "2.1 Gives the exact mean of crafted gradients  [values@2]",
        "Requirement:  On crafted inputs the result is the mean over the group",
        "Expected:     mean ",
        "on rank 0, step 0, bucket 0, parameter p0 (float32), index (0, 0)",
        "Likely cause: every element is world_size times the mean: the sum was not divided",
        "Rerun:        pytest --pyargs conformance --hook mypkg:total --seed ",
        "Reproduce:    torchrun --nproc-per-node=2 conformance-results/mypkg_total/repro_2_1.py",
        'the hook would pass 2.1, 2.2, 2.3, 2.6, 2.7, 2.10 with --claims "sum"',
        "if it promises no more than that, run again with that claim",
        "REFUSED  mypkg:total  as exact",
    ):
        assert said in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("arguments", "claims", "said_by"),
    [
        (["--hook", "mypkg:half"], "rounded(float16)", "the subject"),
        (["--hook", "mypkg:described"], "sum", "the subject"),
        (["--hook", "mypkg:total", "--claims", "sum"], "sum", "--claims"),
        (["--hook", "mypkg:total"], "sum", "pyproject.toml"),
        (["--hook", "mypkg:mean"], "exact", "nobody: exact is the default"),
    ],
)
def test_claims_are_read_where_they_are_made(
    pool: Pool,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    claims: str,
    said_by: str,
) -> None:
    (project / "pyproject.toml").write_text('[tool.conformance.claims]\n"mypkg:total" = "sum"\n')
    monkeypatch.chdir(project)
    given = {
        word.removeprefix("--"): value
        for word, value in zip(arguments[::2], arguments[1::2], strict=True)
    }
    # it is not closed: the pool is everybody's
    session = Session.of(Options(**given, world_size="2", rule=("2.1,2.2",)), pool)
    session.begin()
    assert session.header["claims"] == {"text": claims, "declared_by": said_by}
    assert {session.judge(number).verdict for number in ("2.1", "2.2")} == {Verdict.PASS}


def test_claims_are_proposed(project: Path) -> None:
    done = certify(project, "--hook", "mypkg:half", "--claims", "auto", "--world-size", "2")
    assert done.returncode == 7, done.stdout + done.stderr
    assert "tried     exact: 2.2: values@2: " in done.stdout
    assert 'proposed  --claims "rounded(float16)"' in done.stdout
    assert "nothing was certified" in done.stdout
    assert not list(project.glob("conformance-results/*/certificate.json"))


BAD: list[tuple[list[str], int, str]] = [
    (["--hook", "mypkg"], 4, "--hook: 'mypkg' is not module:attribute"),
    (["--hook", "mypkg:mean", "--claims", "exakt"], 4, "--claims: 'exakt' is not a claim"),
    (["--hook", "mypkg:mean", "--world-size", "two"], 4, "--world-size two: not a list of numbers"),
    (["--hook", "mypkg:mean", "--setup", "mypkg:mean"], 4, "name one subject"),
    (
        ["--hook", "mypkg:mean", "--averager", "mypkg:mean"],
        4,
        ("--hook, --averager do not go together"),
    ),
    (
        ["--hook", "mypkg:mean", "--certificate", "/proc/c.json"],
        4,
        ("--certificate /proc/c.json: cannot be written (in /proc: "),
    ),
    (
        ["--hook", "mypkg:mean", "--certificate", "/proc/x/c.json"],
        4,
        (
            "--certificate /proc/x/c.json: the folder /proc/x cannot be made (No such file or "
            "directory); choose another path with --certificate"
        ),
    ),
    (
        ["--hook", "mypkg:mean", "--certificate", "/dev/full"],
        4,
        ("--certificate /dev/full: cannot be written (it is no regular file)"),
    ),
    (["--replay", "nowhere"], 4, "--replay nowhere: no readable session.json"),
    (["--hook", "nopkg:mean"], 9, "there is no module 'nopkg' on the path"),
    (["--hook", "mypkg:number"], 9, "an int is no hook"),
    (["--hook", "mypkg:mean,rank=2"], 9, "unexpected keyword argument 'rank'"),
    (["--hook", "mypkg:mean", "--state", "mypkg:stat"], 9, "no attribute 'stat'"),
    (["--hook", "mypkg:mean", "--claims", "poststep"], 9, "name the call"),
    (
        ["--hook", "mypkg:mean", "--claims", "poststep(call=flush)"],
        9,
        "nor its module has a function flush",
    ),
    (["--averager", "mypkg:mean,period=4"], 9, "unexpected keyword argument 'period'"),
    (
        ["--hook", "mypkg:mean", "--claims", "backends(nccl)"],
        8,
        ("not run: the subject claims exact, backends(nccl)"),
    ),
    (
        ["--hook", "mypkg:mean", "--claims", "min_world_size(3)", "--world-size", "2"],
        4,
        ("add a world size of at least 3"),
    ),
]


@pytest.mark.parametrize(("arguments", "code", "said"), BAD)
def test_bad_input_is_an_error_of_one_line(
    pool: Pool,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(project)
    given = {
        word.removeprefix("--").replace("-", "_"): value
        for word, value in zip(arguments[::2], arguments[1::2], strict=True)
    }

    def judge() -> None:
        rule = "14.1" if "--averager" in arguments else "2.1"
        # it is not closed: the pool is everybody's
        session = Session.of(Options(**given, rule=(rule,)), pool)
        session.begin()
        session.judge(rule)

    with pytest.raises(ConformanceError) as caught:
        judge()
    assert caught.value.exit_code == code
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    in_turns(
        [
            ([], 4, "no subject: pass --hook module:attribute"),
            (["--hook", "mypkg:mean", "--rule", "99"], 4, "--rule 99: there is no such rule"),
            (
                ["--hook", "mypkg:maen"],
                9,
                "subject: --hook mypkg:maen: no attribute 'maen'; did you mean mean",
            ),
            (
                ["--hook", "mypkg:mean", "--hook", "mypkg:half"],
                4,
                "a run judges one; type one of them",
            ),
            (["--hook", "mypkg:mean", "--backend", "foo"], 4, "did you mean gloo?"),
            (
                ["--hook", "mypkg:mean", "--backend", "nccl", "--device", "cpu"],
                8,
                "profile nccl-cpu: not run",
            ),
        ],
        2,
    ),
)
def test_bad_input_is_one_clear_line(
    project: Path, arguments: list[str], code: int, said: str
) -> None:
    done = certify(project, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if said in line]
    assert len(lines) == 1, done.stdout + done.stderr
    assert not list(project.glob("conformance-results/*/certificate.json"))
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture
def earlier(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the results of an earlier run, which certified mypkg:mean."""
    monkeypatch.chdir(project)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    folder = project / "conformance-results" / "mypkg_mean"
    folder.mkdir(parents=True)
    body = certificate("mypkg:mean", "exact")
    written(folder / "certificate.json", body)
    written(
        folder / "report.json",
        {
            **{key: body[key] for key in body if key != "schema"},
            "verdict": "certified",
            "reasons": [],
        },
    )
    (folder / "report.html").write_text("<!doctype html>")
    assert main(["gate", str(folder / "certificate.json")]) == 0
    return folder


def is_set_aside(folder: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether the earlier results were renamed, so that neither gate nor summary takes them for
    new.
    """
    names = {path.name for path in folder.iterdir()}
    if names == {"certificate.json", "report.json", "report.html"}:
        return False
    assert names == {"certificate.previous.json", "report.previous.json", "report.previous.html"}
    capsys.readouterr()
    assert main(["gate", str(folder / "certificate.json")]) == 4
    assert main(["summary", "conformance-results"]) == 0
    assert capsys.readouterr().out.startswith("### NOT JUDGED")
    return True


@pytest.mark.parametrize(
    ("arguments", "code"),
    in_turns(
        [
            (["--world-size", "two"], 4),  # refused before torch is imported
            (["--rule", "99"], 4),
            (["--backend", "nccl", "--device", "cpu"], 8),
        ],
        2,
    ),
)
def test_a_run_that_fails_early_leaves_no_earlier_results(
    earlier: Path,
    project: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
) -> None:
    assert certify(project, "--hook", "mypkg:mean", *arguments).returncode == code
    assert is_set_aside(earlier, capsys)


def test_nor_does_a_subject_that_cannot_be_loaded(
    earlier: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "mypkg.py").write_text(HOOKS + "def broken(:\n")
    done = certify(project, "--hook", "mypkg:mean")
    assert done.returncode == 9
    assert "the certificate of an earlier run is now" in done.stdout
    assert is_set_aside(earlier, capsys)


def test_a_certificate_of_a_subject_that_is_misnamed_is_set_aside(earlier: Path) -> None:
    with pytest.raises(UsageError):
        Session.of(Options(hook="mypkg", certificate=str(earlier / "certificate.json")))
    assert not (earlier / "certificate.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    in_turns(
        [
            (["--hook", "mypkg:mean", "--collect-only"], 0),
            (["--hook", "mypkg:mean", "--collect-only", "--world-size", "two"], 4),
            (["--hook", "mypkg:mean", "--list-rules"], 0),
            (["--hook", "mypkg:mean", "--no-such-option"], 4),
            # Other settings, and so another folder.
            (["--hook", "mypkg:mean", "--claims", "exakt"], 4),
        ],
        2,
    ),
)
def test_earlier_results_stay_when_no_run_begins(
    earlier: Path,
    project: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
) -> None:
    assert certify(project, *arguments).returncode == code
    assert not is_set_aside(earlier, capsys)


@pytest.mark.parametrize(
    "narrowed",
    [
        ["-k", "1.9"],
        pytest.param(["-m", "should"], marks=pytest.mark.rarely),
        pytest.param(
            ["--deselect", "rules/section_9_non_interference.py"], marks=pytest.mark.rarely
        ),
    ],
)
def test_a_narrowed_run_is_a_development_run(project: Path, narrowed: list[str]) -> None:
    done = certify(
        project, "--hook", "mypkg:mean", "--world-size", "1", *narrowed, "--certificate", "c.json"
    )
    assert done.returncode == 7, done.stdout + done.stderr
    assert "nothing failed, and there is no certificate:\n  " in done.stdout
    assert "left out" in done.stdout
    assert not (project / "c.json").exists()


def test_xdist_is_refused(project: Path) -> None:
    """It would split the session with the items: one line refuses it."""
    done = certify(project, "-n", "2", "--hook", "mypkg:mean")
    assert done.returncode == 4
    assert "leave out -n" in done.stdout + done.stderr


def test_the_tests_of_a_project_are_no_rules(project: Path) -> None:
    """A command line that does not name the kit would only run the project's own tests."""
    (project / "test_own.py").write_text("def test_own():\n    assert False\n")
    done = run([sys.executable, "-m", "pytest", "--hook", "mypkg:mean"], project)
    assert done.returncode == 4, done.stdout + done.stderr
    assert (
        "usage error: no rule was collected: add --pyargs conformance, as in "
        "pytest --pyargs conformance --hook mypkg:mean\n" in done.stdout
    )
    assert "1 failed" not in done.stdout


@pytest.mark.parametrize("option", ["--averager", "--wrapper"])
def test_an_option_of_the_kit_without_its_name(project: Path, option: str) -> None:
    """Other suites may have an option of this name: only one that nothing declares is refused."""
    (project / "test_own.py").write_text("def test_own():\n    assert False\n")
    done = run([sys.executable, "-m", "pytest", option, "mypkg:mean,period=[1, 2]"], project)
    assert done.returncode == 4, done.stdout + done.stderr
    assert done.stderr == (
        f"ERROR: {option} is an option of the conformance kit: add --pyargs conformance, as in "
        f"pytest --pyargs conformance {option} 'mypkg:mean,period=[1, 2]'\n\n"
    )
    (project / "conftest.py").write_text(
        f"def pytest_addoption(parser):\n    parser.addoption({option!r})\n"
    )
    (project / "test_own.py").write_text("def test_own():\n    pass\n")
    done = run([sys.executable, "-m", "pytest", option, "mypkg:mean"], project)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hok", "mypkg:mean"], "--hok is no option; did you mean --hook?"),
        (["--hook=mypkg:mean", "--worldsize=2"], "--worldsize is no option; did you mean --world-"),
        (["--hook", "mypkg:mean", "--xyz"], "--xyz is no option. See python -m conformance"),
    ],
)
def test_a_misspelt_option(project: Path, arguments: list[str], said: str) -> None:
    done = certify(project, *arguments)
    assert done.returncode == 4, done.stdout + done.stderr
    assert done.stderr.startswith(f"ERROR: {said}")
    assert done.stderr.endswith("See python -m conformance certify --help\n\n")


def test_outside_a_clone_the_package_is_named(earlier: Path, project: Path) -> None:
    done = run([sys.executable, "-m", "pytest", "conformance/", "--hook", "mypkg:mean"], project)
    assert done.returncode == 4, done.stdout + done.stderr
    assert (
        "file or directory not found: conformance/; outside a clone of the kit: "
        "pytest --pyargs conformance --hook mypkg:mean\n" in done.stderr
    )
    assert (earlier / "certificate.json").exists(), "no run has begun"


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("mypkg.py:mean", "mypkg:mean"),
        ("./mypkg.py:mean", "mypkg:mean"),
        ("src/mypkg.py:mean,rank=2", "mypkg:mean,rank=2"),
        ("/src/mypkg.py", "mypkg:attribute"),
    ],
)
@pytest.mark.parametrize("option", ["hook", "setup", "averager"])
def test_a_target_names_a_module_and_no_file(
    project: Path, monkeypatch: pytest.MonkeyPatch, option: str, target: str, module: str
) -> None:
    monkeypatch.chdir(project)
    given: dict[str, Any] = {option: target}
    with pytest.raises(UsageError) as caught:
        read_request(Options(**given))
    assert str(caught.value) == (
        f"--{option} {target}: name the module, not the file: --{option} {module}, from the folder "
        "of the file"
    )


def test_a_module_may_be_called_py(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    assert read_request(Options(hook="another.py:mean")).subject.hook == "another.py:mean"


def test_the_current_directory_has_been_deleted(tmp_path: Path) -> None:
    script = f"rmdir {tmp_path} && {sys.executable} -m conformance certify --hook mypkg:mean"
    done = run(["sh", "-c", script], tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 4, done.stdout + done.stderr
    assert done.stderr == "certify: the current directory: No such file or directory\n"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{project['version']}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gait", "c.json"], "there is no command 'gait'; did you mean gate? See "),
        (["certfy", "--hook", "a:b"], "there is no command 'certfy'; did you mean certify? See "),
        (["xyz"], "there is no command 'xyz'. See "),
        (["--hook", "a:b"], "--hook is no command; did you mean certify --hook? See "),
    ],
)
def test_a_misspelt_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == 4
    assert capsys.readouterr() == ("", f"{said}python -m conformance --help.\n")


def test_the_help_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: python -m conformance COMMAND"
    assert lines[2] == (
        "  certify --hook module:attribute [options]  judge a subject, and write a certificate"
    )
    for name, command in COMMANDS.items():
        (line,) = [line for line in lines if line.startswith(f"  {name} ") or line.strip() == name]
        assert line.endswith(f"  {command.summary}")
        assert len(line) <= 100
    assert lines[-1] == "COMMAND --help has the options of a command."


def test_the_help_of_certify_has_the_kits_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(flag(option.name) in text for option in fields(Options))
    assert "--list-rules" in text
    assert "default: 1,2,3,4" in text
    assert len(text.splitlines()) < 120


@pytest.fixture
def leaves_nothing_in_memory() -> Iterator[None]:
    """Require that the controllers of the test leave no folder in memory."""
    STARTED.clear()
    yield
    # A pool's folder is named after its controller. Folders of other controllers do not count:
    # on this machine other tests may run, and be killed, at the same time.
    assert [path for pid in STARTED for path in Path("/dev/shm").glob(f"conformance-{pid}-*")] == []


@pytest.mark.usefixtures("leaves_nothing_in_memory")
def test_interrupting_leaves_nothing_behind(project: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "conformance",
        "certify",
        "--hook",
        "mypkg:waits",
        "--deadline",
        "200",
    ]
    environment = {**os.environ, "MARKER_FOLDER": str(project)}

    # a shell that runs the tests in the background makes its children ignore them
    def takes_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    child = subprocess.Popen(
        command,
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=takes_interrupts,
    )
    STARTED.append(child.pid)
    waited = threading.Event()
    while not (project / "waiting").exists() and child.poll() is None:
        waited.wait(0.05)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate()
    assert child.returncode == 2, output
    assert not list(project.glob("conformance-results/*/certificate.json"))


def test_a_full_disk_is_the_kits_error() -> None:
    """A rank that cannot write its record reports it; the subject gets no verdict."""
    from conformance.judging.run_failures import failed_run
    from conformance.scenarios.hook import VALUES
    from conformance.session.run_sources import LocalSource
    from conformance.subjects.spec import REFERENCE

    with Pool(PATIENT) as pool:
        LocalSource(pool).run(VALUES, 1, REFERENCE, "fits")
        assert pool._host is not None
        for lane in (
            Path(f"/proc/{pool._host.pid}/task/{pool._host.pid}/children").read_text().split()
        ):
            resource.prlimit(int(lane), resource.RLIMIT_FSIZE, (3000, 3000))
        broken = failed_run(LocalSource(pool).run(VALUES, 2, REFERENCE, "full"))
    assert broken is not None
    assert broken.kind == "kit"
    assert "File too large" in broken.line


def test_other_suites_are_left_alone(project: Path) -> None:
    """In an environment that has the kit, a suite with a --device and a --rule of its own runs as
    before.
    """
    (project / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--device')\n    "
        "parser.addoption('--rule')\n    parser.addoption('--state')\n"
    )
    (project / "test_own.py").write_text(
        "import sys\n\ndef test_own(pytestconfig):\n    assert 'torch' not in sys.modules\n"
    )
    done = run([sys.executable, "-m", "pytest", "-q", "--device", "x", "test_own.py"], project)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lists_its_rules(project: Path) -> None:
    done = certify(project, "--list-rules")
    assert done.returncode == 0
    assert "2.1   MUST    Gives the exact mean of crafted gradients" in done.stdout


def test_records_can_be_judged_again(project: Path) -> None:
    done = certify(
        project,
        "--hook",
        "mypkg:total",
        "--claims",
        "sum",
        "--records",
        "kept",
        "--rule",
        "2.1,2.2",
        "--world-size",
        "1,2",
    )
    assert done.returncode == 7, done.stdout + done.stderr
    (project / "mypkg.py").unlink()  # nothing is imported or run any more
    again = certify(project, "--replay", "kept", "--rule", "2.1,2.2")
    assert again.returncode == 7, again.stdout + again.stderr
    assert "2 passed" in again.stdout
    # Claims of the command line belong to the records: results go into the folder of these
    # settings.
    assert {path.name for path in (project / "conformance-results").iterdir()} == {
        "mypkg_total-sum"
    }
    refused = certify(project, "--replay", "kept", "--rule", "2.1", "--claims", "exact")
    assert refused.returncode == 1
    assert "the sum was not divided" in refused.stdout


@pytest.mark.rarely
def test_certify_in_a_suite_of_ones_own(project: Path) -> None:
    (project / "test_mine.py").write_text(
        "import mypkg, pytest\nfrom conformance import certify\n\n"
        "def test_mean():\n    assert certify(mypkg.mean)['certified']\n\n"
        "def test_total():\n    with pytest.raises(AssertionError, match='the sum was not "
        "divided'):\n"
        "        certify(mypkg.total, world_size='2', rule=('2.1',))\n"
    )
    done = run(
        [sys.executable, "-m", "pytest", "-q", "test_mine.py"], project, PYTHONPATH=str(project)
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("leaves_nothing_in_memory")
@pytest.mark.parametrize(
    ("hook", "rule", "deadline"),
    [
        pytest.param("process:kills_parent", "1.5", PATIENT, marks=pytest.mark.rarely),
        pytest.param("process:prints_a_gigabyte", "9.7", PATIENT, marks=pytest.mark.rarely),
        pytest.param("process:exits_0", "1.5", PATIENT, marks=pytest.mark.rarely),
        # A short deadline only for the hook that hangs. It applies to the reference too, which has
        # to come to its end on a busy machine.
        pytest.param("process:never_completes", "1.5", 8.0, marks=pytest.mark.rarely),
        ("interference:patches_equal", "9.8", PATIENT),
    ],
)
def test_a_hostile_hook_costs_nothing_but_its_certificate(
    project: Path, hook: str, rule: str, deadline: float
) -> None:
    options = ["--rule", f"2.1,{rule}", "--world-size", "2", "--deadline", str(deadline)]
    done = certify(project, "--hook", f"tests.mutants.{hook}", *options, PYTHONPATH=str(ROOT))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"\n{rule} " in done.stdout
    assert not list(project.glob("conformance-results/*/certificate.json"))
