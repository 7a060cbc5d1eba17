"""Install packages into an environment that uses the torch of the caller's Python.

    python install_beside_torch.py [PIP'S OPTIONS] PACKAGES

tox calls this script as the ``install_command`` of the environments for GPUs. They have
``system_site_packages``, so that they find a torch in the machine's own Python. Some images
have torch in a virtual environment, and tox makes its environments from the Python below that one.
Pip would then install another torch, built for another driver and with another NCCL. If this
environment has no torch yet, its path gets the packages of the first of these Pythons that has one:
that of the caller's virtual environment, the ``python3`` and ``python`` of PATH, and that of tox.

If no Python here has torch, pip installs one. If only a Python of another version has it, nothing
is installed. Then, and if pip fails, the exit code is 4: nothing was judged, and 1 would mean
REFUSED.
"""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CALLERS = "CONFORMANCE_CALLERS_ENVIRONMENT"  # tox.ini sets it; tox replaces VIRTUAL_ENV
USAGE = 4
_ASK = """
import importlib.util, json, sys
print(json.dumps({
    "version": list(sys.version_info[:2]),
    "has_torch": importlib.util.find_spec("torch") is not None,
    "packages": [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))],
}))
"""


@dataclass(frozen=True)
class Python:
    """A Python of this machine.

    Attributes:
        path: its executable.
        version: major and minor.
        has_torch: whether it finds torch.
        packages: the folders of its packages, in the order of its path.
    """

    path: str
    version: tuple[int, int]
    has_torch: bool
    packages: tuple[str, ...]


def candidates() -> Iterator[Path]:
    """Yield the executables to look at, without those of this environment."""
    folders = [Path(os.environ[CALLERS]) / "bin"] if os.environ.get(CALLERS) else []
    folders += [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    paths = [folder / name for folder in folders for name in ("python3", "python")]
    try:
        tox = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        tox = ""
    if Path(tox).name.startswith("python"):
        paths.append(Path(tox))
    own = Path(sys.prefix).resolve()
    for path in dict.fromkeys(paths):
        # The link itself: a virtual environment's Python is a link to the Python below it.
        if path.exists() and own not in path.parent.resolve().parents:
            yield path


def look(path: Path) -> Python | None:
    """Return a Python with its version and packages; None if it does not run."""
    try:
        done = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError):
        return None
    major, minor = found["version"]
    return Python(str(path), (major, minor), found["has_torch"], tuple(found["packages"]))


def use(python: Python) -> None:
    """Put the packages of a Python on the path of this environment, behind its own."""
    folder = Path(sysconfig.get_path("purelib"))
    lines = [f"import site; site.addsitedir({path!r})" for path in python.packages]
    (folder / "_torch_of_the_caller.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_torch() -> int:
    """Give this environment the caller's torch, and return 0, or 4 if none fits."""
    if importlib.util.find_spec("torch") is not None:
        return 0
    others = []
    for path in candidates():
        python = look(path)
        if python is None or not python.has_torch:
            continue
        if python.version == sys.version_info[:2]:
            print(f"this environment uses the packages of {python.path}")
            use(python)
            return 0
        others.append(python)
    if not others:
        return 0
    major, minor = others[0].version
    print(
        f"{others[0].path} has torch, for Python {major}.{minor}; this environment has Python "
        f"{sys.version_info[0]}.{sys.version_info[1]}: call tox with {others[0].path} -m tox",
        file=sys.stderr,
    )
    return USAGE


def main(arguments: list[str]) -> int:
    """Find torch, install, and return the exit code."""
    code = find_torch()
    if code:
        return code
    # A new process, since the path of this one was read before.
    installed = subprocess.run([sys.executable, "-m", "pip", "install", *arguments])
    if installed.returncode:
        print("pip failed, so nothing was judged", file=sys.stderr)
        return USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
