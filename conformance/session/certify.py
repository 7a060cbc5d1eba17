"""``certify``: a whole run as one call, for a test suite of one's own."""

import os
from pathlib import Path
from typing import Any

from conformance.errors import (
    CERTIFIED,
    KitError,
    ProfileError,
    TargetError,
    UsageError,
)
from conformance.session.options import ATTACH_WAIT, DEADLINE, WORLD_SIZES, Options
from conformance.session.progress import default_terminal
from conformance.session.report import write_report
from conformance.session.session import Session
from conformance.session.terminal import conclusion_text


def certify(
    hook: Any = None,
    *,
    options: Options | None = None,
    results: str | os.PathLike[str] | None = None,
    state: str | None = None,
    setup: str | None = None,
    averager: str | None = None,
    optimizer: str | None = None,
    strategy: str | None = None,
    joinable: str | None = None,
    collective: str | None = None,
    wrapper: str | None = None,
    claims: str | None = None,
    backend: str = "gloo",
    device: str | None = None,
    backend_import: str | None = None,
    require_profile: str | None = None,
    world_size: str = WORLD_SIZES,
    rule: tuple[str, ...] = (),
    seed: int | None = None,
    steps: int | None = None,
    require_coverage: bool = False,
    certificate: str | None = None,
    records: str | None = None,
    replay: str | None = None,
    attach: str | None = None,
    attach_wait: float = ATTACH_WAIT,
    deadline: float = DEADLINE,
) -> dict[str, Any]:
    """Certify a hook from a test suite of your own; return the certificate.

    The certificate and the reports are written where the command line writes them. The other
    arguments are the options of the command line, which ``python -m conformance certify --help``
    explains.

    Args:
        hook: ``module:attribute``, or a function that a module defines.
        options: all options at once, instead of the arguments from ``state`` on.
        results: the folder for the certificate and the reports; by default the folder of the
            subject in ``conformance-results``.

    Raises:
        AssertionError: the subject is not certified; the message is the report.
        ConformanceError: the subject could not be judged; ``claims="auto"``, which certifies
            nothing, is a UsageError.
    """
    # pytest then shows the test's own line, and none of the kit's.
    __tracebackhide__ = True
    target = hook if hook is None or isinstance(hook, str) else _target_of(hook)
    chosen = options or Options(
        hook=target,
        state=state,
        setup=setup,
        averager=averager,
        optimizer=optimizer,
        strategy=strategy,
        joinable=joinable,
        collective=collective,
        wrapper=wrapper,
        claims=claims,
        backend=backend,
        device=device,
        backend_import=backend_import,
        require_profile=require_profile,
        world_size=world_size,
        rule=rule,
        seed=seed,
        steps=steps,
        require_coverage=require_coverage,
        certificate=certificate,
        records=records,
        replay=replay,
        attach=attach,
        attach_wait=attach_wait,
        deadline=deadline,
    )
    try:
        found, text = _certify(chosen, Path(results) if results is not None else None)
    except (UsageError, TargetError, ProfileError) as error:
        # The caller's mistake; the message has the reason and a remedy.
        raise error.with_traceback(None) from None
    if found is None:
        raise AssertionError(text)
    return found


def _certify(options: Options, results: Path | None) -> tuple[dict[str, Any] | None, str]:
    """Return the certificate, or None and the report."""
    __tracebackhide__ = True
    with Session.of(options, results=results) as session:
        if session.searches_claims:
            raise UsageError(_no_claims_to_judge(session.options))
        session.progress.terminal = default_terminal()
        session.start()
        session.begin()
        for number in session.selected:
            session.judge(number)
        conclusion = session.conclude()
        try:
            write_report(session, conclusion)
        except OSError as error:
            raise KitError(
                f"cannot write the report: {error.strerror}: {error.filename}"
            ) from error
        if conclusion.exit_code == CERTIFIED and conclusion.certificate is not None:
            return conclusion.certificate, ""
        report = f"report: {session.folder / 'report.html'}"
        return None, f"{conclusion_text(session, conclusion)}\n{report}"


def _no_claims_to_judge(options: Options) -> str:
    command = f"python -m conformance certify {options.command()}"
    return (
        f"claims='auto' proposes claims and certifies nothing: run {command}, and pass the claims "
        "that you choose"
    )


def _target_of(hook: Any) -> str:
    """Return the target of a function that a module defines."""
    __tracebackhide__ = True
    module = getattr(hook, "__module__", "")
    name = getattr(hook, "__qualname__", "")
    importable = module and module != "__main__" and name and "<" not in name
    if not importable:
        raise UsageError(f"{hook!r} has no name that ranks could import; pass 'module:attribute'")
    return f"{module}:{name}"
