"""Tests of requests: the command line, parsed once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.errors import UsageError
from conformance.scenarios.draws import LARGEST_SEED
from conformance.session.options import Options
from conformance.session.request import SESSION, read_request

HOOK = Options(hook="hooks_ref:allreduce_hook")


def test_a_session_without_a_seed_draws_a_new_one() -> None:
    seeds = {read_request(HOOK).seed for _ in range(5)}
    assert len(seeds) > 1
    assert all(0 <= seed <= LARGEST_SEED for seed in seeds)


def test_a_seed_that_was_given_is_kept() -> None:
    assert read_request(replace(HOOK, seed=0)).seed == 0
    assert read_request(replace(HOOK, seed=17)).seed == 17


@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(UsageError, match=rf"--seed {seed}: a number from 0 to {LARGEST_SEED}"):
        read_request(replace(HOOK, seed=seed))


@pytest.mark.parametrize(("recorded", "expected"), [({"seed": 9}, 9), ({}, 0)])
def test_a_replay_has_the_seed_of_its_records(
    tmp_path: Path, recorded: dict[str, int], expected: int
) -> None:
    header = {
        "subject": {"hook": HOOK.hook, "state": None, "setup": None, "kind": "hook"},
        "profile": {"name": "gloo", "backend": "gloo", "device": "cpu", "world_sizes": [2]},
        "claims": {"text": "exact", "declared_by": "nobody"},
        "date": "2026-11-23T00:00:00+00:00",
        **recorded,
    }
    (tmp_path / SESSION).write_text(json.dumps(header))
    assert read_request(Options(replay=str(tmp_path), seed=3)).seed == expected


def test_records_of_older_kits_are_replayed(tmp_path: Path) -> None:
    """Their header has the keys of version 1 of the certificate."""
    header = {
        "subject": {"hook": HOOK.hook, "state": None, "setup": None, "kind": "hook"},
        "profile": {"name": "gloo", "backend": "gloo", "device": "cpu", "world sizes": [2, 3]},
        "claims": {"text": "sum", "said by": "--claims"},
        "date": "2026-11-23T00:00:00+00:00",
        "requested steps": 1300,
    }
    (tmp_path / SESSION).write_text(json.dumps(header))
    request = read_request(Options(replay=str(tmp_path)))
    assert (request.world_sizes, str(request.claims), request.steps) == ((2, 3), "sum", 1300)
