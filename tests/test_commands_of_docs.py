"""Every command in the pages for users is run by a test, or has a reason why none runs it.

A command is a line of a code block, or a piece of code in a sentence, that begins with a program.
``HERE`` has those that this module runs, as they are written; ``ELSEWHERE`` names the test that
runs each of the others; ``NOT_RUN`` has the reasons. A command that is in none of them, or that no
page has any more, fails the test.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from conformance.errors import ProfileError, UsageError
from tests.made_certificates import certificate, written

ROOT = Path(__file__).resolve().parent.parent
# Tables that are made of the rule book, of mutants and of results have no commands of their own.
GENERATED = {"bug_classes.md", "matrix.md", "mutants.md"}
PAGES = (
    *("README.md", "hooks_ref/README.md", "ci/README.md"),
    *sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "docs").rglob("*.md")
        if path.name not in GENERATED
    ),
)
NO_DEVICE = ProfileError.exit_code
DEVELOPMENT_RUN = 7  # nothing failed, and not all rules were judged
_PROGRAM = re.compile(r"(?:\$ )?((?:pytest|python|tox|torchrun|pip|gpg) \S.*)")

GATE = "python -m conformance gate"
# The exit code of each command.
HERE = {
    "pytest conformance/ --hook mypkg:my_hook --backend nccl": NO_DEVICE,
    "python -m conformance": UsageError.exit_code,  # it prints the commands
    "python -m conformance schema": 0,
    "python -m conformance compare conformance-results/*/certificate.json": 0,
    f"{GATE} --baseline conformance-baseline.json conformance-results/certificate.json": 0,
    f"{GATE} --baseline conformance-baseline.json --renew conformance-results/certificate.json": 0,
    f"{GATE} --baseline conformance-baseline.json --renew certificate.json": 0,
    f"{GATE} --baseline conformance-baseline.json certificate.json": 0,
    f"{GATE} --baseline conformance-baseline.json "
    "conformance-results/mypkg_compressed/certificate.json": 0,
    "python -m conformance summary conformance-results/mypkg_compressed/report.json": 0,
    "python -m conformance statement conformance-results/mypkg_compressed/certificate.json": 0,
    "python -m conformance statement --subject-file dist/my.whl "
    "conformance-results/certificate.json": 0,
    "python tools/layers.py": 0,
    "python tools/layers.py --check": 0,
    "python -m tests.versions --page": 0,
}

_LINE = "tests/cli/test_command_line.py"
_CI = "tests/test_ci.py"
_GPG = "tests/certificates/test_signatures.py::test_a_signature_by_a_trusted_key_is_accepted"
_FORM = f"{_LINE}::test_every_form"
_TUTORIAL = "tests/test_tutorial.py::test_the_other_hooks_of_the_tutorial_get_its_verdicts"
_STORY = "tests/test_stories.py::test_a_story_is_refused_as_it_says"
_HOSTS = "tests/hosts/remote/test_two_machines.py"
_OTHER_PROJECT = f"{_CI}::test_another_project_is_certified_from_its_own_folder"
_POWER_SGD = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
_POWER_SGD_STATE = (
    f'--state "{_POWER_SGD}:PowerSGDState,process_group=None,matrix_approximation_rank=1,'
    'start_powerSGD_iter=2"'
)
# The test of each command; a form of a command is tested with the test's own hook.
ELSEWHERE = {
    "pytest --pyargs conformance --hook mypkg:compressed": f"{_LINE}::test_a_refusal_says_"
    "why_and_what_would_hold",
    "pytest conformance/ --averager torch.distributed.algorithms.model_averaging.averagers:"
    "PeriodicModelAverager,period=4,warmup_steps=10": "tests/subjects/kinds/test_averager.py::"
    "test_torchs_own_are_refused_by_these_rules_alone",
    "pytest conformance/": _FORM,
    "pytest conformance/ --hook mypkg:my_hook": _FORM,
    "pytest conformance/ --hook mypkg.hooks:my_hook": _FORM,
    "pytest --pyargs conformance --hook mypkg.hooks:my_hook": _FORM,
    "pytest --pyargs conformance --hook mypkg.hooks:my_hook --certificate certificate.json": _FORM,
    "python -m conformance certify": _FORM,
    "python -m conformance certify --hook mypkg.hooks:my_hook": _FORM,
    "pytest --pyargs conformance --setup mypkg.conformance_setup:setup --claims compressed": (
        "tests/test_commands_of_docs.py::test_the_set_up_of_the_page"
    ),
    "pytest --pyargs conformance --hook first:mean": _TUTORIAL,
    "pytest --pyargs conformance --hook first:mean --claims world_only": _TUTORIAL,
    'pytest --pyargs conformance --hook first:halved --claims "rounded(float16)"': _TUTORIAL,
    "pytest conformance/ --hook examples.stories:half_with_feedback --state "
    'examples.stories:Residuals --claims "compressed(delta=0.25)" --rule 8.4 --world-size 2': (
        _STORY
    ),
    f"pytest conformance/ --hook examples.stories:power_sgd_one_at_a_time {_POWER_SGD_STATE} "
    '--claims "compressed, warmup(2), checkpointable" --rule 11.3 --world-size 2': _STORY,
    "pytest conformance/ --hook mypkg:my_hook --attach node0:29400": f"{_HOSTS}::test_certified_"
    "across_two_machines_until_one_of_them_is_killed",
    "torchrun --nnodes=2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d "
    "--rdzv-endpoint=node0:29400 -m conformance.host": f"{_HOSTS}::test_certified_across_two_"
    "machines_until_one_of_them_is_killed",
    "python -m conformance new myhook": "tests/cli/test_new.py::test_a_package_is_written_once",
    "python ci/first_gpu_run.py": "tests/test_first_gpu_run.py::test_without_a_device_no_stage_is_"
    "run",
    "tox -e gate-gloo": f"{_CI}::test_a_job_on_cpu",
    "tox -e gate-nccl": f"{_CI}::test_a_gpu_job_on_a_machine_without_gpu",
    "tox -c KIT -e gate-gloo": _OTHER_PROJECT,
    "tox -e gloo -- --hook mypkg:my_hook": _OTHER_PROJECT,
    "tox -c KIT -e gloo -- --hook mypkg.hooks:my_hook": _OTHER_PROJECT,
    "tox -e nccl": f"{_CI}::test_a_gpu_job_on_a_machine_without_gpu",
    "tox -e nccl -- --hook mypkg:my_hook": f"{_CI}::test_a_gpu_job_on_a_machine_without_gpu",
    "gpg --armor --detach-sign certificate.json": _GPG,
    f"{GATE} --signature certificate.json.asc --key ci.asc certificate.json": _GPG,
    f"{GATE} --signature bundle.sigstore.json --identity NAME --issuer URL certificate.json": (
        "tests/certificates/test_signatures.py::test_a_bundle_of_the_certificate_is_accepted"
    ),
    "pytest tests/test_cuda.py": "tests/test_cuda.py::",
}

_INSTALLS = "installs packages: .ci/run does it in an environment of its own"
NOT_RUN = {
    "python -m pip install -e . -c constraints.txt": _INSTALLS,
    "python -m pip install -e . -c constraints.txt && pytest conformance/ --hook "
    "hooks_ref:allreduce_hook": _INSTALLS,
    "python -m pip install -e '.[test]' -c constraints.txt && pytest -n 3 --dist loadfile": (
        _INSTALLS
    ),
    "python -m pip install /path/to/the/clone": _INSTALLS,
    "python -m pip install tox": _INSTALLS,
    "python -m pip install '/path/to/the/clone[sign]'": _INSTALLS,
    "python -m pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu": (
        "needs the network"
    ),
    f"pytest conformance/ --hook {_POWER_SGD}:powerSGD_hook {_POWER_SGD_STATE} --claims "
    '"compressed, warmup(2)" --rule 1.8 --world-size 2': (
        "chance decides in which step ranks part; tests/hooks_ref/test_low_rank.py runs the hook"
    ),
    "tox -e gloo-cuda": "needs a GPU",
    "tox -e nccl -- --hook hooks_ref:allreduce_hook --world-size 1,2,3,4": "needs a GPU",
    "pytest --every": "takes half an hour",
    "pytest --thorough": "takes hours",
    "python -m tests.thresholds": "takes hours",
    "python -m tests.soak --runs 20 --judges 6": "takes hours",
    "python -m tests.kill_rate": "takes hours",
    "python -m tests.versions": "takes half an hour; tox -e torch2.13 runs it",
    "tox -e torch2.6 -- --small": "installs another torch",
    "python benchmarks/hooks_beside_torch.py": "a benchmark, which takes minutes",
    "python benchmarks/others_beside_torch.py": "a benchmark, which takes minutes",
}


def commands(page: str) -> Iterator[str]:
    """Yield the commands of a page, without comments."""
    for token in MarkdownIt().enable("table").parse((ROOT / page).read_text(encoding="utf-8")):
        pieces = [child.content for child in token.children or () if child.type == "code_inline"]
        if token.type in ("fence", "code_block"):
            pieces += token.content.splitlines()
        for piece in pieces:
            if match := _PROGRAM.fullmatch(piece):
                yield re.sub(r"\s+# .*", "", match[1]).strip()


def test_every_command_is_accounted_for() -> None:
    on_pages = {command for page in PAGES for command in commands(page)}
    known = [*HERE, *ELSEWHERE, *NOT_RUN]
    assert len(set(known)) == len(known)
    assert on_pages - set(known) == set(), "on a page, and not in this module"
    assert set(known) - on_pages == set(), "in this module, and on no page"


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_the_named_tests_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a clone, with a package and the results of certifications."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("ci", "conformance", "constraints.txt", "hooks_ref", "pyproject.toml", "tools"):
        (folder / name).symlink_to(ROOT / name)
    # It writes a page.
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "mypkg.py").write_text("from hooks_ref import allreduce_hook as my_hook\n")
    body = certificate()
    (folder / "dist").mkdir()
    (folder / "dist" / "my.whl").write_bytes(b"wheel")
    for results in ("conformance-results", "conformance-results/mypkg_compressed"):
        (folder / results).mkdir()
        written(folder / results / "certificate.json", body)
        written(folder / results / "report.json", body)
    written(folder / "conformance-baseline.json", body)
    written(folder / "certificate.json", body)
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.ranks  # it starts other processes
@pytest.mark.parametrize("command", HERE)
def test_a_command_runs(command: str, clone: Path) -> None:
    done = run(command, clone)
    assert done.returncode == HERE[command], done.stdout + done.stderr


TRAINER = """
import hooks_ref

class Trainer:
    def __init__(self, model, process_group):
        self.model = model
        self.state = hooks_ref.PowerSGDState(process_group, start_powerSGD_iter=2)

    def install_hook(self):
        self.model.register_comm_hook(self.state, hooks_ref.powerSGD_hook)

    def begin_step(self, step):
        pass
"""


@pytest.mark.ranks
def test_the_set_up_of_the_page(tmp_path: Path) -> None:
    """The module on the page, with a trainer, is certified by the command on the page."""
    page = MarkdownIt().parse((ROOT / "docs" / "your-hook.md").read_text(encoding="utf-8"))
    module, command = next(
        re.fullmatch(r"# mypkg/conformance_setup.py\n(.*)\n\n(pytest .*)\n", token.content, re.S)
        for token in page
        if token.content.startswith("# mypkg/conformance_setup.py")
    ).groups()
    package = tmp_path / "mypkg"
    package.mkdir()
    for name, text in (("__init__", ""), ("conformance_setup", module), ("trainer", TRAINER)):
        (package / f"{name}.py").write_text(text)
    done = run(f"{command} --rule 2.10 --world-size 2", tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == DEVELOPMENT_RUN
