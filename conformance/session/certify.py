"""``certify``: a whole run as one call, for a test suite of one's own."""

from typing import Any

from conformance.errors import CERTIFIED, UsageError
from conformance.session.options import Options
from conformance.session.report import conclusion_text
from conformance.session.session import Session


def certify(hook: Any = None, *, options: Options | None = None, **given: Any) -> dict[str, Any]:
    """Certify a hook from a test suite of your own; return the certificate.

    Args:
        hook: ``module:attribute``, or a function that a module defines.
        options: all options at once, instead of ``given``.
        **given: the fields of :class:`Options`: ``state``, ``setup``, ``claims``, ...

    Raises:
        AssertionError: the subject is not certified; the message is the report.
        ConformanceError: the subject could not be judged.
    """
    target = hook if hook is None or isinstance(hook, str) else _target_of(hook)
    with Session.of(options or Options(hook=target, **given)) as session:
        session.start()
        session.begin()
        for number in session.selected:
            session.judge(number)
        conclusion = session.conclude()
        if conclusion.exit_code != CERTIFIED or conclusion.certificate is None:
            raise AssertionError(conclusion_text(session, conclusion))
        return conclusion.certificate


def _target_of(hook: Any) -> str:
    """Return the target of a function that a module defines."""
    module = getattr(hook, "__module__", "")
    name = getattr(hook, "__qualname__", "")
    importable = module and module != "__main__" and name and "<" not in name
    if not importable:
        raise UsageError(f"{hook!r} has no name that ranks could import; pass 'module:attribute'")
    return f"{module}:{name}"
