"""The driver of quantized collectives: sends messages through them, and records the arrivals."""

import inspect
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from conformance.errors import TargetError
from conformance.ranks.drivers._buffers import Buffers
from conformance.ranks.drivers._handles import Handle
from conformance.ranks.drivers.base import KIT, RankDriver
from conformance.ranks.enum_arguments import with_enum_members
from conformance.ranks.instruments.digest import digest
from conformance.ranks.resolve import Factory
from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective import (
    AT_REST,
    COLLECTIVES,
    FUTURE_FIRST,
    HANDLES,
    IN_INPUTS,
    IN_OUTPUTS,
    ONE_INPUT,
    ONE_OUTPUT,
    OPERATIONS,
    SUBGROUPS,
    SUMMING,
    operation_of,
)
from conformance.scenarios.gradients import lay_out
from conformance.subjects.spec import CONTEXT_NAMES

Shapes = tuple[tuple[torch.Size, ...], ...]


class CollectiveDriver(RankDriver):
    """One rank that calls a quantized collective.

    Attributes:
        tensors_of_calls: inputs and outputs that several calls of a long run have, by their shapes.
    """

    def run(self) -> None:
        """Make the scenario's calls."""
        self._functions: dict[tuple[int, int], Callable[..., Any]] = {}
        self.tensors_of_calls: dict[Shapes, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._refuses_async = False
        self._has_waited = False
        if self.scenario.variant == "after_world":
            self._call_on_world()
        for step, kind in enumerate(self.scenario.steps):
            self.begin_step(step, kind)
            self._step(step)
        if self.scenario.name == SUBGROUPS.name:
            self._call_outside(len(self.scenario.steps))

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
            call = _Call(self, 0, index)
            call.is_asynchronous = is_asynchronous
            if "feedback" in self.scenario.options:
                call.function = self._make_collective()
            else:
                self._prepare(0, [call])
            call.leave_group()
            raised = ""
            with self.inside(self.scenario.options[0]):
                try:
                    call.begin()
                    call.wait()
                except Exception as error:
                    raised = f"{type(error).__name__}: {error}"[:300]
            self.collectives.take_sent()
            self.recorder.event("outside", index=index, raised=raised, changed=call.changed())

    def _enter_world(self) -> None:
        self.group = dist.group.WORLD
        self.group_rank, self.size = dist.get_rank(), dist.get_world_size()

    def _call_on_world(self) -> None:
        """Make one call on WORLD, whose arrivals are not judged."""
        own = self.group, self.group_rank, self.size
        self._enter_world()
        self.begin_step(0, self.scenario.steps[0])
        call = _Call(self, 0, 0)
        if "feedback" in self.scenario.options:
            # The error of this call must not be added to the next message.
            call.function = self._make_collective()
        else:
            self._prepare(0, [call])
        with self.inside(self.scenario.options[0]):
            call.begin()
            call.wait()
        self.collectives.take_sent()
        self.group, self.group_rank, self.size = own

    def _step(self, step: int) -> None:
        """Make the calls of one step; nothing of them is kept."""
        calls = [_Call(self, step, index) for index in messages.indices(self.scenario, step)]
        if self.scenario.variant == "long" or self._is_alone_at_last(step):
            for call in calls:
                call.is_asynchronous |= self._is_alone_at_last(step)
                self._call_unless_refused(call)
            return
        if any(call.is_asynchronous for call in calls):
            self._prepare(step, calls)
            self._make_calls(calls)
            return
        for call in calls:
            self._prepare(step, [call])
            self._make_calls([call])

    def _is_alone_at_last(self, step: int) -> bool:
        """Whether this rank is alone in its group, in the last step on groups; its calls have
        async_op=True then.
        """
        is_last = step + 1 == len(self.scenario.steps)
        return self.scenario.name == SUBGROUPS.name and self.size == 1 and is_last

    def _call_unless_refused(self, call: "_Call") -> None:
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

    def _prepare(self, step: int, calls: list["_Call"]) -> None:
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

    def _make_calls(self, calls: list["_Call"]) -> None:
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

    def _ask_handles(self, calls: list["_Call"]) -> None:
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

    def _order_of_waits(self, calls: list["_Call"]) -> list[int]:
        if len(calls) == 1:
            return [0]
        world = dist.get_world_size()
        return messages.order_of_waits(self.scenario, world, dist.get_rank(), calls[0].step)


def _group_of(driver: RankDriver, kind: str) -> dist.ProcessGroup:
    if kind == messages.WORLD:
        world = dist.group.WORLD
        assert world is not None
        return world
    return driver.twin_group if kind == messages.TWIN else driver.group


class _NotCalled(Exception):
    """A rank has left out a call."""


class _GoesOnAlone(Exception):
    """A rank issues a collective in a call that rank 0 has refused: it would wait for rank 0."""


def _stop() -> None:
    raise _GoesOnAlone("rank 0 has refused the call")


class _Call:
    """One call: its inputs and the arrivals.

    Attributes:
        group, size, place: the group, its size, and the rank in it.
        names_group: whether the group is an argument.
        inputs, outputs: the tensors that are handed in; a call may replace outputs in its list.
        buffers: the buffer that holds the outputs.
        is_in_input: whether the output is a part of the inputs.
        rows: for outputs and inputs, the number of rows of each rank's part.
        refused: the error with which the call was refused; '' if it was not.
        goes_on_alone: whether rank 0 alone has refused the call.
        is_asynchronous: whether the call has async_op=True.
        is_waited_for: whether a wait() for the call, or for its future, has begun.
        handle: the object that the call has returned, if it is asked about the call.
    """

    def __init__(self, driver: CollectiveDriver, step: int, index: int) -> None:
        scenario = driver.scenario
        spec = scenario.params[index]
        dtype = getattr(torch, spec.dtype)
        kind_of_group = messages.kind_of_group(scenario, step, index)
        self.group = _group_of(driver, kind_of_group)
        self.names_group = bool(scenario.groups) and kind_of_group != messages.WORLD
        size = dist.get_world_size(self.group)
        place = dist.get_rank(self.group)
        self.size = size
        self.place = place
        self.driver = driver
        self.step = step
        self.index = index
        self.form = messages.form_of(scenario, index)
        self.function: Callable[..., Any] = dist.all_gather
        # Elements that are never written have to show.
        self.fill = math.nan if dtype.is_floating_point else -7
        sent = list(messages.sent(scenario, size, place, step, index))
        received = list(messages.received(scenario, size, place, step, index))
        self.inputs = [
            lay_out(messages.message(scenario, size, step, index, *pair).clone(), spec.layout).to(
                driver.device
            )
            for pair in sent
        ]
        collective = scenario.options[0]
        shapes = [messages.shape_of(scenario, size, index, *pairs[0]) for pairs in received]
        self.rows = [
            [shape[0] for shape in shapes if shape],
            [tensor.shape[0] for tensor in self.inputs if tensor.shape],
        ]
        if collective in ONE_INPUT:
            self.inputs = [lay_out(torch.cat(self.inputs), spec.layout)]
        if collective in ONE_OUTPUT:
            shapes = [(sum(self.rows[0]), *shapes[0][1:])]
        self.outputs = [
            lay_out(torch.full(shape, self.fill, dtype=dtype, device=driver.device), spec.layout)
            for shape in shapes
        ]
        if collective == "all_reduce":
            # Its input is its output.
            self.outputs = self.inputs
            self.inputs = []
        if scenario.variant == "long":
            self._take_tensors_again()
            if collective in IN_OUTPUTS and step % 3 == 1:
                self._share_memory_of_output()
        self.buffers: Buffers | None = None
        self.is_in_input = False
        if scenario.variant == "views":
            draw = random.Random(f"{scenario.session_seed}/views/{driver.rank}/{step}/{index}")
            inputs = Buffers(self.inputs, draw)
            self.inputs = inputs.views
            self.buffers = Buffers(self.outputs, draw)
            self.outputs = list(self.buffers.views)
            if messages.is_in_place(scenario, step, index):
                self._share_memory(collective, inputs)
        self.handed = list(self.outputs)
        self.before = [digest(tensor) for tensor in self.inputs]
        self._bits_of_outputs: list[str] = []
        self.positional, self.named = self._arguments()
        self.returned: Any = None
        self.handle: Handle | None = None
        self.refused = ""
        self.goes_on_alone = False
        self.is_asynchronous = messages.is_asynchronous(scenario, step, index)
        self.is_waited_for = False

    def _take_tensors_again(self) -> None:
        """Use the tensors of an earlier call of the same shapes, with this call's values in them.

        A training loop has its gradients in the same tensors in every step. They are written by
        operations that autograd sees in some calls, and through ``.data`` in others. Each fourth
        call has new tensors.
        """
        if self.step % 4 == 0:
            return
        new = (self.inputs, self.outputs)
        shapes = tuple(tuple(tensor.shape for tensor in tensors) for tensors in new)
        self.inputs, self.outputs = kept = self.driver.tensors_of_calls.setdefault(shapes, new)
        for old, values in zip(itertools.chain(*kept), itertools.chain(*new), strict=True):
            if old is not values:
                (old.data if self.step % 2 else old).copy_(values)
        # A call may replace outputs in its list.
        self.outputs = list(self.outputs)

    def _share_memory(self, collective: str, inputs: Buffers) -> None:
        """Let the input be this rank's part of the outputs, or the output its part of the inputs.

        Args:
            inputs: the buffer of the inputs.
        """
        if collective in IN_OUTPUTS:
            self._share_memory_of_output()
        elif collective in IN_INPUTS and self.inputs:
            self.is_in_input = True
            self.buffers = inputs
            self.outputs = [self._own_part(self.inputs)]

    def _share_memory_of_output(self) -> None:
        """Let the input be this rank's part of the outputs."""
        own = self._own_part(self.outputs)
        own.copy_(self.inputs[0])
        self.inputs = [own]

    def _own_part(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of a list, or of its only tensor."""
        if self.driver.scenario.options[0].endswith("_tensor"):
            return tensors[0].chunk(self.size)[self.place]
        return tensors[self.place]

    def begin(self) -> None:
        """Call the collective, as users do."""
        options = {"async_op": True} if self.is_asynchronous else {}
        self.returned = self.function(*self.positional, **self.named, **options)

    def leave_group(self) -> None:
        """Put the value of a rank outside of the group in place of the group."""
        outside = dist.GroupMember.NON_GROUP_MEMBER
        group = self.group
        self.positional = [outside if one is group else one for one in self.positional]
        self.named = {name: outside if one is group else one for name, one in self.named.items()}
        self._bits_of_outputs = [digest(tensor) for tensor in self.outputs]

    def changed(self) -> list[str]:
        """Return the tensors that a call of a rank outside of the group has changed.

        A list entry may be another tensor with the same bits.
        """
        pairs = (
            ("input", self.inputs, self.before),
            ("output", self.outputs, self._bits_of_outputs),
            ("output", self.handed, self._bits_of_outputs),
        )
        found = [
            f"{name} {k}"
            for name, tensors, bits in pairs
            for k, (tensor, before) in enumerate(zip(tensors, bits, strict=True))
            if not isinstance(tensor, torch.Tensor) or digest(tensor) != before
        ]
        return list(dict.fromkeys(found))

    def wait(self) -> None:
        """Wait for the collective, if it is asynchronous."""
        if self.is_asynchronous and callable(getattr(self.returned, "wait", None)):
            self.returned.wait()

    def bits(self) -> list[str]:
        """Return the bits of the outputs, as they are now."""
        return [digest(out) for out in self.outputs if isinstance(out, torch.Tensor)]

    def keep(self) -> None:
        """Record the outputs as they are now: any later arrival comes too late."""
        outputs = enumerate(self.outputs)
        fields = {
            "index": self.index,
            "refused": self.refused,
            "goes_on_alone": self.goes_on_alone,
            "raised_in_wait": self.is_asynchronous and self.is_waited_for and bool(self.refused),
            "waits": callable(getattr(self.returned, "wait", None)),
            "returned": type(self.returned).__name__,
            "inputs_changed": [
                k for k, tensor in enumerate(self.inputs) if digest(tensor) != self.before[k]
            ],
            "replaced": [k for k, out in outputs if not _is_same(out, self.handed[k])],
            "dtypes": [_dtype_name(out) for out in self.outputs],
            "sent": self.driver.collectives.take_sent(),
            **self._changed_around(),
        }
        if self.buffers:
            # As the owner of the buffer sees them, whatever the views hold by now.
            self.outputs = self._in_buffer(self.buffers)
        parts = [out for out in self.outputs if isinstance(out, torch.Tensor)]
        if self.driver.scenario.options[0] in ONE_OUTPUT:
            parts = list(parts[0].split(self.rows[0]))
        for k, part in enumerate(parts):
            self.driver.keep(f"arrived/p{self.index}/{k}", lay_out(part, "contiguous"))
        if self.handle and not self.refused:
            # Last, since an answer may change the outputs.
            fields |= self._said(self.handle)
        self.driver.recorder.event("called", **fields)

    def _changed_around(self) -> dict[str, Any]:
        """Return how many elements of the buffer have changed beside the outputs."""
        if not self.buffers:
            return {}
        return {"changed_around": self.buffers.changed_around(self._in_buffer(self.buffers))}

    def _in_buffer(self, buffers: Buffers) -> list[torch.Tensor]:
        """Return the outputs as parts of the buffer that they were handed in with."""
        parts = buffers.parts()
        return [self._own_part(parts)] if self.is_in_input else parts

    def _said(self, handle: Handle) -> dict[str, Any]:
        """Return what the handle has said of the call, and whether it was right."""
        return {
            "early": handle.early(),
            "late": handle.is_late(),
            "value_differs": handle.value_differs(self.outputs),
            "untrue": handle.untrue(self.outputs),
        }

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments, all of those of torch.distributed."""
        scenario = self.driver.scenario
        collective = scenario.options[0]
        group = self.group
        ranks = dist.get_process_group_ranks(group)
        source = messages.source_of(scenario, self.size, self.step, self.index)
        tensors = self._tensor_arguments(collective)
        extra: dict[str, Any] = {"src": ranks[source]} if collective == "scatter" else {}
        if self.form.endswith("splits"):
            extra = {"output_split_sizes": self.rows[0], "input_split_sizes": self.rows[1]}
        elif self.form == "group_src":
            extra = {"group_src": source}
        elif collective in SUMMING and self.form:
            operation = OPERATIONS.get(operation_of(self.form), "SUM")
            extra = {"op": getattr(dist.ReduceOp, operation)}
        of_group = {"group": group} if self.names_group else {}
        if self.form == "keywords" or operation_of(self.form):
            return [], {**tensors, **extra, **of_group}
        if self.form.startswith("positional"):
            is_unsplit = collective == "all_to_all_single" and not extra
            unsplit = [None, None] if is_unsplit else []
            return [*tensors.values(), *extra.values(), *unsplit, group], {}
        return [*tensors.values()], {**extra, **of_group}

    def _tensor_arguments(self, collective: str) -> dict[str, Any]:
        """Return the outputs and inputs by the names that torch.distributed gives them."""
        output, given = self.outputs[0], self.inputs[:1]
        if collective == "all_gather":
            return {"tensor_list": self.outputs, "tensor": given[0]}
        if collective == "all_gather_into_tensor":
            return {"output_tensor": output, "input_tensor": given[0]}
        if collective == "all_to_all":
            return {"output_tensor_list": self.outputs, "input_tensor_list": self.inputs or None}
        if collective in ("all_to_all_single", "reduce_scatter_tensor"):
            return {"output": output, "input": given[0]}
        if collective == "reduce_scatter":
            return {"output": output, "input_list": self.inputs}
        if collective == "all_reduce":
            return {"tensor": output}
        # Only the source of a scatter has inputs.
        return {"tensor": output, "scatter_list": self.inputs or None}


def _is_same(out: Any, handed: torch.Tensor) -> bool:
    """Whether a tensor that was handed in holds the value that its list entry holds now."""
    if out is handed:
        return True
    is_tensor = isinstance(out, torch.Tensor)
    return is_tensor and out.dtype == handed.dtype and digest(out) == digest(handed)


def _dtype_name(out: Any) -> str:
    return str(getattr(out, "dtype", type(out).__name__)).removeprefix("torch.")


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
