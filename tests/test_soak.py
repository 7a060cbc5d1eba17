"""The record of the soak, and the world sizes that it judges at."""

import json
from pathlib import Path

from conformance.subjects.claims import LOCAL
from tests.cases import subject_and_claims
from tests.soak import parser, record_run, right_cases, runs_in_a_row


def test_a_record_counts_the_runs_since_the_last_wrong_verdict(tmp_path: Path) -> None:
    record = tmp_path / "runs.jsonl"
    assert runs_in_a_row(record) == 0
    options = parser().parse_args(["--parts", "--judges", "2"])
    for seed, wrong in enumerate([[], ["a wrong verdict"], [], []]):
        record_run(record, options, seed, 10, wrong)
    assert runs_in_a_row(record) == 2
    last = json.loads(record.read_text().splitlines()[-1])
    assert (last["seed"], last["verdicts"], last["parts"], last["judges"]) == (3, 10, True, 2)


def test_every_right_subject_is_judged_at_sizes_that_it_takes_and_may_refuse() -> None:
    for case in right_cases(()):
        claims = subject_and_claims(case)[1]
        assert max(case.worlds) >= (3 if claims.lossy == LOCAL else claims.min_world_size)
        if claims.min_world_size > 1:
            assert min(case.worlds) < claims.min_world_size, case
