"""Tests of the errors that count as the failure of a collective."""

import pytest

from conformance.judging.oracles.failure import is_failure_of_collective

CALLBACK = "Got the following error when running the callback: "
LINES = "\n\nAt:\n  /home/me/all_reduce.py(33): all_reduce\n"


@pytest.mark.parametrize(
    "message",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer",
        "Timed out waiting 500ms for recv operation to complete",
        "injected by the conformance kit: this collective failed",
        f"{CALLBACK}RuntimeError: [gloo/tcp/pair.cc:547] Connection reset by peer{LINES}",
        "the all_gather of bucket 3 failed",
        "NCCL communicator was aborted on rank 1.",
    ],
)
def test_the_error_of_a_collective_counts(message: str) -> None:
    assert is_failure_of_collective({"type": "RuntimeError", "message": message})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("IndexError", "index 1065353216 is out of bounds for dimension 0 with size 47"),
        ("RuntimeError", f"{CALLBACK}IndexError: index 94 is out of bounds{LINES}"),
        ("RuntimeError", f"{CALLBACK}RuntimeError: shape '[12]' is invalid{LINES}"),
        ("ValueError", "all_gather returned 12 bytes"),
        ("UnpicklingError", "invalid load key, '\\x00'."),
    ],
)
def test_an_accident_does_not_count(kind: str, message: str) -> None:
    assert not is_failure_of_collective({"type": kind, "message": message})


def test_the_error_that_it_was_raised_from_counts() -> None:
    fault = {
        "type": "ValueError",
        "message": "bucket 3 is lost",
        "chain": ["RuntimeError: Connection closed by peer"],
    }
    assert is_failure_of_collective(fault)
