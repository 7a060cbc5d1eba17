"""Require that the handle of an asynchronous call tells the truth about the call."""

from conformance.judging.oracles.collective import Call
from conformance.judging.verdict import Found


def require_truth_of_handle(found: Found, call: Call) -> None:
    """Require that a call was complete when its handle said so, and after ``wait()``."""
    early = call.event["early"]
    found.require(
        not early,
        "outputs that are there when the call is complete",
        f"{call}: {', '.join(early[:1])}, and outputs change later",
        "the answer of the collective's own Work, whose codes are still to be decoded",
    )
    expected = "is_completed() true after wait()"
    found.require(not call.event["late"], expected, f"{call}: is_completed() is false after wait()")
    found.require(
        not call.event["value_differs"],
        "the outputs in the value of get_future()",
        f"{call}: the future holds other tensors than the outputs",
        "the future of the collective's own Work, which holds the codes",
    )
    untrue = call.event["untrue"]
    found.require(
        not untrue,
        "answers after wait() that fit a call which has ended well",
        f"{call}: {', '.join(untrue[:1])}",
        "the answer of the collective's own Work, or of an earlier moment",
    )
