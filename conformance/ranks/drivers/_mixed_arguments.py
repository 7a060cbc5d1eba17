"""Blocks with arguments and results that require a gradient, and others, in any order. Runs in
ranks only.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

NAMES = ("one", "two", "three", "four", "five")
FLOATS = "floats"
INDICES = "indices"
MASK = "mask"
NUMBER = "number"
_ROWS = 5
# By their names, the results that a loss is made of, and their weights.
_WEIGHTS = {"made": 1.0, "wave": 0.5, "detached": 0.25}


class Mixes(nn.Module):
    """A block with five arguments, and a tuple of results.

    Args:
        width: of tensors of floats.
        kinds: of the arguments, in the order of ``NAMES``: tensors of floats, indices or booleans,
            or numbers.
        results: the names of the results in their order; see :func:`drawn_results`.
    """

    def __init__(self, width: int, kinds: Sequence[str], results: Sequence[str]) -> None:
        super().__init__()
        self.kinds = dict(zip(NAMES, kinds, strict=True))
        self.results = tuple(results)
        layers: dict[str, nn.Module] = {}
        for name, kind in self.kinds.items():
            if kind == FLOATS:
                layers[name] = nn.Linear(width, width)
            elif kind == INDICES:
                layers[name] = nn.Embedding(_ROWS, width)
        self.layers = nn.ModuleDict(layers)

    def forward(self, one: Any, two: Any, three: Any, four: Any, five: Any) -> tuple[Any, ...]:
        given = dict(zip(NAMES, (one, two, three, four, five), strict=True))
        floats = [name for name, kind in self.kinds.items() if kind == FLOATS]
        made = torch.stack([self.layers[name](given[name]).tanh() for name in floats]).sum(0)
        for name, kind in self.kinds.items():
            value = given[name]
            if kind == INDICES:
                made = made * (2 + self.layers[name](value).tanh())
            elif kind == MASK:
                made = torch.where(value, made, made / 2)
            elif kind == NUMBER:
                made = made * value
        results = {
            "made": made,
            "wave": made.sin(),
            # A statistic, as the load of the experts that a router logs.
            "detached": made.detach().cos(),
            INDICES: made.argmax(1),
            MASK: made > 0,
            "none": None,
        }
        return tuple(results[name] for name in self.results)


class Lists(nn.Module):
    """A block whose result is a list.

    Args:
        width: of its input, and of the entries.
        count: of its entries.
    """

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x).tanh() for layer in self.layers]


def drawn_results(numbers: random.Random) -> list[str]:
    """Return the names of a block's results: two tensors of floats with a gradient and a detached
    one, which does not come last of the three; and indices, a mask or None, one or two of these.
    """
    others = numbers.sample((INDICES, MASK, "none"), numbers.randint(1, 2))
    while True:
        names = numbers.sample(["made", "wave", "detached", *others], 3 + len(others))
        if names.index("detached") < max(names.index("made"), names.index("wave")):
            return names


def lone_result(numbers: random.Random) -> list[str]:
    """Return the name of the only result of a block: a tensor of floats with a gradient."""
    return [numbers.choice(("made", "wave"))]


def form(result: Any) -> str:
    """Return the type of a result; of a tuple or list also its length."""
    name = f"a {type(result).__name__}"
    return f"{name} of length {len(result)}" if isinstance(result, tuple | list) else name


def entries(block: str, result: Any, right: type, count: int) -> Sequence[Any]:
    """Return the entries of a block's result.

    A tensor in place of the only entry is taken for it, so that the run goes on.

    Args:
        block: its name.
        result: that of the call.
        right: the type of the block's own result, a tuple or a list.
        count: the number of entries there.

    Raises:
        ValueError: the result has another number of entries.
    """
    if count == 1 and isinstance(result, torch.Tensor):
        return (result,)
    if not isinstance(result, tuple | list) or len(result) != count:
        raise ValueError(
            f"{block} returns {form(result)}, and a {right.__name__} of length {count} without "
            "the wrapper"
        )
    return result


def drawn_kinds(numbers: random.Random) -> list[str]:
    """Return the kinds of a block's arguments: two to four tensors of floats, and others."""
    count = numbers.randint(2, len(NAMES) - 1)
    others = [numbers.choice((INDICES, MASK, NUMBER)) for _ in NAMES[count:]]
    kinds = [*[FLOATS] * count, *others]
    return numbers.sample(kinds, len(kinds))


