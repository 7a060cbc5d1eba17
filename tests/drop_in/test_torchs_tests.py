"""torch's own tests pass with the references in the place of torch's hooks, averagers and join.

They are apart from the test run, because each starts two or four processes:

    pytest tests/drop_in -m drop_in

``TORCHS_OWN=1`` runs the same tests with torch's own modules, which shows whether the shim for CPUs
or a reference is to blame.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A test whose source contains one of these uses a module that references replace.
USES = re.compile(
    r"default\.\w+_hook|powerSGD|post_localSGD|averagers\.|hierarchicalSGD\.|model_averaging_utils\."
    r"|_apply_optimizer_in_backward|(?:net|model)\w*\.join\("
)
CANNOT_RUN = {
    "test_3_level_hierarchical_model_averager": (
        "counts process groups after the constructor: ours makes them in the first call that "
        "needs them"
    ),
    "test_ddp_apply_optim_in_backward": (
        "DDP registers a private hook of its own, which waits for a stream of an accelerator; ours "
        "takes an optimizer state"
    ),
    "test_ddp_uneven_inputs": (
        "its convolutions take longer on a CPU than torch's limit of 400 seconds, with torch's own "
        "modules too"
    ),
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": "SyncBatchNorm runs on GPUs alone",
    "test_ddp_hook_pickling_powerSGD": (
        "torch itself skips it; it asserts two lines in torch's log about process groups"
    ),
}
CANNOT_RUN["test_ddp_apply_optim_in_backward_ignored_params"] = CANNOT_RUN[
    "test_ddp_apply_optim_in_backward"
]
CANNOT_RUN["test_ddp_apply_optim_in_backward_grad_as_bucket_view_false"] = CANNOT_RUN[
    "test_ddp_apply_optim_in_backward"
]


def torchs_tests() -> list[str]:
    """Return the names of torch's distributed tests that use a replaced module, from its source."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    suite = Path(found.origin).parent / "testing/_internal/distributed/distributed_test.py"
    tree = ast.parse(suite.read_text())
    helpers: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase":
            helpers = {
                part.name: ast.unparse(part)
                for part in node.body
                if isinstance(part, ast.FunctionDef)
            }
    using = {name for name, text in helpers.items() if USES.search(text)}
    while True:
        calling = {
            name
            for name, text in helpers.items()
            if any(f"self.{other}(" in text for other in using if not other.startswith("test_"))
        }
        if calling <= using:
            return sorted(name for name in using if name.startswith("test_"))
        using |= calling


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # torch's suite takes a second or two to read, which other runs need not wait for.
    if "name" in metafunc.fixturenames:
        is_asked_for = "drop_in" in metafunc.config.getoption("markexpr")
        metafunc.parametrize("name", torchs_tests() if is_asked_for else [])


@pytest.mark.drop_in
def test_passes_with_references(name: str, tmp_path: Path) -> None:
    if name in CANNOT_RUN:
        pytest.skip(CANNOT_RUN[name])
    run = subprocess.run(
        [sys.executable, "-m", "tests.drop_in.run_one", name],
        cwd=ROOT,
        env={
            **os.environ,
            "TMPDIR": str(tmp_path),
            "WORLD_SIZE": "4" if "hierarchical" in name else "2",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-4000:]
