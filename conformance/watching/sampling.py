"""What is taken of a step of a training run on one rank, and how it travels: a few elements of every gradient, and one number
each for all of them.

Elements are drawn from a seed and the step, with a generator of their own: the same on all ranks, without a word between them.
Of each parameter there are as many as its share in the model, one at least, in a row, and of four or more the first and the last
element of the parameter are two: where a bucket's tail is left out, it shows.
"""

from dataclasses import dataclass, field

import torch

MOST_GATHERED = 2**20  # elements of all ranks together, of each of three kinds (see Gathered), that a rank holds at a time


class Layout:
    """Which elements are taken of which parameter at a step.

    Args:
        parameters: those that get gradients, by name.
        elements: how many are taken of all together, if the model has as many; fewer among more than ``MOST_GATHERED / elements``
            ranks, and never less than one of each parameter.
        world: how many ranks there are.
        seed: of the draws.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], elements: int, world: int, seed: int) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.seed = seed
        sizes = [parameter.numel() for parameter in self.parameters]
        share = min(1.0, min(elements, MOST_GATHERED // world) / max(1, sum(sizes)))
        self.counts = [min(size, max(1, int(size * share))) for size in sizes]
        reals = [count * (2 if p.is_complex() else 1) for p, count in zip(self.parameters, self.counts, strict=True)]
        self.dtypes = [p.dtype.to_real() if p.is_complex() else p.dtype for p in self.parameters]
        self.sizes = [count * dtype.itemsize for count, dtype in zip(reals, self.dtypes, strict=True)]  # in bytes

    def indices(self, step: int) -> list[torch.Tensor]:
        """Return the indices that are taken of each parameter at ``step``, in C order, on its device."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
        drawn = torch.rand(len(self.counts), generator=generator, dtype=torch.float64).tolist()
        return [
            _indices(parameter.numel(), count, at).to(parameter.device)
            for parameter, count, at in zip(self.parameters, self.counts, drawn, strict=True)
        ]


def _indices(numel: int, count: int, at: float) -> torch.Tensor:
    if count == numel:
        return torch.arange(numel)
    row = count - 2 if count >= 4 else count
    begin = int(at * (numel - row + 1))
    drawn = torch.arange(begin, begin + row)
    return torch.cat([drawn.new_tensor([0]), drawn, drawn.new_tensor([numel - 1])]) if count >= 4 else drawn


