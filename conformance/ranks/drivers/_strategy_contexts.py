"""What a sync strategy returns for a micro-batch, and how messages describe other objects."""

from typing import Any

from conformance.errors import TargetError


def require_context(context: Any, strategy: Any) -> None:
    """Require a context manager.

    Args:
        context: what a call of the strategy has returned.
        strategy: the subject.

    Raises:
        TargetError: it is another object.
    """
    if _is_context(context):
        return
    text = f"a sync strategy returns a context manager; this one returned {described(context)}"
    if isinstance(strategy, type) and callable(context):
        # Its instances may be what is called for each micro-batch.
        name = strategy.__qualname__
        text += (
            f"; if a call of this object returns one, name an object of {name} that your module "
            "makes, or claim counts(N), which makes one, if it counts micro-batches itself"
        )
    raise TargetError(text)


def described(value: Any) -> str:
    """Return a value in words, for a message."""
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _is_context(value: Any) -> bool:
    return hasattr(value, "__enter__") and hasattr(value, "__exit__")
