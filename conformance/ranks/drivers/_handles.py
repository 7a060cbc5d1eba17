"""What an asynchronous call says of itself: ``is_completed()``, a future with callbacks, and
``result()``, ``exception()``, ``is_success()`` and ``synchronize()`` after ``wait()``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

Bits = list[str]


class Handle:
    """The object that a call with ``async_op=True`` has returned.

    A handle may lack any of these methods, or raise an error in them: nothing is asked of it then.

    Args:
        returned: the object.
        bits: returns the bits of the call's outputs as they are now.

    Attributes:
        seen: the bits of the outputs at each moment at which the call was complete, as it said.
    """

    def __init__(self, returned: Any, bits: Callable[[], Bits]) -> None:
        self._returned = returned
        self._bits = bits
        self._future: Any = None
        self._called_back: Any = None
        self.seen: list[tuple[str, Bits]] = []

    def look(self, moment: str) -> None:
        """Ask whether the call is complete."""
        if self._is_completed():
            self.seen.append((f"is_completed() is true {moment}", self._bits()))

    def attach(self) -> None:
        """Attach a callback to the future."""

        def called_back(_: Any) -> None:
            self.seen.append(("a callback of get_future() runs", self._bits()))

        self._future = self._answer("get_future")
        if self._future is not None:
            self._called_back = self._future.then(called_back)

    def follow(self) -> None:
        """Wait for the future and the callback, if there is a future."""
        if self._future is not None:
            self._future.wait()
            self.seen.append(("get_future() is complete", self._bits()))
            self._called_back.wait()

    def early(self) -> list[str]:
        """Return the moments at which outputs were other than they are now."""
        now = self._bits()
        return [moment for moment, bits in self.seen if bits != now]

    def is_late(self) -> bool:
        """Whether the call is not complete, as it says, although ``wait()`` has returned."""
        return self._is_completed() is False

    def value_differs(self, outputs: list[Any]) -> bool:
        """Whether the future holds other tensors than the outputs; it may hold none."""
        return self._future is not None and _differs(self._future.value(), outputs)

    def untrue(self, outputs: list[Any]) -> list[str]:
        """Return the answers that are wrong of a call that has ended well: ``wait()`` returned.

        torch's Gloo cannot tell whether a call is complete by ``synchronize()``, which returns at
        once on CPU. So it is called here, where it has nothing left to do.
        """
        untrue = []
        if _differs(self._answer("result"), outputs):
            untrue.append("result() gives other tensors than the outputs")
        if self._answer("exception") is not None:
            untrue.append("exception() gives an error")
        success = self._answer("is_success")
        if success is not None and not success:
            untrue.append("is_success() is false")
        before = self._bits()
        self._answer("synchronize")
        if self._bits() != before:
            untrue.append("synchronize() changes the outputs")
        return untrue

    def _is_completed(self) -> bool | None:
        answer = self._answer("is_completed")
        return None if answer is None else bool(answer)

    def _answer(self, name: str) -> Any:
        """Return the result of a method; None if there is no such method, or it raises."""
        try:
            return getattr(self._returned, name)()
        except Exception:
            return None


def _differs(value: Any, outputs: list[Any]) -> bool:
    """Whether a value holds other tensors than the outputs; it may hold none."""
    held = [tensor.reshape(-1) for tensor in _tensors(value)]
    wanted = [tensor.reshape(-1) for tensor in _tensors(outputs)]
    return bool(held) and not (
        sum(map(len, held)) == sum(map(len, wanted))
        and torch.cat(held).dtype == torch.cat(wanted).dtype
        and torch.equal(torch.cat(held), torch.cat(wanted))
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