def take(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return a copy of the elements of a strided tensor at ``index``, in C order; complex ones as pairs of reals."""
    tensor = tensor.detach()
    at = (index,) if tensor.is_contiguous() else torch.unravel_index(index, tensor.shape)
    taken = (tensor.view(-1) if tensor.is_contiguous() else tensor)[at]
    return torch.view_as_real(taken).reshape(-1) if taken.is_complex() else taken


def top(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value as one double: NaN or infinite where any element is. One read, and no copy."""
    tensor = tensor.detach()
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    least, most = torch.aminmax(real)
    return torch.stack([-least, most]).double().amax().view(1)


@dataclass
class Taken:
    """What is taken on one rank: by parameter, None where there was no dense gradient.

    Attributes:
        fed, results: elements of the gradient before and after it was averaged.
        fed_top, result_top: the largest absolute value of the whole.
        held, held_top: the same of the parameters when backward began.
        before: elements of the gradients of the step before, at the same places; empty where they were not taken.
    """

    index: list[torch.Tensor]
    fed: list[torch.Tensor | None] = field(default_factory=list)
    fed_top: list[torch.Tensor | None] = field(default_factory=list)
    results: list[torch.Tensor | None] = field(default_factory=list)
    result_top: list[torch.Tensor | None] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)
    held_top: list[torch.Tensor | None] = field(default_factory=list)
    before: list[torch.Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        nothing: list[torch.Tensor | None] = [None] * len(self.index)
        self.fed, self.fed_top, self.results, self.result_top, self.held_top = (list(nothing) for _ in range(5))

    def feed(self, number: int, grad: torch.Tensor | None) -> None:
        """Take what a parameter's gradient is before it is averaged."""
        self.fed[number], self.fed_top[number] = self._look(number, grad)

    def feed_before(self, number: int, grad: torch.Tensor | None) -> None:
        """Take a gradient of the step before."""
        self.before = self.before or [None] * len(self.index)
        if grad is not None and grad.layout == torch.strided and grad.numel():
            self.before[number] = take(grad, self.index[number])

    def finish(self, layout: Layout) -> None:
        """Take what the gradients are now."""
        for number, parameter in enumerate(layout.parameters):
            self.results[number], self.result_top[number] = self._look(number, parameter.grad)

    def _look(self, number: int, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if grad is None or grad.layout != torch.strided or not grad.numel():
            return None, None
        return take(grad, self.index[number]), top(grad)

    def hold(self, layout: Layout) -> None:
        """Take what the parameters are before backward."""
        self.held = [take(p, index) for p, index in zip(layout.parameters, self.index, strict=True)]
        self.held_top = [top(p) if p.numel() else None for p in layout.parameters]

    def moved(self, layout: Layout) -> list[bool]:
        """Return which parameters are not what they were when backward began, as far as their elements tell."""
        if not self.held:
            return [False] * len(layout.names)
        now = [take(p, index) for p, index in zip(layout.parameters, self.index, strict=True)]
        return [not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(self.held, now, strict=True)]


def pack(layout: Layout, taken: Taken, words: list[int], folds: torch.Tensor) -> torch.Tensor:
    """Return what is taken as bytes, as many on every rank and at every step; ``words`` are more numbers of the caller's."""
    flags = [[value is not None for value in values] for values in (taken.fed, taken.results)]
    before = taken.before or [None] * len(layout.names)
    ints = torch.tensor([*words, int(bool(taken.before)), *map(int, flags[0]), *map(int, flags[1]), *map(int, taken.moved(layout))])
    tops = [_zero if value is None else value for value in to_cpu([*taken.fed_top, *taken.result_top, *taken.held_top])]
    parts = [ints, folds, torch.cat(tops) if tops else torch.zeros(0, dtype=torch.float64)]
    return torch.cat([part.view(torch.uint8) for part in parts] + [_bytes(layout, values) for values in (taken.fed, before, taken.results)])


def _bytes(layout: Layout, values: list[torch.Tensor | None]) -> torch.Tensor:
    moved = to_cpu([None if value is None else value.contiguous().view(torch.uint8) for value in values])
    parts = [torch.zeros(size, dtype=torch.uint8) if value is None else value for value, size in zip(moved, layout.sizes, strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


def to_cpu(values: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Move one-dimensional tensors of one dtype to the CPU, in one copy from each device."""
    known: dict[torch.device, list[torch.Tensor]] = {}
    for value in values:
        if value is not None:
            known.setdefault(value.device, []).append(value)
    parts = {device: iter(torch.cat(own).cpu().split([len(part) for part in own])) for device, own in known.items()}
    return [None if value is None else next(parts[value.device]) for value in values]


_zero = torch.zeros(1, dtype=torch.float64)


@dataclass
class Gathered:
    """What all ranks have taken: rows are ranks, by their place in the group.

    Attributes:
        words: the caller's numbers, ``[W, n]``.
        has_before: whether all ranks have taken the step before.
        has_fed, has_result, moved: ``[W, P]``.
        folds: of all parameters, ``[W, Q]``.
        fed_top, result_top, held_top: ``[W, P]``.
        fed, before, results: by parameter, ``[W, k]`` in its dtype.
        alike: whether the elements of the results, and which of them there are, are the same bits on all ranks.
    """

    words: torch.Tensor
    has_before: bool
    has_fed: torch.Tensor
    has_result: torch.Tensor
    moved: torch.Tensor
    folds: torch.Tensor
    fed_top: torch.Tensor
    result_top: torch.Tensor
    held_top: torch.Tensor
    fed: list[torch.Tensor]
    before: list[torch.Tensor]
    results: list[torch.Tensor]
    alike: bool


def unpack(layout: Layout, rows: torch.Tensor, words: int, folds: int) -> Gathered:
    """Read what :func:`pack` has made of every rank, ``[W, n]``."""
    count, at = len(layout.names), 0

    def cut(size: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal at
        part, at = rows[:, at : at + size * dtype.itemsize], at + size * dtype.itemsize
        if not size:  # whose strides no view of another dtype takes
            return part.new_empty(len(rows), 0, dtype=dtype)
        return part.clone(memory_format=torch.contiguous_format).view(dtype)

    said, has_before = cut(words, torch.int64), bool(cut(1, torch.int64).all())
    has_fed, has_result, moved = (cut(count, torch.int64).bool() for _ in range(3))
    folded = cut(folds, torch.int64)
    fed_top, result_top, held_top = (cut(count, torch.float64) for _ in range(3))
    each = [(size // dtype.itemsize, dtype) for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)]
    fed, before = ([cut(size, dtype) for size, dtype in each] for _ in range(2))
    begin = at
    results = [cut(size, dtype) for size, dtype in each]
    alike = bool((rows[:, begin:] == rows[:1, begin:]).all() and (has_result == has_result[:1]).all())
    return Gathered(said, has_before, has_fed, has_result, moved, folded, fed_top, result_top, held_top, fed, before, results, alike)
