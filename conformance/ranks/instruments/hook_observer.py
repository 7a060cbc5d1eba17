"""The observer that stands between DDP and a hook, and writes down what passes.

It hands DDP exactly the object that the hook returned, with one exception: an object that is no
future never reaches DDP, which would take the process down (torch 2.13 segfaults on None).
"""

import contextlib
import hashlib
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.ranks.placement import device_module
from conformance.records.recorder import Recorder

# What .then() returns is the C++ class, which torch.futures.Future extends.
AnyFuture = torch._C.Future


class ContractBreach(Exception):
    """The hook returned something that DDP cannot take; already on record."""


class Observer:
    """Wraps one hook on one rank; ``registered`` and ``value`` events are what rules of section 1 read.

    Args:
        recorder: where events go.
        parameters: the model's parameters by the name that records use.
        before: called with the number of the call before the hook is entered.
        after: called when the hook has returned or raised, with the number of the call and whether its bucket was the step's last.
        outside: compare the gradients that are not in the bucket, before and after each call.
    """

    def __init__(
        self,
        recorder: Recorder,
        parameters: dict[str, torch.nn.Parameter],
        before: Callable[[int], None],
        after: Callable[[int, bool], None],
        outside: bool = False,
    ) -> None:
        self._recorder = recorder
        self._names = {id(p): name for name, p in parameters.items()}
        self._parameters = parameters
        self._before, self._after, self._outside = before, after, outside
        self._futures: list[tuple[dict[str, Any], Any, Any]] = []
        self._stream: Any = None
        self.calls = 0
        self.inside: int | None = None  # the thread that is inside the hook

    def wrap(self, hook: Any) -> Callable[[Any, dist.GradBucket], Any]:
        """Return the hook to register instead of ``hook``."""

        def observed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            return self._call(hook, state, bucket)

        return observed

    def _call(self, hook: Any, state: Any, bucket: dist.GradBucket) -> Any:
        number, self.calls = self.calls, self.calls + 1
        buffer = bucket.buffer()
        call = self._describe_bucket(number, bucket, buffer)
        self._recorder.event("call", **call)
        self._before(number)
        others = self._gradients_outside(call["parameters"]) if self._outside else {}
        self.inside, self._stream = threading.get_ident(), _current_stream(buffer.device)
        try:
            result = hook(state, bucket)
        except BaseException as error:
            self._recorder.event(
                "raised", call=number, type=type(error).__name__, message=str(error)[:2000], traceback=traceback.format_exc()[-4000:]
            )
            raise
        finally:
            self.inside = None
            self._after(number, call["is_last"])
        is_future = isinstance(result, AnyFuture)
        done = bool(is_future and result.done())
        self._recorder.event(
            "returned",
            call=number,
            type=_type_name(result),
            is_future=is_future,
            done=done,
            digest=_value_digest(result) if done and buffer.device.type == "cpu" else None,  # to read another is to wait for it
        )
        if self._outside:
            after = self._gradients_outside(call["parameters"])
            self._recorder.event("outside", call=number, written=[name for name, digest in after.items() if others.get(name) != digest])
        if not is_future:
            raise ContractBreach(f"the hook returned {_type_name(result)}, not a torch.futures.Future")
        self._futures.append((call, result, buffer))
        return result

    def after_backward(self) -> None:
        """Write down what each future of this step holds, now that DDP has read it."""
        for call, future, buffer in self._futures:
            self._recorder.event("value", call=call["call"], index=call["index"], **_describe_value(future, buffer))

    def result_of(self, name: str) -> torch.Tensor | None:
        """Return the part of this step's results that is the gradient of a parameter, in its shape."""
        for call, future, _ in self._futures:
            if name in call["parameters"] and future.done():
                with contextlib.suppress(Exception):
                    members = [self._parameters[other] for other in call["parameters"]]
                    flat = future.value()
                    if flat.is_sparse:
                        return flat
                    flat = torch.view_as_complex(flat.view(-1, 2)) if members[0].is_complex() else flat
                    at = call["parameters"].index(name)
                    part = flat.split([member.numel() for member in members])[at]
                    return part.as_strided(members[at].size(), members[at].stride(), part.storage_offset())
        return None

    def on_another_stream(self) -> bool:
        """Whether the caller, inside the hook, is on another stream than backward: to wait there keeps nobody waiting."""
        return self._stream is not None and _current_stream(self._stream.device) != self._stream

    def let_go(self) -> None:
        """Forget the step's futures, of which nothing can be read."""
        self._futures.clear()

    def at_rest(self) -> None:
        """Write down the values again, when no collective is in flight any more; then let go of the step."""
        for call, future, _ in self._futures:
            self._recorder.event("rest", call=call["call"], index=call["index"], digest=_value_digest(future))
        self._futures.clear()

    def _describe_bucket(self, number: int, bucket: dist.GradBucket, buffer: torch.Tensor) -> dict[str, Any]:
        parameters, views = bucket.parameters(), []
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

    def _gradients_outside(self, inside: list[str]) -> dict[str, str]:
        return {
            name: digest(p.grad) for name, p in self._parameters.items() if name not in inside and p.grad is not None and p.numel() < 4096
        }


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of the bits of a tensor's elements."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return digest(tensor.indices()) + digest(tensor.values())
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.blake2b(flat.numpy(), digest_size=8).hexdigest()


def _current_stream(device: torch.device) -> Any:
    current = getattr(device_module(device), "current_stream", None)
    return current() if current else None


def line_of_subject() -> str:
    """Return the innermost line of code that is neither torch's nor the kit's; nor that of a warning which is being shown."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), warnings.__file__)
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "somewhere"


def _describe_value(future: Any, buffer: torch.Tensor) -> dict[str, Any]:
    """Describe what a completed future holds, beside the bucket it answers."""
    if not future.done():
        return {"state": "never completed"}
    try:
        value = future.value()
    except Exception as error:
        return {"state": "error", "type": type(error).__name__, "message": str(error)[:2000]}
    if not isinstance(value, torch.Tensor):
        return {"state": "value", "type": _type_name(value), "tensor": False}
    dense = value.layout == torch.strided
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
        "contiguous": value.is_contiguous() if dense else True,
        "offset": value.storage_offset() if dense else 0,
        "memory": [value.untyped_storage().data_ptr() + value.storage_offset() * value.element_size(), value.numel() * value.element_size()]
        if dense
        else None,
        "digest": digest(value) if _is_readable(value) else None,
    }


def _value_digest(future: Any) -> str | None:
    try:
        value = future.value()
    except Exception:
        return None
    return digest(value) if isinstance(value, torch.Tensor) and _is_readable(value) else None


def _is_readable(value: torch.Tensor) -> bool:
    return value.layout == torch.strided and value.device.type != "meta"


def _type_name(value: Any) -> str:
    name = type(value).__qualname__ if type(value).__module__ == "builtins" else f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (list, tuple)) and value:
        return f"{name} of {len(value)} {_type_name(value[0])}"
    return name
