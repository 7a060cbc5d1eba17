"""The samples of one step on one rank, and their form when ranks exchange them.

A sample has a few elements of every gradient, and for each gradient its largest absolute value. The
elements are drawn from a seed and the number of the step, with a generator of their own, so that
they are the same on all ranks without any communication.

Each parameter contributes as many elements as its share of the model, and at least one. They are
consecutive; if there are four or more, the first and the last element of the parameter are among
them, so that a bucket whose tail is left out shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

# The elements of all ranks together that a rank holds at a time, of each of the three kinds fed,
# fed_before and results (see Gathered).
MAX_GATHERED = 2**20

Values = list[torch.Tensor | None]


class Layout:
    """The elements of each parameter that are sampled.

    Args:
        parameters: the parameters that get gradients, by name.
        elements: how many elements are sampled of all parameters together, if the model has as
            many. There are fewer if more than ``MAX_GATHERED / elements`` ranks take part, and
            always at least one of each parameter.
        world: the number of ranks.
        seed: the seed of the draws.

    Attributes:
        counts: the number of sampled elements of each parameter.
        dtypes: the dtype of each parameter's samples; complex elements are pairs of reals.
        sizes: the bytes of each parameter's samples.
    """

    def __init__(
        self, parameters: dict[str, torch.nn.Parameter], elements: int, world: int, seed: int
    ) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.seed = seed
        numels = [parameter.numel() for parameter in self.parameters]
        wanted = min(elements, MAX_GATHERED // world)
        share = min(1.0, wanted / max(1, sum(numels)))
        self.counts = [min(numel, max(1, int(numel * share))) for numel in numels]
        self.dtypes: list[torch.dtype] = []
        self.sizes: list[int] = []
        for parameter, count in zip(self.parameters, self.counts, strict=True):
            dtype = parameter.dtype
            reals = count
            if parameter.is_complex():
                dtype = dtype.to_real()
                reals = 2 * count
            self.dtypes.append(dtype)
            self.sizes.append(reals * dtype.itemsize)

    def indices(self, step: int) -> list[torch.Tensor]:
        """Return the sampled indices of each parameter at ``step``, in C order, on its device."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
        count = len(self.counts)
        drawn = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
        return [
            _indices(parameter.numel(), count, position).to(parameter.device)
            for parameter, count, position in zip(self.parameters, self.counts, drawn, strict=True)
        ]


def _indices(numel: int, count: int, position: float) -> torch.Tensor:
    """Return ``count`` indices out of ``numel``; their row begins at a position in [0, 1)."""
    if count == numel:
        return torch.arange(numel)
    with_ends = count >= 4
    row = count - 2 if with_ends else count
    begin = int(position * (numel - row + 1))
    drawn = torch.arange(begin, begin + row)
    if not with_ends:
        return drawn
    return torch.cat([drawn.new_tensor([0]), drawn, drawn.new_tensor([numel - 1])])


