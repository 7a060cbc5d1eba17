"""Networks in float32 for the scenarios of ``scenarios/wrapper_training.py``. Runs in ranks only.

The sums in them are short, and :class:`Wide` has none: ``judging/oracles/wrapper_training.py``
derives from this how far results may differ from those without a wrapper.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from conformance.ranks.drivers._blocks import WATCH, WIDTH, Block, Wrap
from conformance.ranks.drivers._convolutions import convolutions
from conformance.ranks.drivers._cut_layers import cutting_block
from conformance.ranks.drivers._exact_factors import Factors, exact_factors
from conformance.ranks.drivers._expanded_views import expanding_block
from conformance.ranks.drivers._late_draws import LateBlock, late_blocks
from conformance.ranks.drivers._nested_blocks import nested, wrap_levels
from conformance.ranks.drivers._parts_of_blocks import idle_blocks, parted_blocks
from conformance.ranks.drivers._turning_blocks import Turns
from conformance.ranks.drivers._written_blocks import blocks_that_change_products, written_blocks
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.wrapper_graphs import MOST_ROWS
from conformance.scenarios.wrapper_parts import IDLE, PARTS

RANK = 3
COLUMNS = 4
LOOKS = 5


class Attends(nn.Module):
    """Linear attention of the rows of a batch to each other.

    It has no softmax, whose gradient cancels: a bound by the largest magnitude would not hold.
    """

    def __init__(self, called: str) -> None:
        super().__init__()
        self.called = called
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        weights = WATCH.sees(self.called, self.query(x) @ self.key(x).T / WIDTH)
        return x + weights @ self.value(x) / WIDTH


class Wide(nn.Module):
    """A block of many elements, in which every element is computed for itself."""

    def __init__(self, called: str, size: int) -> None:
        super().__init__()
        self.called = called
        self.scale = nn.Parameter(torch.empty(size))
        self.shift = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        inside = WATCH.sees(self.called, x * self.scale)
        soft = WATCH.sees(self.called, inside / (1 + inside.abs()))
        return x + WATCH.sees(self.called, soft * soft) * self.shift


class Multiplies(nn.Module):
    """A block that saves tensors of one dtype, of any magnitudes.

    It multiplies each element by two parameters and takes its magnitude, so that results are exact
    if parameters are powers of two.
    """

    def __init__(self, called: str, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.called = called
        self.first = nn.Parameter(torch.empty(size, dtype=dtype))
        self.second = nn.Parameter(torch.empty(size, dtype=dtype))

    @staticmethod
    def given(x: torch.Tensor) -> torch.Tensor:
        """Return the argument of the block for an input."""
        return x

    def factors(self, numbers: torch.Generator, is_plain_but_one: bool) -> Factors:
        """Draw the input, the parameters, and the gradient of the output."""
        return exact_factors(self.first, numbers, is_plain_but_one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        inside = WATCH.sees(self.called, x * self.first)
        return WATCH.sees(self.called, inside * self.second).abs()


class LowRank(nn.Module):
    """A frozen layer with a trained one of low rank beside it, as LoRA has it."""

    def __init__(self, called: str) -> None:
        super().__init__()
        self.called = called
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Adapted(nn.Module):
    """A layer with one of low rank beside it, which is added to a model that is there already.

    Args:
        base: the layer.
        draw: returns values of a shape.
    """

    def __init__(self, base: nn.Linear, draw: Callable[[Sequence[int]], torch.Tensor]) -> None:
        super().__init__()
        self.base = base
        # Made within a step, in which the random generators are watched.
        self.down = nn.utils.skip_init(nn.Linear, WIDTH, RANK, bias=False)
        self.up = nn.utils.skip_init(nn.Linear, RANK, 2 * WIDTH, bias=False)
        for layer in (self.down, self.up):
            layer.weight = nn.Parameter(draw(layer.weight.shape) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def replace_weight(
    layer: nn.Linear, draw: Callable[[Sequence[int]], torch.Tensor]
) -> dict[str, nn.Parameter]:
    """Replace the weight of a layer, as load_state_dict(assign=True) does; return it by name."""
    layer.weight = nn.Parameter(draw(layer.weight.shape))
    return {"weight": layer.weight}


def add_layer(
    block: Block, draw: Callable[[Sequence[int]], torch.Tensor]
) -> dict[str, nn.Parameter]:
    """Add a layer of low rank to a frozen block, as to a model that is there already; return its
    parameters by name.
    """
    adapted = Adapted(block.inner, draw)
    block.inner = adapted  # type: ignore[assignment]
    return {"inner.down.weight": adapted.down.weight, "inner.up.weight": adapted.up.weight}


class Grows(nn.Module):
    """A layer that multiplies each column by about 9/8, so that many in a row keep the columns of
    one magnitude.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x * self.weight / 8


