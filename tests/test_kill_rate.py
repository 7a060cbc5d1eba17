"""kill_rate.toml lists only mutations that are still made."""

import collections

from tests.kill_rate import USERS, explained, keys


def test_survivors_are_still_made() -> None:
    made = collections.Counter(key for module in USERS for key in keys(module))
    assert [key for key, count in made.items() if count > 1] == [], "two mutations of one name"
    assert [key for key in explained() if key not in made] == [], (
        "in kill_rate.toml, and no longer made"
    )
