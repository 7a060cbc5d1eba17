"""The packages of tox's environments for GPUs are installed beside the caller's torch.

The Pythons are real virtual environments. Their torch is an empty package, and their pip is a
stand-in that prints whose torch it would find.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "ci" / "install_beside_torch.py"
PIP = """
import importlib.util, sys
spec = importlib.util.find_spec("torch")
print("pip", *sys.argv[1:], "beside", spec.origin if spec else "nothing")
sys.exit("fail" in sys.argv)
"""


def packages(environment: Path) -> Path:
    """Return the folder of an environment's packages."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return environment / "lib" / version / "site-packages"


def make(environment: Path, *names: str) -> Path:
    """Create an environment that holds empty packages of these names."""
    venv.create(environment, with_pip=False, symlinks=True)
    for name in names:
        (packages(environment) / name).mkdir()
        (packages(environment) / name / "__init__.py").touch()
    return environment


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """tox's environment, with the stand-in for pip."""
    environment = make(tmp_path / "own", "pip")
    (packages(environment) / "pip" / "__main__.py").write_text(PIP)
    return environment


def install(
    own: Path, *arguments: str, callers: Path | None = None, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the script as tox does, with the environment's Python; its parent is a shell."""
    words = [str(own / "bin" / "python"), str(SCRIPT), *arguments]
    environment = {
        "CONFORMANCE_CALLERS_ENVIRONMENT": str(callers or ""),
        "PATH": os.pathsep.join([str(own / "bin"), str(path or "")]),
    }
    return subprocess.run(
        ["/bin/sh", "-c", '"$@"; exit $?', "sh", *words],
        env=environment,
        capture_output=True,
        text=True,
    )


def test_the_torch_of_the_callers_environment_is_found(own: Path, tmp_path: Path) -> None:
    """tox replaces VIRTUAL_ENV, so that tox.ini keeps it under another name."""
    callers = make(tmp_path / "callers", "torch")
    elsewhere = make(tmp_path / "elsewhere", "torch")
    done = install(own, "six", callers=callers, path=elsewhere / "bin")
    assert done.returncode == 0, done.stderr
    assert f"pip install six beside {packages(callers)}/torch/__init__.py" in done.stdout


def test_the_torch_of_a_python_in_path_is_found(own: Path, tmp_path: Path) -> None:
    """The caller's environment need not be activated."""
    without = make(tmp_path / "without")
    found = make(tmp_path / "found", "torch")
    done = install(own, "six", callers=without, path=found / "bin")
    assert done.returncode == 0, done.stderr
    assert f"beside {packages(found)}/torch/__init__.py" in done.stdout


def test_an_environment_that_has_torch_is_left_alone(own: Path, tmp_path: Path) -> None:
    """As on a machine where the Python below the environment has it."""
    (packages(own) / "torch").mkdir()
    (packages(own) / "torch" / "__init__.py").touch()
    done = install(own, "six", callers=make(tmp_path / "callers", "torch"))
    assert done.returncode == 0, done.stderr
    assert f"beside {packages(own)}/torch/__init__.py" in done.stdout
    assert not list(packages(own).glob("*.pth"))


def test_pip_installs_torch_if_no_python_has_it(own: Path) -> None:
    """As in a bare image."""
    done = install(own, "torch")
    assert (done.returncode, done.stdout) == (0, "pip install torch beside nothing\n"), done.stderr


def test_torch_of_another_python_is_named(own: Path, tmp_path: Path) -> None:
    """Another version's packages cannot be used; nothing is installed, and the exit code is 4."""
    other = tmp_path / "bin" / "python3"
    other.parent.mkdir()
    other.write_text(
        '#!/bin/sh\necho \'{"version": [3, 99], "has_torch": true, "packages": []}\'\n'
    )
    other.chmod(0o755)
    done = install(own, "six", path=other.parent)
    assert done.returncode == 4
    assert f"{other} has torch, for Python 3.99" in done.stderr
    assert f"call tox with {other} -m tox" in done.stderr
    assert "pip install" not in done.stdout


def test_a_failure_of_pip_is_no_refusal(own: Path) -> None:
    """Exit code 1 means that a subject was refused."""
    done = install(own, "fail")
    assert done.returncode == 4
    assert "nothing was judged" in done.stderr
