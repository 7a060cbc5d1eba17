"""Decide whether an error that backward raised is the failure of a collective.

A hook that reads its result although the collective failed may stumble over the memory that nobody
wrote: an IndexError, a ValueError, a size that does not fit. Such an error is raised by chance, and
another run goes on with garbage. The error has to be the collective's own, or to name it:

- its text, or the text of an error that it was chained to (``raise ... from error``), has the words
  of a failed collective: the backend's ("connection closed by peer", "timed out"), or the name of
  a collective or of a process group;
- and its type is none that Python raises for wrong code or wrong data.

torch turns an exception of a callback into text: "Got the following error when running the
callback: IndexError: ...", with the lines of the callback after "At:". The type is therefore
searched in the text, too, and the lines are left out: a function may be called ``all_reduce``.
"""

import re
from typing import Any

from conformance.judging.verdict import Found

# Errors of wrong code and wrong data, which are no failures of a collective.
_ACCIDENTS = re.compile(
    r"\b(ArithmeticError|AssertionError|AttributeError|EOFError|FloatingPointError|ImportError|"
    r"IndexError|JSONDecodeError|KeyError|LookupError|MemoryError|NameError|OverflowError|"
    r"RecursionError|StopIteration|struct\.error|SyntaxError|TypeError|UnboundLocalError|"
    r"UnicodeDecodeError|UnpicklingError|ValueError|ZeroDivisionError)\b"
)

_WORDS = re.compile(
    r"injected by the conformance kit|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter|"
    r"broadcast|barrier|collective|communicat|process ?group|gloo|nccl|\bmpi\b|\bucc\b|xccl|hccl|"
    r"connection|\bpeers?\b|time[d ]? ?out|reset by|broken pipe|socket|transport|unreachable|"
    r"\bsend\b|\brecv\b|\breceiv|\babort",
    re.IGNORECASE,
)

# The lines of Python code that torch adds to the text of an exception.
_LINES = re.compile(r"\n\s*At:\n(?:\s+\S[^\n]*\(\d+\): [^\n]*\n?)*")


def require_raised(
    found: Found, fault: dict[str, Any], rank: int, call: str, event: str, cause: str, reading: str
) -> None:
    """Require that a call has raised the error of a failed collective.

    Args:
        found: receives the findings.
        fault: the ``fault`` event of the rank.
        rank: the rank.
        call: the call, in words: ``backward()``.
        event: the event after which it has to raise, in words: "its peer had died".
        cause: the likely cause if it raises nothing.
        reading: the way to learn of the error, in words: "read fut.value()".
    """
    expected = f"an error from {call} on rank {rank}, after {event}"
    returned = f"{call} returned on rank {rank} without an error"
    if not found.require(fault["raised"], expected, returned, cause):
        return
    text = f"{fault['type']}: {fault['message']}".splitlines()[0][:300]
    found.require(
        is_failure_of_collective(fault),
        f"{expected}: the collective's own, or one that names it",
        f"rank {rank} raised {text}",
        f"the result of a failed collective was used: {reading} first, and raise other errors from "
        "that one",
    )


def is_failure_of_collective(fault: dict[str, Any]) -> bool:
    """Return whether the error of a ``fault`` event is a collective's own, or names it.

    Args:
        fault: has ``type`` and ``message``, and the texts of the chained errors in ``chain``.
    """
    texts = [f"{fault['type']}: {fault['message']}", *fault.get("chain", ())]
    return any(_names_failure(text) for text in texts)


def _names_failure(text: str) -> bool:
    without_lines = _LINES.sub("\n", text)
    return not _ACCIDENTS.search(without_lines) and bool(_WORDS.search(without_lines))
