"""The driver of quantized collectives: sends messages through them, and records the arrivals."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from conformance.errors import TargetError
from conformance.ranks.drivers._collective_call import CollectiveCall, TensorsOfCalls
from conformance.ranks.drivers._collective_refusals import Refusals
from conformance.ranks.drivers._handles import Handle
from conformance.ranks.drivers.base import KIT, RankDriver
from conformance.ranks.enum_arguments import with_enum_members
from conformance.ranks.resolve import Factory
from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective import (
    AT_REST,
    COLLECTIVES,
    FUTURE_FIRST,
    HANDLES,
    SUBGROUPS,
    operation_of,
)
from conformance.scenarios.collective_conditions import MIXED, conditions_of
from conformance.scenarios.collective_training import OF_LARGE, UNEVEN_ON_GROUPS
from conformance.subjects.spec import CONTEXT_NAMES


class CollectiveDriver(RankDriver):
    """One rank that calls a quantized collective."""

    def run(self) -> None:
        """Make the scenario's calls."""
        self._functions: dict[tuple[int, int], Callable[..., Any]] = {}
        self._tensors_of_calls: TensorsOfCalls = {}
        # None if that is not known yet.
        self._refuses_async: bool | None = None
        self._refusals = Refusals(self, self._make_collective, self._call, self._key_of)
        # By whether calls have async_op=True.
        self._refuses_outside: dict[bool, bool] = {}
        self._has_waited = False
        if self.scenario.variant == "after_world":
            self._call_on_world()
        for step, kind in enumerate(self.scenario.steps):
            self.begin_step(step, kind)
            self._step(step)
        if self.scenario.name == SUBGROUPS.name:
            self._call_more_often()
            self._call_outside(len(self.scenario.steps))

    def _call_more_often(self) -> None:
        """Make calls on this rank's group while other groups make fewer, or none.

        All ranks make equally many objects, since an object may make a process group.
        """
        keeps_errors = "feedback" in self.scenario.options
        made = [self._make_collective() if keeps_errors else None for _ in self.scenario.groups]
        for function in made[: self._place_of_group()]:
            self._call_unjudged(function)

    def _place_of_group(self) -> int:
        """Return the place of this rank's group among the groups of the scenario."""
        places = (n for n, group in enumerate(self.scenario.groups) if self.rank in group)
        return next(places, 0)

    def _call_outside(self, number: int) -> None:
        """Make each call with the value that new_group returns on ranks outside of a group.

        All ranks make these calls, so that a subject which takes the value for WORLD waits for
        nobody. The messages of every other call are those for WORLD, which fit then. Each call is
        made with async_op=True, too, and waited for.

        Args:
            number: of the step.
        """
        for index, is_asynchronous in itertools.product(
            messages.indices(self.scenario, 0), (False, True)
        ):
            self.begin_step(number, "none")
            if index % 2:
                self._enter_world()
            call = self._call(0, index)
            call.is_asynchronous = is_asynchronous
            if "feedback" in self.scenario.options:
                call.function = self._make_collective()
            else:
                self._prepare(0, [call])
            self._make_outside(call)

    def _make_outside(self, call: CollectiveCall) -> None:
        """Make a call as on a rank outside of the group, and record the tensors that it changes."""
        call.leave_group()
        raised = ""
        with self.inside(self.scenario.options[0]):
            try:
                call.begin()
                call.wait()
            except Exception as error:
                raised = f"{type(error).__name__}: {error}"[:300]
        self.collectives.take_sent()
        self.recorder.event("outside", index=call.index, raised=raised, changed=call.changed())
        self._refuses_outside[call.is_asynchronous] = bool(raised)

    def _call_outside_too(self, call: CollectiveCall) -> None:
        """Make a call as on a rank outside of the group first, in every other case with
        async_op=True; the tensors are other ones with the same values.

        A subject that refuses such calls need not keep anything: it is found out by another object.
        """
        other = self._call(call.step, call.index)
        other.is_asynchronous = (call.step + call.index) % 2 == 1
        if other.is_asynchronous not in self._refuses_outside:
            other.function = self._make_collective()
            self._make_outside(other)
            other = self._call(call.step, call.index)
            other.is_asynchronous = (call.step + call.index) % 2 == 1
        if not self._refuses_outside[other.is_asynchronous]:
            other.function = call.function
            self._make_outside(other)

    def _call_outside_meanwhile(self, call: CollectiveCall) -> None:
        """Begin a call, make one as on a rank outside of the group, and wait for the first one.

        So does a loop over groups that waits for its calls at the end.
        """
        call.is_asynchronous = True
        with self.inside(self.scenario.options[0]):
            call.begin()
        self._call_outside_too(call)
        with self.inside(self.scenario.options[0]):
            call.is_waited_for = True
            call.wait()
        call.keep()

    def _make_run(self, calls: list[CollectiveCall]) -> None:
        """Begin calls, and then wait for them, as far as the subject takes them together."""
        if self.scenario.variant == OF_LARGE:
            calls = [call for call in calls if self._takes_layout(call)]
        if not calls:
            return
        if self.scenario.variant == MIXED:
            calls = [call for call in calls if self._refusals.takes(call)]
            for call in calls:
                conditions = conditions_of(self.scenario, call.step, call.index)
                if call.is_asynchronous:
                    call.is_asynchronous = self._refusals.takes_async(call)
                call.waits_in_thread = conditions.waits_in_thread
                call.has_grad_mode = conditions.has_grad_mode
            lists = self._refusals.apart(calls)
        elif calls[0].is_asynchronous:
            lists = self._refusals.apart_if_refused(calls)
        else:
            lists = [calls]
        for some in lists:
            self._prepare(some[0].step, some)
            self._make_calls(some)

    def _takes_layout(self, call: CollectiveCall) -> bool:
        is_contiguous = self.scenario.params[call.index].is_contiguous
        return is_contiguous or self._refusals.takes(call)

    def _enter_world(self) -> None:
        self.group = dist.group.WORLD
        self.group_rank, self.size = dist.get_rank(), dist.get_world_size()

    def _call_on_world(self) -> None:
        """Make one call on WORLD, whose arrivals are not judged."""
        own = self.group, self.group_rank, self.size
        self._enter_world()
        self.begin_step(0, self.scenario.steps[0])
        self._call_unjudged()
        self.group, self.group_rank, self.size = own

    def _call_unjudged(self, function: Callable[..., Any] | None = None) -> None:
        """Make one call whose arrivals are not judged.

        With feedback it is a call of an object of its own, ``function`` or a new one: the error of
        this call must not be added to the next message.
        """
        call = self._call(0, 0)
        if "feedback" in self.scenario.options:
            call.function = function or self._make_collective()
        else:
            self._prepare(0, [call])
        with self.inside(self.scenario.options[0]):
            call.begin()
            call.wait()
        self.collectives.take_sent()

    def _call(self, step: int, index: int) -> CollectiveCall:
        return CollectiveCall(self, step, index, self._tensors_of_calls)

    def _step(self, step: int) -> None:
        """Make the calls of one step; nothing of them is kept."""
        is_last = step + 1 == len(self.scenario.steps)
        is_on_groups = self.scenario.name == UNEVEN_ON_GROUPS.name
        if is_on_groups and is_last and 0 not in self.scenario.group_of(self.rank, self.world):
            return
        if self.scenario.variant in messages.IN_RUNS:
            for run in messages.runs(self.scenario, step):
                self._make_run([self._call(step, index) for index in run])
            return
        calls = [self._call(step, index) for index in messages.indices(self.scenario, step)]
        if self.scenario.variant == "long":
            for call in calls:
                self._call_in_long_run(call)
            return
        if self._is_alone_at_last(step):
            for call in calls:
                call.is_asynchronous = True
                self._call_unless_refused(call)
            return
        if any(call.is_asynchronous for call in calls):
            self._prepare(step, calls)
            self._make_calls(calls)
            return
        for call in calls:
            self._prepare(step, [call])
            moment = messages.outside_too(self.scenario, step, call.index)
            if moment == messages.MEANWHILE and self._refusals.takes_async(call):
                self._call_outside_meanwhile(call)
                continue
            if moment:
                self._call_outside_too(call)
            self._make_calls([call])

    def _is_alone_at_last(self, step: int) -> bool:
        """Whether this rank is alone in its group, in the last step on groups; its calls have
        async_op=True then.
        """
        is_last = step + 1 == len(self.scenario.steps)
        return self.scenario.name == SUBGROUPS.name and self.size == 1 and is_last

    def _call_in_long_run(self, call: CollectiveCall) -> None:
        """Make one call; without async_op=True if another object refuses that.

        The object that makes all calls gets none that it refuses: with error feedback it might
        keep an error for a message that has not arrived.
        """
        if call.is_asynchronous:
            if self._refuses_async is None:
                error = self._refusals.error_of_async(call)
                self._refuses_async = bool(error)
                if error:
                    self.recorder.event("refuses_async", error=error)
                # Its tensors may be those of the call that has looked for a refusal.
                call = self._call(call.step, call.index)
            call.is_asynchronous = not self._refuses_async
        self._prepare(call.step, [call])
        self._make_calls([call])

    def _call_unless_refused(self, call: CollectiveCall) -> None:
        """Make one call; without async_op=True if the subject has refused that at first."""
        self._prepare(call.step, [call])
        if not call.is_asynchronous:
            self._make_calls([call])
            return
        if self._refuses_async:
            call.is_asynchronous = False
            self._make_calls([call])
            return
        try:
            self._make_calls([call])
        except Exception:
            if self._has_waited or call.is_waited_for:
                raise
            self.activity = KIT
            self._refuses_async = True
            self.recorder.event("refuses_async")
        self._has_waited = True

    def _prepare(self, step: int, calls: list[CollectiveCall]) -> None:
        """Give each call its collective."""
        for call in calls:
            key = self._key_of(step, call.index)
            if key not in self._functions:
                self._functions[key] = self._make_collective()
            call.function = self._functions[key]

    def _key_of(self, step: int, index: int) -> tuple[int, int]:
        """Return the key of a call's collective; calls of the same key share the object.

        Error feedback can be predicted only if the same message is sent again and again. In other
        scenarios each call with feedback has an object of its own. Without feedback, two objects
        share the calls that are under way together.
        """
        if self.scenario.variant == "long":
            return (0, 0)
        if "feedback" not in self.scenario.options:
            return (0, index % 2 if self.scenario.variant == "in_flight" else 0)
        return (0 if messages.keeps_objects(self.scenario) else step, index)

    def _make_collective(self) -> Callable[..., Any]:
        """Return the collective: the object that the target makes, or the target itself."""
        made = self.make(_understood)
        if not callable(made):
            raise TargetError(
                "a quantized collective is called as torch.distributed's is; "
                f"the target gives a {type(made).__name__}"
            )
        return made  # type: ignore[no-any-return]

    def _make_calls(self, calls: list[CollectiveCall]) -> None:
        """Begin calls, and then wait for them, if they are asynchronous.

        In the scenario in which rank 0 goes first, an error is an answer too. Its peers would wait
        for rank 0 in vain, so that they leave the call out. If it asks for an operation, and rank 0
        has issued no collective, they have to refuse it too, before they issue one.
        """
        is_first = self.scenario.order == "rank0_first"
        key = f"refused/{self.recorder.step}/{calls[0].index}"
        with self.inside(self.scenario.options[0]), self.autocast():
            try:
                if is_first and self.rank and self.signals.check([key]):
                    if not self.signals.check([f"{key}/without collectives"]):
                        raise _NotCalled("rank 0 has refused it")
                    self.collectives.before_each = _stop
                for call in calls:
                    call.begin()
                if self.scenario.variant == HANDLES:
                    self._ask_handles(calls)
                for place in self._order_of_waits(calls):
                    call = calls[place]
                    call.is_waited_for = True
                    call.wait()
                for call in calls:
                    if call.handle:
                        call.handle.follow()
            except Exception as error:
                # If ranks run freely, an error ends the run, as any other error of the subject.
                # So does that of a collective which the kit has let fail.
                if not is_first or self.failing.has_failed:
                    raise
                reason = f"{type(error).__name__}: {error}"[:300]
                for call in calls:
                    call.refused = "not asked" if isinstance(error, _NotCalled) else reason
                    call.goes_on_alone = isinstance(error, _GoesOnAlone)
                if self.rank == 0:
                    # The backend may have refused what peers have to give it, too.
                    if operation_of(calls[0].form) and not self.collectives.take_sent():
                        self.signals.set(f"{key}/without collectives", "1")
                    self.signals.set(key, "1")
            self.collectives.before_each = None
            for call in calls:
                call.keep()

    def _ask_handles(self, calls: list[CollectiveCall]) -> None:
        """Ask calls whether they are complete, before any wait().

        They are asked at once; and, in the step of ``AT_REST``, when all collectives that they have
        issued are over. In that of ``FUTURE_FIRST`` their futures are waited for, in the order of
        waits.
        """
        kind = self.scenario.steps[calls[0].step]
        for call in calls:
            call.handle = Handle(call.returned, call.bits)
            call.handle.attach()
            call.handle.look("when the call has returned")
        if kind == AT_REST:
            self.let_peers_in()
            self.collectives.drain()
        for place in self._order_of_waits(calls):
            call = calls[place]
            assert call.handle
            if kind == AT_REST:
                call.handle.look("when its collectives are over")
            if kind == FUTURE_FIRST:
                call.is_waited_for = True
                call.handle.follow()

    def _order_of_waits(self, calls: list[CollectiveCall]) -> list[int]:
        if len(calls) == 1:
            return [0]
        world = dist.get_world_size()
        indices = [call.index for call in calls]
        return messages.order_of_waits(
            self.scenario, world, dist.get_rank(), calls[0].step, indices
        )


