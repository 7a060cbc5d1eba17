"""What a quantized collective refuses: it is asked by calls of other objects.

A call that is refused may have changed what its object keeps, so that the object that the scenario
follows gets no such call.
"""

from collections.abc import Callable
from typing import Any

from conformance.ranks.drivers._collective_call import CollectiveCall
from conformance.ranks.drivers.base import RankDriver


class Refusals:
    """The refusals of one subject on one rank.

    Args:
        driver: of the rank.
        make_collective: returns a new object of the subject.
        call: returns the call of a step and a parameter.
        key_of: returns the key of the object that makes the call of a step and a parameter.
    """

    def __init__(
        self,
        driver: RankDriver,
        make_collective: Callable[[], Callable[..., Any]],
        call: Callable[[int, int], CollectiveCall],
        key_of: Callable[[int, int], tuple[int, int]],
    ) -> None:
        self._driver = driver
        self._make_collective = make_collective
        self._call = call
        self._key_of = key_of
        self._may_be_async: dict[int, bool] = {}
        self._takes_calls_of: dict[int, bool] = {}
        self._takes_calls_together: bool | None = None
        self._tried = 0

    def takes(self, call: CollectiveCall) -> bool:
        """Return whether calls of a parameter are taken.

        An error may refuse an operation, a memory layout or numbers.
        """
        if call.index not in self._takes_calls_of:
            error = self._error_of([self._copy(call, is_asynchronous=False)])
            self._takes_calls_of[call.index] = not error
            if error:
                self._driver.recorder.event("refuses_calls", index=call.index, error=error)
        return self._takes_calls_of[call.index]

    def takes_async(self, call: CollectiveCall) -> bool:
        """Return whether calls of a parameter may have async_op=True.

        An error may refuse it for averages alone, or for some memory layouts.
        """
        if call.index not in self._may_be_async:
            other = self._copy(call, is_asynchronous=True)
            error = self._error_of([other], may_refuse_in_wait=True)
            self._may_be_async[call.index] = not error
            if error:
                self._note_async(call, error)
        return self._may_be_async[call.index]

    def error_of_async(self, call: CollectiveCall) -> str:
        """Return the error with which a new object refuses a call with async_op=True; '' if it
        takes the call.
        """
        return self._error_of([self._copy(call)])

    def apart(self, calls: list[CollectiveCall]) -> list[list[CollectiveCall]]:
        """Return calls in one list, if they may be under way together, or each in its own.

        An error may refuse a call while another one is under way. It is looked for once.
        """
        if not any(call.is_asynchronous for call in calls[:-1]):
            return [[call] for call in calls]
        if self._takes_calls_together is None:
            error = self._error_of([self._copy(call) for call in calls])
            self._takes_calls_together = not error
            if error:
                self._note_others(error)
        return [calls] if self._takes_calls_together else [[call] for call in calls]

    def apart_if_refused(self, calls: list[CollectiveCall]) -> list[list[CollectiveCall]]:
        """Return calls that have async_op=True in one list, or each in its own.

        Those that are refused have no async_op afterwards. What is refused may depend on sizes and
        dtypes, and is looked for in each run of calls.
        """
        error = self._error_of([self._copy(call) for call in calls])
        if not error:
            return [calls]
        errors = [error]
        if len(calls) > 1:
            errors = [self._error_of([self._copy(call)]) for call in calls]
        for call, error_of_call in zip(calls, errors, strict=True):
            if error_of_call:
                call.is_asynchronous = False
                self._note_async(call, error_of_call)
        if not any(errors):
            self._note_others(error)
        return [[call] for call in calls]

    def _note_async(self, call: CollectiveCall, error: str) -> None:
        self._driver.recorder.event("refuses_waiting", index=call.index, error=error)

    def _note_others(self, error: str) -> None:
        self._driver.recorder.event("refuses_others", error=error)

    def _copy(self, call: CollectiveCall, is_asynchronous: bool | None = None) -> CollectiveCall:
        """Return a call with other tensors of the same values.

        Args:
            call: the call.
            is_asynchronous: whether the copy has async_op=True; None if it has what the call has.
        """
        other = self._call(call.step, call.index)
        other.is_asynchronous = call.is_asynchronous
        # An error of a list that has changed is no refusal.
        other.use_of_lists = ""
        if is_asynchronous is not None:
            other.is_asynchronous = is_asynchronous
        return other

    def _error_of(self, calls: list[CollectiveCall], may_refuse_in_wait: bool = False) -> str:
        """Return the error with which new objects refuse one of the calls; '' if they take them.

        Calls share an object if the scenario's own calls do: one with error feedback may refuse
        tensors of another shape, and of a scatter the source alone knows that.

        All calls are begun before the first wait. If rank 0 goes first, its answer is that of all
        ranks. Peers leave the calls out if rank 0 has refused the first one: they would wait for
        rank 0.

        Args:
            calls: the calls.
            may_refuse_in_wait: an error of a wait() is a refusal, too. Otherwise it ends the run.
        """
        driver = self._driver
        keys = dict.fromkeys(self._key_of(call.step, call.index) for call in calls)
        functions = {key: self._make_collective() for key in keys}
        is_first = driver.scenario.order == "rank0_first"
        key = f"tried/{self._tried}"
        self._tried += 1
        error = ""
        begun: list[CollectiveCall] = []
        with driver.inside(driver.scenario.options[0]):
            try:
                is_left_out = is_first and driver.rank and driver.signals.check([f"{key}/left out"])
                for call in [] if is_left_out else calls:
                    call.function = functions[self._key_of(call.step, call.index)]
                    call.begin()
                    begun.append(call)
            except Exception as raised:
                error = _in_short(raised)
                if is_first and driver.rank == 0 and not begun:
                    driver.signals.set(f"{key}/left out", "1")
            try:
                for call in begun:
                    call.wait()
            except Exception as raised:
                if not may_refuse_in_wait:
                    raise
                error = error or _in_short(raised)
        driver.collectives.take_sent()
        if not is_first:
            return error
        if driver.rank == 0:
            driver.signals.set(key, error)
        return driver.signals.get(key).decode()


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
