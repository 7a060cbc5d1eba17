"""``certify``: a whole run as one call, for a test suite of one's own."""

from dataclasses import fields
from typing import Any, Unpack

from conformance.errors import CERTIFIED, ProfileError, TargetError, UsageError
from conformance.session.options import GivenOptions, Options, suggestion
from conformance.session.report import conclusion_text
from conformance.session.session import Session


def certify(
    hook: Any = None, *, options: Options | None = None, **given: Unpack[GivenOptions]
) -> dict[str, Any]:
    """Certify a hook from a test suite of your own; return the certificate.

    Args:
        hook: ``module:attribute``, or a function that a module defines.
        options: all options at once, instead of ``given``.
        **given: the fields of :class:`Options`: ``state``, ``setup``, ``claims``, ...

    Raises:
        AssertionError: the subject is not certified; the message is the report.
        ConformanceError: the subject could not be judged.
    """
    # pytest then shows the test's own line, and none of the kit's.
    __tracebackhide__ = True
    _require_options(given)
    target = hook if hook is None or isinstance(hook, str) else _target_of(hook)
    try:
        return _certify(options or Options(hook=target, **given))
    except (UsageError, TargetError, ProfileError) as error:
        # The caller's mistake; the message has the reason and a remedy.
        raise error.with_traceback(None) from None


def _certify(options: Options) -> dict[str, Any]:
    __tracebackhide__ = True
    with Session.of(options) as session:
        session.start()
        session.begin()
        for number in session.selected:
            session.judge(number)
        conclusion = session.conclude()
        if conclusion.exit_code != CERTIFIED or conclusion.certificate is None:
            raise AssertionError(conclusion_text(session, conclusion))
        return conclusion.certificate


def _require_options(given: GivenOptions) -> None:
    """Refuse a misspelt option, and name the most similar one."""
    __tracebackhide__ = True
    known = [option.name for option in fields(Options)]
    for name in given:
        if name not in known:
            raise UsageError(f"certify() has no option {name!r}{suggestion(name, known)}")


def _target_of(hook: Any) -> str:
    """Return the target of a function that a module defines."""
    __tracebackhide__ = True
    module = getattr(hook, "__module__", "")
    name = getattr(hook, "__qualname__", "")
    importable = module and module != "__main__" and name and "<" not in name
    if not importable:
        raise UsageError(f"{hook!r} has no name that ranks could import; pass 'module:attribute'")
    return f"{module}:{name}"
