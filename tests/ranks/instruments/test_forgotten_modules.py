"""A forgotten package leaves no class behind that ``torch.load`` takes."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.ranks

SCRIPT = """
import io, sys, torch, hooks_ref
from conformance.ranks.instruments.forgotten_modules import forget_package
others = {one for one in torch.serialization.get_safe_globals() if "hooks_ref" not in str(one)}
old = sys.modules["hooks_ref._state"].Memory
forget_package("hooks_ref")
assert "hooks_ref._state" not in sys.modules
assert set(torch.serialization.get_safe_globals()) == others
from hooks_ref._state import Memory
assert Memory is not old
file = io.BytesIO()
torch.save(Memory(), file)
file.seek(0)
assert type(torch.load(file, weights_only=True)) is Memory
"""


def test_a_package_that_is_imported_anew_loads_its_own_classes() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