@dataclass(frozen=True)
class Call:
    """The form of one call of :class:`Mixes`.

    Attributes:
        by_position: the names of arguments that are given by position.
        by_keyword: those of the others, in the order of the call.
        trained: those that require a gradient.
    """

    by_position: tuple[str, ...]
    by_keyword: tuple[str, ...]
    trained: frozenset[str]


def drawn_call(kinds: Sequence[str], ends_trained: bool, numbers: random.Random) -> Call:
    """Draw a call.

    Args:
        kinds: of the block's arguments.
        ends_trained: whether some tensor with a gradient comes after one without, or the reverse.
        numbers: these are drawn from.
    """
    of_names = dict(zip(NAMES, kinds, strict=True))
    floats = [name for name in NAMES if of_names[name] == FLOATS]
    while True:
        count = numbers.randint(0, len(NAMES))
        call = Call(
            NAMES[:count],
            tuple(numbers.sample(NAMES[count:], len(NAMES) - count)),
            frozenset(numbers.sample(floats, numbers.randint(1, len(floats)))),
        )
        given = (*call.by_position, *call.by_keyword)
        are_trained = [name in call.trained for name in given if of_names[name] != NUMBER]
        if are_trained != sorted(are_trained, reverse=ends_trained):
            return call


class MixedCalls:
    """The calls of one block.

    Args:
        block: without the wrapper.
        name: of the block, for records.
        numbers: all calls are drawn from these.
        note: is called with the block's name and each result.

    Attributes:
        given: by name, the tensors of the last call that require a gradient.
    """

    def __init__(
        self, block: Mixes, name: str, numbers: random.Random, note: Callable[[str, Any], None]
    ) -> None:
        self._kinds = block.kinds
        self._results = block.results
        self._name = name
        self._numbers = numbers
        self._note = note
        self.given: dict[str, torch.Tensor] = {}

    def call(self, wrapped: nn.Module, like: torch.Tensor, ends_trained: bool) -> torch.Tensor:
        """Call the wrapped block with drawn arguments, and return a combination of its results.

        Whether a detached result requires a gradient does not matter: torch's reentrant checkpoints
        return ones that do.

        Args:
            wrapped: the block.
            like: a tensor of the dtype and shape of floats, on the device.
            ends_trained: see :func:`drawn_call`.
        """
        call = drawn_call(list(self._kinds.values()), ends_trained, self._numbers)
        values = {name: self._value(kind, like) for name, kind in self._kinds.items()}
        self.given = {}
        for name in NAMES:
            if name in call.trained:
                values[name].requires_grad_()
                self.given[f"{name} of {self._name}"] = values[name]
        results = wrapped(
            *(values[name] for name in call.by_position),
            **{name: values[name] for name in call.by_keyword},
        )
        self._note(self._name, results)
        count = len(self._results)
        made = entries(self._name, results, tuple, count)
        found = dict(zip(self._results, made, strict=True))
        if "detached" in found:
            found["detached"] = found["detached"].detach()
        weighted = [found[name] * weight for name, weight in _WEIGHTS.items() if name in found]
        total = torch.stack(weighted).sum(0)
        if MASK in found:
            total = torch.where(found[MASK], total, total / 2)
        if INDICES in found:
            total = total * (1 + found[INDICES].unsqueeze(1) % 2)
        return total

    def _value(self, kind: str, like: torch.Tensor) -> Any:
        numbers = self._numbers
        (rows, columns) = like.shape
        match kind:
            case "indices":
                return torch.tensor(
                    [numbers.randrange(_ROWS) for _ in range(rows)], device=like.device
                )
            case "number":
                return numbers.uniform(0.5, 2.0)
        values = [[numbers.gauss(0, 1) for _ in range(columns)] for _ in range(rows)]
        floats = torch.tensor(values, dtype=like.dtype, device=like.device)
        return floats > 0 if kind == MASK else floats