def take(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return a copy of the elements at ``index``, in C order; complex values as pairs of reals."""
    tensor = tensor.detach()
    position: tuple[torch.Tensor, ...] = (index,)
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    else:
        position = torch.unravel_index(index, tensor.shape)
    taken = tensor[position]
    return torch.view_as_real(taken).reshape(-1) if taken.is_complex() else taken


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value as one double; NaN or infinite if any element is.

    It takes one read of the tensor, and no copy.
    """
    tensor = tensor.detach()
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    lowest, highest = torch.aminmax(real)
    return torch.stack([-lowest, highest]).double().amax().view(1)


@dataclass
class Sample:
    """The sample of one step on one rank: lists by parameter, None if it had no dense gradient.

    Attributes:
        index: the sampled indices.
        fed: elements of the gradient before it was averaged.
        largest_fed: the largest absolute value of the whole gradient before it was averaged.
        results, largest_result: the same after it was averaged.
        parameters, largest_parameter: the same of the parameters when backward began.
        fed_before: elements of the gradients that were fed a step earlier, at the same indices;
            empty if they were not sampled.
    """

    index: list[torch.Tensor]
    fed: Values = field(init=False)
    largest_fed: Values = field(init=False)
    results: Values = field(init=False)
    largest_result: Values = field(init=False)
    parameters: list[torch.Tensor] = field(default_factory=list)
    largest_parameter: Values = field(init=False)
    fed_before: Values = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.index)
        self.fed = [None] * count
        self.largest_fed = [None] * count
        self.results = [None] * count
        self.largest_result = [None] * count
        self.largest_parameter = [None] * count

    def take_fed(self, number: int, grad: torch.Tensor | None) -> None:
        """Sample a parameter's gradient before it is averaged."""
        if grad is not None and _has_elements(grad):
            self.fed[number] = take(grad, self.index[number])
            self.largest_fed[number] = largest(grad)
        else:
            self.fed[number] = None
            self.largest_fed[number] = None

    def take_fed_before(self, number: int, grad: torch.Tensor | None) -> None:
        """Sample a gradient that is fed a step earlier."""
        self.fed_before = self.fed_before or [None] * len(self.index)
        if grad is not None and _has_elements(grad):
            self.fed_before[number] = take(grad, self.index[number])

    def take_results(self, layout: Layout) -> None:
        """Sample the gradients after they were averaged."""
        for number, parameter in enumerate(layout.parameters):
            grad = parameter.grad
            if grad is not None and _has_elements(grad):
                self.results[number] = take(grad, self.index[number])
                self.largest_result[number] = largest(grad)

    def take_parameters(self, layout: Layout) -> None:
        """Sample the parameters before backward."""
        pairs = zip(layout.parameters, self.index, strict=True)
        self.parameters = [take(parameter, index) for parameter, index in pairs]
        self.largest_parameter = [largest(p) if p.numel() else None for p in layout.parameters]

    def changed_parameters(self, layout: Layout) -> list[bool]:
        """Return which parameters have changed since backward began, in their sampled elements."""
        if not self.parameters:
            return [False] * len(layout.names)
        pairs = zip(layout.parameters, self.index, strict=True)
        now = [take(parameter, index) for parameter, index in pairs]
        # Bits are compared: NaN differs from itself.
        return [
            not torch.equal(before.view(torch.uint8), after.view(torch.uint8))
            for before, after in zip(self.parameters, now, strict=True)
        ]


def _has_elements(grad: torch.Tensor) -> bool:
    """Whether a gradient is dense and not empty; others are not sampled."""
    return grad.layout == torch.strided and grad.numel() > 0


def pack(
    layout: Layout, sample: Sample, numbers: list[int], checksums: torch.Tensor
) -> torch.Tensor:
    """Return a sample as bytes; their number is the same on every rank and at every step.

    Args:
        numbers: further numbers of the caller's.
        checksums: the checksum of each parameter.
    """
    integers = torch.tensor(
        [
            *numbers,
            int(bool(sample.fed_before)),
            *(int(values is not None) for values in sample.fed),
            *(int(values is not None) for values in sample.results),
            *map(int, sample.changed_parameters(layout)),
        ]
    )
    largest_values = to_cpu(
        [*sample.largest_fed, *sample.largest_result, *sample.largest_parameter]
    )
    doubles = [_ZERO if value is None else value for value in largest_values]
    if not doubles:
        doubles = [torch.zeros(0, dtype=torch.float64)]
    fed_before = sample.fed_before or [None] * len(layout.names)
    return torch.cat(
        [
            integers.view(torch.uint8),
            checksums.view(torch.uint8),
            torch.cat(doubles).view(torch.uint8),
            _bytes(layout, sample.fed),
            _bytes(layout, fed_before),
            # At the end, so that the results of ranks can be compared as one piece.
            _bytes(layout, sample.results),
        ]
    )


