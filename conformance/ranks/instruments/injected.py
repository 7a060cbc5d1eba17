"""The error that the kit injects, and the event of a failure that the kit has caused."""

from typing import Any

import torch.distributed as dist


class Injected(dist.DistBackendError, dist.DistNetworkError):
    """An error that the kit raises inside a collective or a hook.

    Its types are those of torch's own errors of a backend and of a connection, and of RuntimeError,
    which Gloo raises.
    """


def collective_failed() -> Exception:
    """Return the error of a collective that fails.

    Its text has the words of Gloo's and NCCL's errors, because a subject may take some of them for
    a failure that passes: a lost connection, or a timeout.
    """
    return Injected(
        "injected by the conformance kit: this collective failed: [pair.cc:547] Connection closed "
        "by peer [127.0.0.1]:41234: Connection reset by peer, broken pipe; Timed out waiting "
        "1800000ms for recv operation to complete; ncclSystemError: the watchdog caught a "
        "collective operation timeout, unhandled system error, and the communicator was aborted"
    )


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
