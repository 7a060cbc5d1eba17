"""A collective that fails on one rank alone, for every kind of subject but hooks.

``call_fails``  the call that issues the collective raises
``work_fails``  the call returns a Work whose wait() raises, and whose future holds the error

The collective itself takes place in both cases, so that peers receive their results and go on. They
would wait for the rank in their next collective, so that their processes end once its outcome is on
record. No process ends its groups: that would wait for collectives which peers never join. Only the
rank on which the collective fails is judged.

The failure is over at the end of the step in which the collective was issued: a subject may start
a collective in a backward, and raise its error in a later call of the same step.
"""

import contextlib
import datetime
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks.instruments.injected import collective_failed, outcome_of
from conformance.records.files import DONE
from conformance.records.recorder import Recorder
from conformance.scenarios.model import CALL_FAILS, COLLECTIVE_FAULTS, Scenario

_OVER = "failure over"


class _StepEnded(BaseException):
    """The step of the failure has ended without an error."""


class FailingCollective:
    """Lets one collective of a rank fail, and records how the failure shows.

    Args:
        scenario: has the failure, and the step from which on collectives are counted.
        rank: of this process.
        recorder: receives the ``fault`` event.
    """

    def __init__(self, scenario: Scenario, rank: int, recorder: Recorder) -> None:
        self._fault = scenario.fault
        self._is_faulty = rank == scenario.fault.rank
        self._recorder = recorder
        self._lock = threading.Lock()
        self._is_armed = False
        self._has_failed = False
        self._left = scenario.fault.succeeding
        self._is_in_post_hook = False
        self._in_post_hooks = 0  # collectives of the present context
        self._issued = 0
        self._failed_name = ""
        # Python's part of a Work has to live as long as C++ may call it.
        self._works: list[Any] = []
        self._signals: Any = None

    @property
    def is_planned(self) -> bool:
        """Whether the scenario has such a failure."""
        return self._fault.kind in COLLECTIVE_FAULTS

    def begin_step(self, step: int) -> None:
        """Count collectives from the step of the failure on; end the run after that step."""
        if self._has_failed:
            raise _StepEnded
        if self.is_planned and step >= self._fault.step:
            self._is_armed = True

    def begin_post_hooks(self) -> None:
        """Count collectives, if those in post hooks alone are counted."""
        self._is_in_post_hook = True
        self._in_post_hooks = 0

    def end_post_hooks(self) -> None:
        """Count no more collectives; bring the one that fails below their number."""
        self._is_in_post_hook = False
        if self._in_post_hooks and not self._is_armed:
            self._left = self._fault.succeeding % self._in_post_hooks

    def pass_on(self, name: str, size: int, result: Any) -> Any:
        """Return the result of a kernel that has issued a collective, or let the collective fail.

        Args:
            name: the name of the kernel.
            size: the bytes that this rank contributes or receives.
            result: a Work, or a tuple that ends with one.

        Raises:
            Injected: the call is to fail.
        """
        if not self._is_due(name, size):
            return result
        if self._fault.kind == CALL_FAILS:
            raise collective_failed()
        return with_failing_work(result, self._works)

    def _is_due(self, name: str, size: int) -> bool:
        """Count a collective, and return whether it is the one that fails."""
        with self._lock:
            if self._fault.in_post_hooks and not self._is_in_post_hook:
                return False
            self._issued += 1
            self._in_post_hooks += 1
            is_counted = self._is_armed and size >= self._fault.least_bytes
            if not self._is_faulty or self._has_failed or not is_counted:
                return False
            self._left -= 1
            if self._left >= 0:
                return False
            self._has_failed = True
            self._failed_name = name.strip("_")
            return True

    def watch_peer(self, signals: dist.Store, timeout: float) -> None:
        """End this process, with a whole record, once the outcome of the faulty rank is on record.

        Args:
            signals: the kit's store.
            timeout: in seconds.
        """
        self._signals = signals
        if self._is_faulty:
            return

        def end_with_faulty_rank() -> None:
            signals.wait([_OVER], datetime.timedelta(seconds=timeout))
            self._recorder.close(keeps_tensors=False)
            os._exit(DONE)

        threading.Thread(
            target=end_with_faulty_rank, name="conformance-failing", daemon=True
        ).start()

    def _may_follow(self) -> bool:
        """Whether an error of this rank may follow from the failure of the faulty rank."""
        if self._is_faulty:
            return False
        return self._is_armed or bool(self._signals and self._signals.check([_OVER]))

    @property
    def has_failed(self) -> bool:
        """Whether the collective of this rank has failed."""
        return self._has_failed

    def run(self, steps: Callable[[], None]) -> None:
        """Run the scenario's steps; end them at the failure, and record it."""
        if not self.is_planned:
            steps()
            return
        raised: BaseException | None = None
        try:
            steps()
        except _StepEnded:
            pass
        except BaseException as error:
            if not self._has_failed and not self._may_follow():
                raise
            raised = error
        self._recorder.event(
            "fault",
            fault=self._fault.kind,
            unused=not self._has_failed,
            started=self._issued,
            collective=self._failed_name,
            **outcome_of(raised),
        )
        if self._is_faulty and self._signals:
            self._signals.set(_OVER, "1")


def with_failing_work(result: Any, works: list[Any], *, waits: bool = True) -> Any:
    """Return the result of a kernel with a Work that fails in place of its own.

    Args:
        result: a Work, or a tuple that ends with one.
        works: keeps the Work.
        waits: wait() waits for the collective before it raises. If peers fail, too, the collective
            may never take place.

    Raises:
        Injected: the kernel has returned no Work that could fail.
    """
    *tensors, work = result if isinstance(result, (tuple, list)) else (result,)
    if work is None:
        raise collective_failed()
    is_boxed = isinstance(work, torch.ScriptObject)
    failing = _FailingWork(unboxed(work), waits=waits)
    works.append(failing)
    changed = failing.boxed() if is_boxed else failing
    return (*tensors, changed) if isinstance(result, (tuple, list)) else changed


def unboxed(work: Any) -> Any:
    """Return the Work itself; a kernel returns it in a box, and a Python group without one."""
    return dist.Work.unbox(work) if isinstance(work, torch.ScriptObject) else work


class _FailingWork(dist.Work):
    """The Work of a collective that takes place, and fails on this rank.

    Args:
        work: of the collective.
        waits: wait() waits for the collective.
    """

    def __init__(self, work: Any, *, waits: bool) -> None:
        super().__init__()
        self._work = work
        self._waits = waits

    def wait(self, *_: Any, **__: Any) -> bool:
        if self._waits:
            with contextlib.suppress(RuntimeError):
                self._work.wait()
        raise collective_failed()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        raise collective_failed()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return False

    def exception(self) -> Exception:
        return collective_failed()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the error, for C++ too: set_exception would set a value there."""
        future: torch.futures.Future[None] = torch.futures.Future()
        failed = future.then(_raise)
        future.set_result(None)
        return failed


def _raise(_: Any) -> None:
    raise collective_failed()