def _bytes(layout: Layout, values: Values) -> torch.Tensor:
    """Return sampled elements as bytes; zeros stand for missing ones."""
    as_bytes: Values = [
        None if value is None else value.contiguous().view(torch.uint8) for value in values
    ]
    parts = [
        torch.zeros(size, dtype=torch.uint8) if value is None else value
        for value, size in zip(to_cpu(as_bytes), layout.sizes, strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


def to_cpu(values: Sequence[torch.Tensor | None]) -> Values:
    """Move one-dimensional tensors of one dtype to the CPU, in one copy from each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for value in values:
        if value is not None:
            by_device.setdefault(value.device, []).append(value)
    parts = {}
    for device, tensors in by_device.items():
        lengths = [len(tensor) for tensor in tensors]
        parts[device] = iter(torch.cat(tensors).cpu().split(lengths))
    return [None if value is None else next(parts[value.device]) for value in values]


_ZERO = torch.zeros(1, dtype=torch.float64)


@dataclass
class Gathered:
    """The samples of all ranks. Rows are ranks, by their numbers in the group.

    There are W ranks, P parameters with gradients and Q parameters altogether.

    Attributes:
        numbers: the caller's numbers, ``[W, n]``.
        has_fed_before: whether all ranks have sampled the step before.
        has_fed, has_result, parameter_changed: ``[W, P]``.
        checksums: of all parameters, ``[W, Q]``.
        largest_fed, largest_result, largest_parameter: ``[W, P]``.
        fed, fed_before, results: by parameter, ``[W, k]`` in its dtype.
        results_agree: whether all ranks have results for the same parameters, and the sampled
            elements of these have the same bits.
    """

    numbers: torch.Tensor
    has_fed_before: bool
    has_fed: torch.Tensor
    has_result: torch.Tensor
    parameter_changed: torch.Tensor
    checksums: torch.Tensor
    largest_fed: torch.Tensor
    largest_result: torch.Tensor
    largest_parameter: torch.Tensor
    fed: list[torch.Tensor]
    fed_before: list[torch.Tensor]
    results: list[torch.Tensor]
    results_agree: bool


class _Reader:
    """Reads columns of typed values from the bytes of all ranks."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._position = 0

    def columns(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next ``count`` values of each rank."""
        begin = self._position
        self._position += count * dtype.itemsize
        part = self._rows[:, begin : self._position]
        if not count:
            # An empty slice cannot be viewed as another dtype.
            return part.new_empty(len(self._rows), 0, dtype=dtype)
        return part.clone(memory_format=torch.contiguous_format).view(dtype)

    def flags(self, count: int) -> torch.Tensor:
        return self.columns(count, torch.int64).bool()

    def samples(self, layout: Layout) -> list[torch.Tensor]:
        """Return the next sampled elements of each parameter."""
        return [
            self.columns(size // dtype.itemsize, dtype)
            for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)
        ]

    def rest_agrees(self) -> bool:
        """Whether the bytes that are left are the same on all ranks."""
        rest = self._rows[:, self._position :]
        return bool((rest == rest[:1]).all())


def unpack(layout: Layout, rows: torch.Tensor, numbers: int, checksums: int) -> Gathered:
    """Read the result of :func:`pack` of every rank, ``[W, n]``.

    Args:
        numbers: how many numbers of the caller's there are.
        checksums: how many checksums there are.
    """
    count = len(layout.names)
    reader = _Reader(rows)
    own_numbers = reader.columns(numbers, torch.int64)
    has_fed_before = bool(reader.flags(1).all())
    has_fed = reader.flags(count)
    has_result = reader.flags(count)
    parameter_changed = reader.flags(count)
    found_checksums = reader.columns(checksums, torch.int64)
    largest_fed = reader.columns(count, torch.float64)
    largest_result = reader.columns(count, torch.float64)
    largest_parameter = reader.columns(count, torch.float64)
    fed = reader.samples(layout)
    fed_before = reader.samples(layout)
    same_parameters = bool((has_result == has_result[:1]).all())
    results_agree = reader.rest_agrees() and same_parameters
    results = reader.samples(layout)
    return Gathered(
        numbers=own_numbers,
        has_fed_before=has_fed_before,
        has_fed=has_fed,
        has_result=has_result,
        parameter_changed=parameter_changed,
        checksums=found_checksums,
        largest_fed=largest_fed,
        largest_result=largest_result,
        largest_parameter=largest_parameter,
        fed=fed,
        fed_before=fed_before,
        results=results,
        results_agree=results_agree,
    )
