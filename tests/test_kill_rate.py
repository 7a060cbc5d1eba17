"""Every module of the references is broken, and kill_rate.toml lists only mutations that are still
made.
"""

import collections

from tests.kill_rate import ROOT, USERS, keys, on_file


def test_survivors_are_still_made() -> None:
    made = collections.Counter(key for module in USERS for key in keys(module))
    assert [key for key, count in made.items() if count > 1] == [], "two mutations of one name"
    assert [key for key in on_file() if key not in made] == [], (
        "in kill_rate.toml, and no longer made"
    )


def test_every_module_has_cases() -> None:
    modules = [file.stem for file in (ROOT / "hooks_ref").glob("*.py")]
    assert {module for module in modules if any(keys(module))} <= USERS.keys()
