"""The error that the kit injects, and the event of a failure that the kit has caused."""

from typing import Any


class Injected(RuntimeError):
    """An error that the kit raises inside a collective or a hook."""


def collective_failed() -> Exception:
    """Return the error of a collective that fails."""
    return Injected("injected by the conformance kit: this collective failed")


def outcome_of(error: BaseException | None) -> dict[str, Any]:
    """Return the entries of a ``fault`` event for the error that came out; None if none did."""
    if error is None:
        return {"raised": False}
    return {
        "raised": True,
        "type": type(error).__name__,
        "message": str(error)[:2000],
        "chain": _chained(error),
    }


def _chained(error: BaseException) -> list[str]:
    """Return the texts of the errors that an error was raised from."""
    texts: list[str] = []
    cause = error.__cause__ or error.__context__
    while cause is not None and len(texts) < 8:
        texts.append(f"{type(cause).__name__}: {cause}"[:2000])
        cause = cause.__cause__ or cause.__context__
    return texts