class Drops(nn.Module):
    """A layer that drops elements.

    Args:
        share: returns the share of dropped elements.
    """

    def __init__(self, share: Callable[[], float]) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, self.share(), self.training)


class Layers(nn.Module):
    """A block of many layers, each of which multiplies its input by signs, and saves it."""

    def __init__(self, called: str, count: int) -> None:
        super().__init__()
        self.called = called
        self.signs = nn.Parameter(torch.empty(count, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        for signs in self.signs.unbind():
            x = x * signs
        return x


_BEYOND_32_BITS = 2**40


class Looks(nn.Module):
    """A block that saves integers and masks: it looks up rows, selects and drops elements."""

    def __init__(self, called: str, rows: int) -> None:
        super().__init__()
        self.called = called
        self.table = nn.Embedding(rows, COLUMNS)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor, indices: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        # Integers that 32 bits do not hold, as times and hashes are; factors of about 1.
        x = x * (indices[:, :1] + _BEYOND_32_BITS) * (1 / _BEYOND_32_BITS)
        found = self.table(indices)
        picked = torch.gather(found * x[:, None, :COLUMNS], 1, order)
        # Levels of a quantized tensor: bytes that are no masks.
        picked = picked * order.to(torch.uint8)
        largest = picked.max(1).values
        rest = x[:, COLUMNS:].masked_fill(x[:, COLUMNS:] > 0.5, 0.25) * found[:, 0]
        return x + self.dropout(torch.cat([largest, torch.where(rest > 0, rest, -2 * rest)], 1))


class Counts(Block):
    """A block that counts its batches by their number of rows, in whole and in other numbers."""

    batches: torch.Tensor
    load: torch.Tensor

    def __init__(self, called: str) -> None:
        super().__init__(called)
        self.register_buffer("batches", torch.zeros(MOST_ROWS + 1, dtype=torch.int64))
        self.register_buffer("load", torch.zeros(MOST_ROWS + 1, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches[len(x)] += 1
        self.load[len(x)] += 1
        return super().forward(x)


class Chain(nn.Module):
    """Blocks in a row.

    Args:
        blocks: these.
        beside: blocks beside them, which :meth:`forward` does not run.

    Attributes:
        asks: whether the output of each block requires a gradient.
        by_name: the numbers of the blocks that are called by keyword alone.
        arguments: by the number of a block, the arguments behind its input.
    """

    def __init__(self, blocks: list[nn.Module], beside: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.beside = nn.ModuleList(beside)
        self.asks: list[float] = []
        self.by_name: frozenset[int] = frozenset()
        self.arguments: dict[int, tuple[float, ...]] = {}

    def wrap(self, wrap: Wrap) -> None:
        """Replace each block by its wrapper."""
        for blocks in (self.blocks, self.beside):
            for index, block in enumerate(blocks):
                blocks[index] = wrap_levels(block, wrap)

    def evaluate(self, x: torch.Tensor) -> None:
        """Run a forward in evaluation mode, as a trainer does between two steps."""
        self.eval()
        with torch.no_grad():
            self(x)
        self.train()

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        self.asks = []
        for index, block in enumerate(self.blocks):
            behind = (*more, *self.arguments.get(index, ()))
            x = block(x=x) if index in self.by_name else block(x, *behind)
            self.asks.append(float(x.requires_grad))
        return x


def training_network(scenario: Scenario, numbers: torch.Generator) -> Chain:
    """Return the network of a scenario, with weights that a generator draws."""
    made = Chain(_blocks(scenario), _blocks_beside(scenario))
    _fill(made, numbers)
    if scenario.variant == "training_large":
        _scale(made, scenario)
    if scenario.variant == "training_many":
        made.blocks[0].signs.data.sign_()  # type: ignore[union-attr, operator]
    return made.double() if scenario.variant in (PARTS.variant, IDLE.variant) else made


def _blocks_beside(scenario: Scenario) -> list[nn.Module]:
    if scenario.variant == "training_single":
        return [*convolutions(), expanding_block(scenario)]
    return blocks_that_change_products() if scenario.variant == "training_written" else []


def _blocks(scenario: Scenario) -> list[nn.Module]:
    if scenario.variant == "training_large":
        sizes = [param.shape[0] for param in scenario.params]
        return [
            *(Wide(f"block {index}", size) for index, size in enumerate(sizes)),
            Wide("small", 64),
        ]
    if scenario.variant in ("training_ranges", "training_complex"):
        made: list[nn.Module] = []
        for index, param in enumerate(scenario.params):
            dtype = getattr(torch, param.dtype)
            block = Turns if dtype.is_complex else Multiplies
            made.append(block(f"block {index}", param.shape[0], dtype))
        return made
    if scenario.variant == "training_indices":
        (rows, _) = scenario.params[0].shape
        return [Looks("block 0", rows), Looks("block 1", rows // 2)]
    if scenario.variant == "training_frozen":
        return [
            Block("block 0").requires_grad_(False),
            LowRank("block 1"),
            Block("block 2").requires_grad_(False),
            LowRank("block 3"),
        ]
    if scenario.variant == "training_written":
        return written_blocks()
    if scenario.variant == "training_long":
        return late_blocks()
    if scenario.variant == PARTS.variant:
        return parted_blocks(scenario)
    if scenario.variant == IDLE.variant:
        return idle_blocks()
    if scenario.variant == "training_graphs":
        cuts = cutting_block(scenario, "block 3")
        counts = [Counts(f"block {index}") for index in (0, 2)]
        of_counts = [partial(_share, block) for block in counts]
        first, third = _one_nested(scenario, counts, of_counts)
        return [first, Attends("block 1"), third, cuts]
    if scenario.variant == "training_retained":
        late = LateBlock("block 3", "settings", {"drop": 0.0})
        plain = [Block(f"block {index}") for index in (0, 2)]
        shares: list[Callable[[], float]] = [partial(_share, block) for block in plain]
        shares.append(lambda: late.settings["drop"])
        first, third, last = _one_nested(scenario, [*plain, late], shares)
        return [first, Attends("block 1"), third, last]
    if scenario.variant == "training_many":
        (layers,) = scenario.params[0].shape
        return [Layers("block 0", layers), Block("block 1"), Block("block 2")]
    blocks = [Block("block 0"), Attends("block 1"), Block("block 2")]
    if scenario.variant == "training_single":
        return [*blocks, cutting_block(scenario, "block 3"), *_rows(scenario)]
    return blocks


def _share(block: Block) -> float:
    return block.dropout.p


def _one_nested(
    scenario: Scenario, blocks: Sequence[nn.Module], shares: Sequence[Callable[[], float]]
) -> list[nn.Module]:
    """Return blocks, with a drawn one nested.

    Args:
        scenario: the scenario.
        blocks: these.
        shares: returns the share of dropout, for each block.
    """
    numbers = generator(scenario, "nested")
    made = list(blocks)
    index = numbers.randrange(len(made))
    made[index] = nested(
        made[index],
        numbers,
        lambda: Grows() if numbers.random() < 0.5 else Drops(shares[index]),
    )
    return made


def _rows(scenario: Scenario) -> list[nn.Module]:
    """Return rows of layers, each of which a wrapper may cut into segments."""
    numbers = generator(scenario, "rows of layers")
    counts = [*range(3, 8), numbers.randint(8, 16)]
    numbers.shuffle(counts)
    return [nn.Sequential(*(Grows() for _ in range(count))) for count in counts]


@torch.no_grad()
def _fill(module: nn.Module, numbers: torch.Generator) -> None:
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=numbers)
        # Scales of a norm are around one, as those of a trained network.
        offset = 1.0 if parameter.dim() == 1 else 0.0
        parameter.copy_(values / WIDTH**0.5 + offset)


@torch.no_grad()
def _scale(net: Chain, scenario: Scenario) -> None:
    """Make the inside of wide blocks about one for inputs of the scenario's scale."""
    factor = 2.0 ** scenario.params[0].exponent
    for parameters in (block.parameters() for block in net.blocks):
        scale, shift = parameters
        scale /= factor
        shift *= factor
