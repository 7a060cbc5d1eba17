"""The observer that stands between DDP and a hook, and records buckets, futures and results.

It hands DDP exactly the object that the hook returned, with one exception: an object that is not a
future never reaches DDP, which would take the process down (torch 2.13 segfaults on None).
"""

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks.instruments.digest import digest, sampled_checksum
from conformance.ranks.instruments.faults import Faults
from conformance.ranks.instruments.schedule import Schedule
from conformance.ranks.instruments.stream_delays import Streams
from conformance.ranks.instruments.subject_calls import SubjectCalls
from conformance.records.recorder import Recorder
from conformance.torch_versions.private import AnyFuture, another_object

_LOOKED_AT = 16  # gradients outside the bucket, at most, per call


class ContractBreach(Exception):
    """The hook returned an object that DDP cannot take; the breach is already on record."""


class Observer:
    """Wraps one hook on one rank. The rules of section 1 read its events.

    DDP logs the qualified name of the function that :meth:`wrap` returns, and the log is on record.

    Args:
        recorder: receives the events.
        calls: the calls into the subject.
        parameters: the model's parameters by the name that records use.
        faults: may end the rank, or keep it out of the hook.
        schedule: holds this rank until its turn, and lets the peers in.
        streams: delays kernels around the hook, on CUDA.
        other_gradients: compare the gradients outside the bucket before and after each call, but
            for those that an earlier call may still write.
        are_views: gradients are views of the buckets.
        is_quiet: keep the futures of a step and record nothing, since a thousand steps of events
            would take longer than the steps.

    Attributes:
        is_quiet: as above; it may change between steps.
        before_last: called before the step's last call of the hook.
    """

    def __init__(
        self,
        recorder: Recorder,
        calls: SubjectCalls,
        parameters: dict[str, torch.nn.Parameter],
        faults: Faults,
        schedule: Schedule,
        streams: Streams | None,
        other_gradients: bool = False,
        are_views: bool = False,
        *,
        is_quiet: bool = False,
    ) -> None:
        self.is_quiet = is_quiet
        self._recorder = recorder
        self._calls = calls
        self._names = {id(p): name for name, p in parameters.items()}
        self._parameters = parameters
        self._faults = faults
        self._schedule = schedule
        self._streams = streams
        self._other_gradients = other_gradients
        self._are_views = are_views
        # The parameters of earlier calls of this step, each with its future. One whose callback
        # the schedule holds is the hook's own object, which the schedule keeps as well.
        self._in_flight: dict[str, Any] = {}
        # Of each future another Python object than the hook's own. DDP takes the C++ future and
        # drops the Python object at once, with everything that the hook has attached to it. A hook
        # may rely on such an attribute to keep a ``Work`` alive: it hangs in training, and would
        # not hang here if the observer kept the object.
        self._futures: list[tuple[dict[str, Any], Any, Any]] = []
        self.before_last: Callable[[], None] = _do_nothing

    def look_anew(self, *, are_views: bool) -> None:
        """Take the parameters of a DDP that is made anew, whose names may be others."""
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._are_views = are_views

    def wrap(self, hook: Any) -> Callable[[Any, dist.GradBucket], Any]:
        """Return the hook to register instead of ``hook``."""

        def observed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            if self.is_quiet:
                return self._call_quietly(hook, state, bucket)
            return self._call(hook, state, bucket)

        return observed

    def wrap_of_twin(self, hook: Any) -> Callable[[Any, dist.GradBucket], Any]:
        """Return the hook to register on a twin that shares a backward with the model.

        Nothing is recorded. The schedule holds its callbacks as it holds those of the model.
        """

        def inside(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            result: torch.futures.Future[torch.Tensor] = self._call_inside(hook, state, bucket)
            return result

        return inside

    def _call_inside(self, hook: Any, state: Any, bucket: dist.GradBucket) -> Any:
        self._calls.enter(bucket.buffer().device)
        try:
            return hook(state, bucket)
        finally:
            self._calls.leave()

    def _call_quietly(self, hook: Any, state: Any, bucket: dist.GradBucket) -> Any:
        self._calls.begin()
        buffer = bucket.buffer()
        result = self._call_inside(hook, state, bucket)
        _require_future(result)
        names = [self._names.get(id(parameter), "?") for parameter in bucket.parameters()]
        self._futures.append(({"parameters": names}, result, buffer))
        return result

    def _call(self, hook: Any, state: Any, bucket: dist.GradBucket) -> Any:
        number = self._calls.begin()
        buffer = bucket.buffer()
        call = self._describe_bucket(number, bucket, buffer)
        self._recorder.event("call", **call)
        if call["is_last"]:
            self.before_last()
        self._before_hook(number)
        inside = call["parameters"]
        outside = self._names_outside(number, inside) if self._other_gradients else []
        before = self._gradients_of(outside)
        held = [name for name in outside if self._is_held(name)]
        written = []
        try:
            result = self._call_inside(hook, state, bucket)
            # Before the schedule lets callbacks run.
            written = self._written(before, outside, held)
        # SystemExit and KeyboardInterrupt of a hook are on record too.
        except BaseException as error:
            self._recorder.event(
                "raised",
                call=number,
                type=type(error).__name__,
                message=str(error)[:2000],
                traceback=traceback.format_exc()[-4000:],
            )
            raise
        finally:
            self._after_hook(number, call["is_last"])
        self._record_returned(number, result, buffer.device)
        if self._other_gradients:
            self._in_flight.update(dict.fromkeys(inside, self._kept_future(result)))
            self._recorder.event("outside", call=number, written=written)
        # Only now: the breach is on record before DDP sees the error.
        _require_future(result)
        self._futures.append((call, another_object(result), buffer))
        return result

    def _before_hook(self, number: int) -> None:
        # A rank that dies or stays silent does so before it takes its turn, and without delays.
        self._faults.before_hook()
        self._schedule.enter(number)
        if self._streams:
            self._streams.before_hook()

    def _after_hook(self, number: int, is_last: bool) -> None:
        if self._streams:
            self._streams.after_hook()
        self._schedule.left(number, is_last)

    def _record_returned(self, number: int, result: Any, device: torch.device) -> None:
        is_future = isinstance(result, AnyFuture)
        done = bool(is_future and result.done())
        # To read a result on another device would be a wait for that device.
        is_read = done and device.type == "cpu"
        self._recorder.event(
            "returned",
            call=number,
            type=_type_name(result),
            is_future=is_future,
            done=done,
            digest=_value_digest(result) if is_read else None,
        )

    def after_backward(self) -> None:
        """Record the value of each future of this step, after DDP has read it."""
        for call, future, buffer in self._futures:
            value = _describe_value(future, buffer)
            self._recorder.event("value", call=call["call"], index=call["index"], **value)

    def result_of(self, name: str) -> torch.Tensor | None:
        """Return the part of this step's results that is a parameter's gradient, in its shape."""
        for call, future, _ in self._futures:
            if name not in call["parameters"] or not future.done():
                continue
            # A value that does not fit the bucket has no such part.
            with contextlib.suppress(Exception):
                members = [self._parameters[other] for other in call["parameters"]]
                flat = future.value()
                if flat.is_sparse:
                    return flat
                if members[0].is_complex():
                    flat = torch.view_as_complex(flat.view(-1, 2))
                index = call["parameters"].index(name)
                part = flat.split([member.numel() for member in members])[index]
                size = members[index].size()
                return part.as_strided(size, members[index].stride(), part.storage_offset())
        return None

    def buckets(self) -> dict[int, list[str]]:
        """Return the names of the parameters in each bucket of this step, by its index."""
        return {call["index"]: call["parameters"] for call, _, _ in self._futures}

    def forget_futures(self) -> None:
        """Forget the step's futures, whose values cannot be read."""
        self._futures.clear()

    def at_rest(self) -> None:
        """Record the values again once no collective is in flight; then forget the futures."""
        for call, future, _ in self._futures:
            self._recorder.event(
                "rest", call=call["call"], index=call["index"], digest=_value_digest(future)
            )
        self._futures.clear()
        self._in_flight.clear()

    def _describe_bucket(
        self, number: int, bucket: dist.GradBucket, buffer: torch.Tensor
    ) -> dict[str, Any]:
        parameters = bucket.parameters()
        views = []
        if buffer.layout == torch.strided:
            views = [[g.storage_offset(), g.numel()] for g in bucket.gradients()]
        return {
            "call": number,
            "index": int(bucket.index()),
            "is_last": bool(bucket.is_last()),
            "numel": buffer.numel(),
            "dtype": str(buffer.dtype).removeprefix("torch."),
            "parameters": [self._names.get(id(p), "?") for p in parameters],
            "gradient_views": views,
        }

    def _names_outside(self, number: int, inside: list[str]) -> list[str]:
        """Return parameters outside the bucket whose gradients nobody may write now.

        A model of many parameters has many buckets: then each call looks at some of the gradients,
        and the next call at others.
        """
        outside = [name for name in self._parameters if name not in inside]
        apart = -(-len(outside) // _LOOKED_AT)
        chosen = outside[number % apart :: apart] if apart else []
        return [name for name in chosen if not self._may_be_written(name)]

    def _gradients_of(self, names: list[str]) -> dict[str, str]:
        """Return a checksum of each gradient, by parameter name.

        Sparse gradients are left out once their buckets are in flight: they are the buckets' own
        memory.
        """
        grads = {name: self._parameters[name].grad for name in names}
        return {
            name: sampled_checksum(grad)
            for name, grad in grads.items()
            if grad is not None and (grad.layout == torch.strided or name not in self._in_flight)
        }

    def _written(self, before: dict[str, str], names: list[str], held: list[str]) -> list[str]:
        """Return the parameters whose gradients a call has changed or made.

        Args:
            before: the checksums before the call.
            names: the parameters to look at.
            held: those whose callbacks the schedule held then; the call may have let them run.
        """
        after = self._gradients_of(names)
        changed = [name for name, bits in after.items() if before.get(name) != bits]
        return [name for name in changed if name not in held or self._is_held(name)]

    def _may_be_written(self, name: str) -> bool:
        """Whether an earlier call, or its collective, may write a gradient meanwhile.

        A collective may if gradients are views of the buckets. So may a callback of the call's
        future: that of a hook which sets the .grad of its bucket and then steps an optimizer. DDP
        writes these gradients after it. A callback that the schedule holds does not run.
        """
        if name not in self._in_flight:
            return False
        future = self._in_flight[name]
        is_done = future is None or future.done() or self._schedule.holds(future)
        return self._are_views or not is_done

    def _is_held(self, name: str) -> bool:
        return name in self._in_flight and self._schedule.holds(self._in_flight[name])

    def _kept_future(self, result: Any) -> Any:
        """Return what to keep of a call's result to see whether it is done."""
        if not isinstance(result, AnyFuture):
            return None
        return result if self._schedule.holds(result) else another_object(result)


def _require_future(result: Any) -> None:
    """Raise ContractBreach unless DDP can take the object that a hook has returned."""
    if not isinstance(result, AnyFuture):
        returned = _type_name(result)
        raise ContractBreach(f"the hook returned {returned}, not a torch.futures.Future")


def _do_nothing() -> None:
    """Let the last call begin at once."""


def _describe_value(future: Any, buffer: torch.Tensor) -> dict[str, Any]:
    """Describe the value of a completed future, beside the bucket that it answers."""
    if not future.done():
        return {"state": "never completed"}
    try:
        value = future.value()
    except Exception as error:
        return {"state": "error", "type": type(error).__name__, "message": str(error)[:2000]}
    if isinstance(value, BaseException):
        # set_exception() leaves it to the hook's own Future object to raise the error.
        return {"state": "error", "type": type(value).__name__, "message": str(value)[:2000]}
    if not isinstance(value, torch.Tensor):
        return {"state": "value", "type": _type_name(value), "tensor": False}
    is_dense = value.layout == torch.strided
    return {
        "state": "value",
        "tensor": True,
        "type": _type_name(value),
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
        "layout": str(value.layout).removeprefix("torch."),
        "shape": list(value.shape),
        "bucket_shape": list(buffer.shape),
        "bucket_layout": str(buffer.layout).removeprefix("torch."),
        "bucket_device": str(buffer.device),
        "contiguous": value.is_contiguous() if is_dense else True,
        "offset": value.storage_offset() if is_dense else 0,
        "memory": _memory_of(value) if is_dense else None,
        "digest": digest(value) if _is_readable(value) else None,
    }


def _memory_of(value: torch.Tensor) -> list[int]:
    """Return the address of a tensor's first element and its number of bytes."""
    item = value.element_size()
    start = value.untyped_storage().data_ptr() + value.storage_offset() * item
    return [start, value.numel() * item]


def _value_digest(future: Any) -> str | None:
    try:
        value = future.value()
    except Exception:
        return None
    return digest(value) if isinstance(value, torch.Tensor) and _is_readable(value) else None


def _is_readable(value: torch.Tensor) -> bool:
    return value.layout == torch.strided and value.device.type != "meta"


def _type_name(value: Any) -> str:
    kind = type(value)
    is_builtin = kind.__module__ == "builtins"
    name = kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, (list, tuple)) and value:
        return f"{name} of {len(value)} {_type_name(value[0])}"
    return name
