"""One call of a quantized collective: its inputs, and the arrivals."""

import itertools
import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks.drivers._buffers import Buffers
from conformance.ranks.drivers._handles import Handle
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.digest import digest
from conformance.scenarios import collective_memory as memory
from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective import (
    IN_INPUTS,
    IN_OUTPUTS,
    ONE_INPUT,
    ONE_OUTPUT,
    OPERATIONS,
    STACK,
    SUMMING,
    operation_of,
)
from conformance.scenarios.collective_training import OF_LARGE, OF_VIEWS
from conformance.scenarios.failing_collectives import FUTURE_FAILS
from conformance.scenarios.gradients import lay_out

# The inputs and outputs of earlier calls, by their shapes.
TensorsOfCalls = dict[
    tuple[tuple[torch.Size, ...], ...], tuple[list[torch.Tensor], list[torch.Tensor]]
]


class CollectiveCall:
    """One call: its inputs and the arrivals.

    Args:
        driver: of the rank.
        step, index: of the call.
        tensors_of_calls: those of a long run, in which calls use the tensors of earlier ones.

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
        waits_in_thread: whether the wait() is in another thread, as in hooks of a backward.
        has_grad_mode: whether grad mode is on in the call and in its wait(); None for the mode that
            the rank is in.
        use_of_lists: what happens to the lists that were handed in, if the call is asynchronous,
            before the wait(); '' for nothing. An entry that the call replaces is not seen then.
        handle: the object that the call has returned, if it is asked about the call.
    """

    def __init__(
        self, driver: RankDriver, step: int, index: int, tensors_of_calls: TensorsOfCalls
    ) -> None:
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
        self.fill: complex = math.nan if dtype.is_floating_point else -7
        if dtype.is_complex:
            self.fill = complex(math.nan, math.nan)
        sent = list(messages.sent(scenario, size, place, step, index))
        received = list(messages.received(scenario, size, place, step, index))
        self.inputs = [
            lay_out(messages.message(scenario, size, step, index, *pair).clone(), spec.layout).to(
                driver.device
            )
            for pair in sent
        ]
        collective = scenario.options[0]
        shapes = [messages.shape_of(scenario, size, step, index, *pairs[0]) for pairs in received]
        self.rows = [
            [shape[0] for shape in shapes if shape],
            [tensor.shape[0] for tensor in self.inputs if tensor.shape],
        ]
        if collective in ONE_INPUT:
            join = torch.stack if self.form == STACK else torch.cat
            self.inputs = [lay_out(join(self.inputs), spec.layout)]
        if collective in ONE_OUTPUT:
            is_stack = self.form == STACK
            shapes = [(size, *shapes[0]) if is_stack else (sum(self.rows[0]), *shapes[0][1:])]
        layout = spec.output_layout or spec.layout
        self.outputs = [
            lay_out(torch.full(shape, self.fill, dtype=dtype, device=driver.device), layout)
            for shape in shapes
        ]
        if collective == "all_reduce":
            # Its input is its output.
            self.outputs = [lay_out(tensor, layout) for tensor in self.inputs]
            self.inputs = []
        self._is_in_output = False
        if scenario.variant == "long":
            self._take_tensors_again(tensors_of_calls)
            if collective in IN_OUTPUTS and step % 3 == 1:
                self._share_memory_of_output()
        self.buffers: Buffers | None = None
        self.is_in_input = False
        in_buffer = ""
        if scenario.variant in (OF_VIEWS, OF_LARGE):
            in_buffer = memory.place_in_buffer(scenario, step, index)
        if in_buffer:
            draw = random.Random(f"{scenario.session_seed}/views/{driver.rank}/{step}/{index}")
            inputs = Buffers(self.inputs, draw, in_buffer)
            self.inputs = inputs.views
            self.buffers = Buffers(self.outputs, draw, in_buffer)
            self.outputs = list(self.buffers.views)
            if memory.is_in_place(scenario, step, index):
                self._share_memory(collective, inputs)
        self.handed = list(self.outputs)
        self.before = self._bits_of_inputs()
        self._bits_of_outputs: list[str] = []
        self.positional, self.named = self._arguments()
        self.returned: Any = None
        self.handle: Handle | None = None
        self.refused = ""
        self.goes_on_alone = False
        self.is_asynchronous = messages.is_asynchronous(scenario, step, index)
        self.is_waited_for = False
        self.waits_in_thread = False
        self.has_grad_mode: bool | None = None
        self.use_of_lists = messages.use_of_lists(scenario, step, index)

    def _take_tensors_again(self, of_calls: TensorsOfCalls) -> None:
        """Use the tensors of an earlier call of the same shapes, with this call's values in them.

        A training loop has its gradients in the same tensors in every step. They are written by
        operations that autograd sees in some calls, and through ``.data`` in others. Each fourth
        call has new tensors.
        """
        if self.step % 4 == 0:
            return
        new = (self.inputs, self.outputs)
        shapes = tuple(tuple(tensor.shape for tensor in tensors) for tensors in new)
        self.inputs, self.outputs = kept = of_calls.setdefault(shapes, new)
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
        self._is_in_output = True

    def _bits_of_inputs(self) -> list[str]:
        """Return the bits of the inputs; '' for memory that is an output, too."""
        if self._is_in_output:
            return [""]
        if not self.is_in_input:
            return [_bits(tensor) for tensor in self.inputs]
        is_one = self.driver.scenario.options[0] in ONE_INPUT
        parts = list(self.inputs[0].chunk(self.size)) if is_one else self.inputs
        bits = ["" if at == self.place else _bits(part) for at, part in enumerate(parts)]
        return [" ".join(bits)] if is_one else bits

    def _own_part(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of a list, or of its only tensor."""
        if self.driver.scenario.options[0].endswith("_tensor"):
            return tensors[0].chunk(self.size)[self.place]
        return tensors[self.place]

    def begin(self) -> None:
        """Call the collective, as users do.

        They may use their lists again before the wait(), since torch copies them in the call.
        """
        positional = self.positional
        named = self.named
        lists: list[list[Any]] = []
        options = {}
        if self.is_asynchronous:
            options["async_op"] = True
            if self.use_of_lists:
                positional = [_copied(one, lists) for one in positional]
                named = {name: _copied(one, lists) for name, one in named.items()}
        with self._grad_mode():
            self.returned = self.function(*positional, **named, **options)
        for one in lists:
            _use_again(one, self.use_of_lists)

    def _grad_mode(self) -> AbstractContextManager[object]:
        if self.has_grad_mode is None:
            return nullcontext()
        return torch.set_grad_enabled(self.has_grad_mode)

    def leave_group(self) -> None:
        """Put the value of a rank outside of the group in place of the group."""
        outside = dist.GroupMember.NON_GROUP_MEMBER
        group = self.group
        self.use_of_lists = ""
        self.positional = [outside if one is group else one for one in self.positional]
        self.named = {name: outside if one is group else one for name, one in self.named.items()}
        self._bits_of_outputs = [digest(tensor) for tensor in self.outputs]

    def changed(self) -> list[str]:
        """Return the tensors that a call of a rank outside of the group has changed.

        A list entry may be another tensor with the same bits.
        """
        pairs = (
            ("output", self.outputs, self._bits_of_outputs),
            ("output", self.handed, self._bits_of_outputs),
        )
        found = [f"input {k}" for k in self._changed_inputs()]
        found += [
            f"{name} {k}"
            for name, tensors, bits in pairs
            for k, (tensor, before) in enumerate(zip(tensors, bits, strict=True))
            if _bits(tensor) != before
        ]
        return list(dict.fromkeys(found))

    def wait(self) -> None:
        """Wait for the collective, if it is asynchronous."""
        if not self.is_asynchronous or not callable(getattr(self.returned, "wait", None)):
            return
        if self.driver.scenario.name == FUTURE_FAILS and self._wait_for_future():
            return
        if self.waits_in_thread:
            with ThreadPoolExecutor(1) as executor:
                executor.submit(self.returned.wait).result()
        else:
            with self._grad_mode():
                self.returned.wait()

    def _wait_for_future(self) -> bool:
        """Wait for the future of the call; return False if it has none."""
        get_future = getattr(self.returned, "get_future", None)
        try:
            future = get_future() if callable(get_future) else None
        except (NotImplementedError, RuntimeError):
            return False  # torch's Work raises where it has no future
        wait = getattr(future, "wait", None)
        if not callable(wait):
            return False
        wait()
        return True

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
            "inputs_changed": self._changed_inputs(),
            "replaced": [k for k, out in outputs if not _is_same(out, self.handed[k])],
            "dtypes": [_dtype_name(out) for out in self.outputs],
            "sent": self.driver.collectives.take_sent(),
            **self._changed_around(),
        }
        if self.is_asynchronous and self.use_of_lists and self._has_lists():
            fields["use_of_lists"] = self.use_of_lists
        if self.buffers:
            # As the owner of the buffer sees them, whatever the views hold by now.
            self.outputs = self._in_buffer(self.buffers)
        parts = [out for out in self.outputs if isinstance(out, torch.Tensor)]
        if self.driver.scenario.options[0] in ONE_OUTPUT:
            whole = parts[0]
            parts = list(whole if self.form == STACK else whole.split(self.rows[0]))
        for k, part in enumerate(parts):
            self.driver.keep(f"arrived/p{self.index}/{k}", lay_out(part, "contiguous"))
        if self.handle and not self.refused:
            # Last, since an answer may change the outputs.
            fields |= self._said(self.handle)
        self.driver.recorder.event("called", **fields)

    def _changed_inputs(self) -> list[int]:
        pairs = zip(self._bits_of_inputs(), self.before, strict=False)
        return [k for k, (bits, before) in enumerate(pairs) if bits != before]

    def _has_lists(self) -> bool:
        return any(isinstance(one, list) for one in (*self.positional, *self.named.values()))

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


def _copied(argument: Any, lists: list[list[Any]]) -> Any:
    """Return an argument, or the copy of a list, which is added to ``lists``."""
    if not isinstance(argument, list):
        return argument
    lists.append([*argument])
    return lists[-1]


def _use_again(entries: list[Any], use: str) -> None:
    """Use a list of tensors or of numbers as users do, before they wait for the call."""
    if use == messages.CLEARED:
        entries.clear()
    elif use == messages.REVERSED:
        entries.reverse()
    else:
        entries[:] = [
            torch.zeros_like(one) if isinstance(one, torch.Tensor) else 0 for one in entries
        ]


def _group_of(driver: RankDriver, kind: str) -> dist.ProcessGroup:
    if kind == messages.WORLD:
        world = dist.group.WORLD
        assert world is not None
        return world
    return driver.twin_group if kind == messages.TWIN else driver.group


def _is_same(out: Any, handed: torch.Tensor) -> bool:
    """Whether a tensor that was handed in holds the value that its list entry holds now."""
    if out is handed:
        return True
    is_tensor = isinstance(out, torch.Tensor)
    return is_tensor and out.dtype == handed.dtype and digest(out) == digest(handed)


def _bits(tensor: Any) -> str:
    """Return the bits of a tensor, or the name of another type that a subject has put in place."""
    return digest(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__


def _dtype_name(out: Any) -> str:
    return str(getattr(out, "dtype", type(out).__name__)).removeprefix("torch.")
