"""The common base of hook states: a group, a step count, and memory that belongs to parameters.

Memory belongs to parameters, never to bucket slots: DDP regroups its buckets after the first step,
and a new process starts from the first grouping again. A parameter's key is its place counted from
the end of the model (1 is the last). Any process can derive the keys from the buckets of its first
step, because DDP fills bucket 0 from the end of the model, and keeps the model's order inside a
bucket.

A state is saved with ``torch.save(state)`` and loaded with ``torch.load(..., weights_only=True)``
by any process that has imported this package, or through ``state_dict`` and ``load_state_dict``.
Process groups are not saved: set ``state.process_group`` again unless it is the default group.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class HookState:
    """Base of the states. A subclass adds attributes of plain data and tensors; all are saved.

    Args:
        process_group: the group to communicate over; None is the default group, which need not
            exist yet.

    Attributes:
        iter: completed steps; a step is counted when its last bucket arrives.

    Raises:
        TypeError: ``process_group`` is neither a group nor None.
    """

    _unsaved: ClassVar[dict[str, Callable[[], Any]]] = {
        "process_group": lambda: None,
        "_keys": dict,
    }

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = check_group(process_group)
        self.iter = 0
        self._keys: dict[torch.Tensor, int] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The group itself, looked up at each use. Raises: RuntimeError if there is none yet."""
        return existing_group(self.process_group)

    def keys(self, bucket: dist.GradBucket) -> list[int]:
        """Return the key of every parameter in the bucket: its place from the end of the model."""
        parameters = bucket.parameters()
        before = len(self._keys)
        for place, parameter in enumerate(parameters):
            self._keys.setdefault(parameter, before + len(parameters) - place)
        return [self._keys[parameter] for parameter in parameters]

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count the step when its last bucket arrives."""
        if bucket.is_last():
            self.iter += 1

    def rescale(self, factor: float) -> None:
        """Multiply all that is held back of gradients by ``factor``.

        Under a loss scale, gradients are multiplied by it, and what a state holds back of them,
        too. Call this on all ranks after each change of the scale, with the new scale as a multiple
        of the old one::

            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() != before:
                state.rescale(scaler.get_scale() / before)

        Args:
            factor: positive and finite.

        Raises:
            TypeError, ValueError: ``factor`` is out of its range.
        """
        factor = check_number("factor", factor, 0, open_below=True)
        if not math.isfinite(factor):
            raise ValueError(f"factor: a finite number; got {factor}")
        for memory in vars(self).values():
            if isinstance(memory, Memory):
                memory.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the groups: plain data and tensors."""
        return self.__getstate__()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from the result of ``state_dict``; the process group stays.

        Raises:
            ValueError: it was saved by another kind of state.
        """
        mine = self.__getstate__()
        if saved.keys() != mine.keys():
            raise ValueError(
                f"load_state_dict: saved by another kind of state; "
                f"differs in {sorted(saved.keys() ^ mine.keys())}"
            )
        self.__dict__.update(copy.deepcopy(saved))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._unsaved}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__dict__.update({name: make() for name, make in self._unsaved.items()})
        self.__dict__.update(saved)


class Memory:
    """A value per element of every parameter, zero at first: a residual, a momentum, an estimate.

    The values are stored flat in the order of the current buckets, so that a bucket and its memory
    meet without a copy, and are laid out anew when DDP regroups its buckets. They are in float32 if
    the bucket is in half precision, because sums over steps would lose their small terms there.
    """

    def __init__(self) -> None:
        self.parts: dict[int, torch.Tensor] = {}
        self._flat: dict[tuple[int, ...], torch.Tensor] = {}

    def of(self, keys: Sequence[int], like: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the memory of a bucket's parameters, shape ``[numel]``.

        Values written into it are kept.

        Args:
            keys: the keys of the parameters, by :meth:`HookState.keys`.
            like: their pieces of the buffer, by :func:`hooks_ref._buckets.pieces`, shapes ``[n]``.

        Raises:
            ValueError: the loaded memory was saved for a model of other shapes.
        """
        layout = tuple(keys)
        if layout not in self._flat:
            for old in [old for old in self._flat if not set(old).isdisjoint(layout)]:
                del self._flat[old]
            for key, piece in zip(keys, like, strict=True):
                if key in self.parts and self.parts[key].numel() != piece.numel():
                    raise ValueError(
                        f"this state was saved for another model: parameter {key} from the end had "
                        f"{self.parts[key].numel()} elements and has {piece.numel()}"
                    )
            wide = [
                torch.zeros_like(piece, dtype=torch.promote_types(piece.dtype, torch.float32))
                for piece in like
            ]
            kept = [
                self.parts[key].to(zeros) if key in self.parts else zeros
                for key, zeros in zip(keys, wide, strict=True)
            ]
            flat = self._flat[layout] = torch.cat(kept)
            self.parts.update(zip(keys, flat.split([piece.numel() for piece in like]), strict=True))
        return self._flat[layout]

    def scale(self, factor: float) -> None:
        """Multiply all values by a factor."""
        for part in self.parts.values():
            part.mul_(factor)

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": {key: part.clone() for key, part in self.parts.items()}}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.parts = dict(saved["parts"])
        self._flat = {}


def savable(state: type[T]) -> type[T]:
    """Let ``torch.load(weights_only=True)`` rebuild this class."""
    torch.serialization.add_safe_globals([state])
    return state


savable(Memory)


def generator(*words: int, device: torch.device | None = None) -> torch.Generator:
    """Return a random generator that is determined by ``words`` alone: a seed, a step, a key.

    Ranks that pass the same words get generators in the same state. The words are hashed, because
    the CPU's generator uses only the last 32 bits of its seed.
    """
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return torch.Generator(device or "cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def check_group(process_group: object) -> dist.ProcessGroup | None:
    """Return ``process_group``, a group or None. Raises: TypeError."""
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group: a ProcessGroup with this rank as a member, or None; "
            f"got {process_group!r}"
        )
    return process_group


def existing_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group; None is the default one. Raises: RuntimeError if there is none yet."""
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "there is no process group yet: call torch.distributed.init_process_group first"
        )
    return group


def check_int(name: str, value: object, least: int) -> int:
    """Return ``value``, an integer of at least ``least``.

    Raises:
        TypeError, ValueError: ``value`` is out of range; the message names the argument and its
            range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: an integer of at least {least}; got {value!r}")
    if value < least:
        raise ValueError(f"{name}: an integer of at least {least}; got {value}")
    return value


def check_number(
    name: str, value: object, least: float, most: float = math.inf, *, open_below: bool = False
) -> float:
    """Return ``value`` as a float in ``[least, most]``, or ``(least, most]`` with ``open_below``.

    Raises:
        TypeError, ValueError: ``value`` is out of range; the message names the argument and its
            range.
    """
    bounds = f"a number in {'(' if open_below else '['}{least}, {most}]"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: {bounds}; got {value!r}")
    if not (least <= value <= most) or (open_below and value == least):
        raise ValueError(f"{name}: {bounds}; got {value}")
    return float(value)


def check_bool(name: str, value: object) -> bool:
    """Return ``value``, a bool. Raises: TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: True or False; got {value!r}")
    return value