class _NotCalled(Exception):
    """A rank has left out a call."""


class _GoesOnAlone(Exception):
    """A rank issues a collective in a call that rank 0 has refused: it would wait for rank 0."""


def _stop() -> None:
    raise _GoesOnAlone("rank 0 has refused the call")


def _understood(target: Factory) -> Factory:
    """Return the target with enum members and functions in place of their names.

    If the target is the collective itself, the factory returns it.
    """
    if not target.kwargs and _takes_tensors(target.function):
        return Factory(lambda: target.function, {})
    arguments = _with_function(target.kwargs)
    return Factory(target.function, with_enum_members(target.function, arguments, ("qtype",)))


def _takes_tensors(function: Any) -> bool:
    """Whether a function has the arguments of a collective, not of a factory of collectives.

    A collective takes tensors, without a default, or any positional arguments.
    """
    if inspect.isclass(function):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return True
        is_positional = parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        is_required = is_positional and parameter.default is parameter.empty
        if is_required and parameter.name not in (*CONTEXT_NAMES, "group"):
            return True
    return False


def _with_function(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with torch.distributed's function for its name: ``func=all_gather``."""
    name = arguments.get("func")
    if not isinstance(name, str):
        return arguments
    if name not in COLLECTIVES:
        raise TargetError(f"func={name}: one of {', '.join(COLLECTIVES)}")
    return {**arguments, "func": getattr(dist, name)}
