"""Settings are compared by name and by part, from the right moment on."""

from typing import Any

from conformance.judging.side_effects import changed_settings
from conformance.records.rank_record import RankRecord
from tests.made_runs import event


def changes(**states: dict[str, Any]) -> list[str]:
    """Return the changes of a rank with these settings at ``start``, ``registered``, ``end``."""
    rank = RankRecord(0)
    rank.events = [event("state", -1, at=at, process=process) for at, process in states.items()]
    return [str(change) for change in changed_settings(rank)[1]]


def test_a_changed_setting_is_named_with_its_values() -> None:
    found = changes(start={"umask": "0022"}, end={"umask": "0077"})
    assert found == ["umask: 0022 before, 0077 now"]


def test_only_parts_that_both_readings_have_are_compared() -> None:
    start = {"loggers": {"torch": "level=30", "gone": "level=0"}}
    end = {"loggers": {"torch": "level=50", "new": "level=10"}}
    assert changes(start=start, end=end) == ["loggers: torch: level=30 before, level=50 now"]


def test_imports_may_add_filters_and_paths_and_nothing_else() -> None:
    start = {"sys.path": "a", "umask": "0022"}
    imported = {"sys.path": "a b", "umask": "0077"}
    assert changes(start=start, imported=imported, end=imported) == ["umask: 0022 before, 0077 now"]
    later = {"sys.path": "a b c", "umask": "0022"}
    assert changes(start=start, registered=imported, end=later) == [
        "sys.path: a b before, a b c now"
    ]


def test_without_an_end_nothing_is_compared() -> None:
    rank = RankRecord(0)
    rank.events = [event("state", -1, at="start", process={"umask": "0022"})]
    assert changed_settings(rank) == (0, [])
