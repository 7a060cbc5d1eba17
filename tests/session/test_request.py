"""Tests of requests: the command line, parsed once."""

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.errors import UsageError
from conformance.scenarios.draws import LARGEST_SEED
from conformance.session.options import Options, add_options, options_of
from conformance.session.request import SESSION, read_request

HOOK = Options(hook="hooks_ref:allreduce_hook")


def parsed(line: str) -> Options:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser()
    add_options(parser.add_argument)
    return options_of(parser.parse_args(shlex.split(line)))


def test_a_repeated_list_is_longer() -> None:
    options = parsed(
        "--hook hooks_ref:allreduce_hook --world-size 2 --world-size 4,3 --claims sum "
        "--claims 'dtypes(float32, float64), checkpointable' --rule 2.1 --rule 3"
    )
    request = read_request(options)
    assert request.world_sizes == (2, 3, 4)
    assert str(request.claims) == "sum, dtypes(float32, float64), checkpointable"
    assert options.rule == ("2.1", "3")


def test_options_that_are_left_out_have_their_defaults() -> None:
    assert parsed("--hook hooks_ref:allreduce_hook") == HOOK


def test_a_repeated_subject_has_to_be_the_same() -> None:
    assert parsed("--hook a:b --hook a:b").hook == "a:b"
    assert parsed("--hook a:b --hook a:b").state is None


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("--hook a:b --hook 'a:c,size=[1, 2]'", "--hook a:b and --hook 'a:c,size=[1, 2]'"),
        ("--averager a:b --averager a:c --averager a:b", "--averager a:b and --averager a:c"),
        ("--hook a:b --state pg --state a:s", "--state pg and --state a:s"),
        ("--setup a:b --setup a:c", "--setup a:b and --setup a:c"),
    ],
)
def test_two_subjects_of_one_option_are_refused(line: str, given: str) -> None:
    with pytest.raises(UsageError) as error:
        parsed(line)
    assert str(error.value) == (
        f"{given}: a run judges one; type one of them, and run pytest twice"
    )


def test_a_session_without_a_seed_draws_a_new_one() -> None:
    seeds = {read_request(HOOK).seed for _ in range(5)}
    assert len(seeds) > 1
    assert all(0 <= seed <= LARGEST_SEED for seed in seeds)


def test_a_seed_that_was_given_is_kept() -> None:
    assert read_request(replace(HOOK, seed=0)).seed == 0
    assert read_request(replace(HOOK, seed=17)).seed == 17


@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    message = f"--seed {seed} is out of range: give a number from 0 to {LARGEST_SEED}"
    with pytest.raises(UsageError, match=message):
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
