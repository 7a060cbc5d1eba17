"""Networks with blocks to wrap, and a watch over the inside of the blocks. Runs in ranks only.

The networks compute in float64, where another order of operations changes a result by far less than
any mistake does; only under autocast, which takes float32, they do not. Sums of gradients have at
most two terms wherever a wrapper may put them together in another order: a wrapper that changes
nothing else gives the same bits.
"""

import builtins
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from conformance.ranks.drivers._drawing_blocks import drawing_blocks
from conformance.ranks.drivers._mixed_arguments import (
    Lists,
    MixedCalls,
    Mixes,
    drawn_kinds,
    drawn_results,
    entries,
    form,
    lone_result,
)
from conformance.ranks.drivers._module_states import HasState
from conformance.ranks.drivers._nested_blocks import wrap_levels
from conformance.scenarios.gradients import gradient
from conformance.scenarios.interrupts import ERROR
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator

BATCH = 6
WIDTH = 8
Wrap = Callable[[nn.Module], nn.Module]


class Watch:
    """Observes the forwards of blocks, of all blocks in this process.

    It is an object of the module, not an attribute of blocks: a block that is copied or saved then
    holds nothing that a user's block does not.

    Attributes:
        phase: the current work of the trainer.
        runs: by phase, how often each block's forward began.
        autocast: by phase, the dtypes in which autocast had the blocks compute.
        raises: the block that is to raise an exception; '' is none.
        raised: the name of the exception, which is Python's.
        generator: returns the state of torch's generators; None if states are not observed.
        states: by phase, the state of the generators at which each block's last forward began.
        results: by block, the form of the last result, if forms are observed.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.raises = ""
        self.raised = ERROR
        self.runs: dict[str, Counter[str]] = {}
        self.autocast: dict[str, list[str]] = {}
        self.generator: Callable[[], str] | None = None
        self.states: dict[str, dict[str, str]] = {}
        self.results: dict[str, str] = {}
        self._seen: list[tuple[str, StorageWeakRef, int]] = []

    def begin(self) -> None:
        """Forget all observations."""
        self.runs = {}
        self.autocast = {}
        self.states = {}
        self.results = {}
        self._seen = []

    def enters(self, block: str, device: str) -> None:
        """Note that a block's forward begins on a type of device."""
        self.runs.setdefault(self.phase, Counter())[block] += 1
        dtype = "none"
        if torch.is_autocast_enabled(device):
            dtype = str(torch.get_autocast_dtype(device))
        self.autocast[self.phase] = sorted({*self.autocast.get(self.phase, ()), dtype})
        if self.generator:
            self.states.setdefault(self.phase, {})[block] = self.generator()
        if self.raises == block:
            raise getattr(builtins, self.raised)(f"{block} raises as planned")

    def observed(self) -> dict[str, Any]:
        """Return the fields that a record has of the forwards, besides their numbers."""
        return {
            "autocast": self.autocast,
            "begins_at": self.states.get("backward", {}),
            "results": self.results,
        }

    def returns(self, block: str, result: Any) -> None:
        """Note the form of a call's result."""
        self.results[block] = form(result)

    def sees(self, block: str, tensor: torch.Tensor) -> torch.Tensor:
        """Note an activation of a block, which is neither its input nor its output."""
        storage = tensor.untyped_storage()
        self._seen.append((block, StorageWeakRef(storage), storage.nbytes()))
        return tensor

    def alive(self) -> dict[str, int]:
        """Return, by block, the bytes of its activations that still exist."""
        storages = {
            ref.cdata: (block, size) for block, ref, size in self._seen if not ref.expired()
        }
        found: Counter[str] = Counter()
        for block, size in storages.values():
            found[block] += size
        return dict(found)


WATCH = Watch()


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, called: str, drops: float = 0.0, batch: bool = False) -> None:
        super().__init__()
        self.called = called
        self.width = WIDTH
        # Before batch norm the gradient of a bias is zero: its value would be rounding alone.
        self.inner = nn.Linear(WIDTH, 2 * WIDTH, bias=not batch)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH) if batch else nn.LayerNorm(2 * WIDTH)
        self.dropout = nn.Dropout(drops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        inside = self.inner(x)
        for layer in (self.norm, nn.functional.gelu, self.dropout):
            inside = layer(WATCH.sees(self.called, inside))
        return x + self.outer(inside)


class Stateful(HasState, Block):
    """A block with a state beside its parameters."""


class BeginsWithNorm(nn.Module):
    """A block whose first layer is a norm, which autocast runs in full precision.

    Its inputs lie near ``OFFSET``, which the norm takes away: in half precision nothing else is
    left of them.
    """

    OFFSET = 512.0

    def __init__(self, called: str) -> None:
        super().__init__()
        self.called = called
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        normal = WATCH.sees(self.called, self.norm(x))
        inside = WATCH.sees(self.called, self.inner(normal))
        return normal + self.outer(nn.functional.gelu(inside))


class Offset(nn.Module):
    """Adds a number that a norm takes away."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + BeginsWithNorm.OFFSET


class Joins(nn.Module):
    """A block with arguments of many kinds, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        how: str,
        *,
        scale: torch.Tensor,
        sizes: tuple[int, ...],
        also: None,
        flip: bool,
    ) -> tuple[torch.Tensor, str, torch.Tensor]:
        assert also is None
        both = self.left(left) * scale + self.frozen(self.right(right))
        if flip:
            both = both.flip(1)
        return nn.functional.gelu(both), how, both.view(sizes).sum(1)


class Takes(nn.Module):
    """A block whose tensors come and go in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        left = given["left"]
        (right,) = given["rest"]
        return {"left": nn.functional.gelu(self.left(left)), "rest": [self.right(right).tanh()]}


class Router(nn.Linear):
    """A layer in a block that reads a tensor from an attribute, and leaves one in another.

    Attributes:
        prior: what another layer has computed.
        balance: a part of the loss, as a mixture of experts has it.
    """

    prior: torch.Tensor
    balance: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.balance = (super().forward(x) * self.prior).tanh()
        return self.balance


class Passes(nn.Module):
    """A block that reads tensors from attributes, and leaves some in others.

    Attributes:
        condition: what another layer has computed, such as the embedding of a class.
        conditions: the same in a list, and in a dict.
        balance: a part of the loss.
        balances: the same in a list.
        losses: the same in a dict.
    """

    condition: torch.Tensor
    conditions: tuple[list[torch.Tensor], dict[str, torch.Tensor]]
    balance: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.router = Router(WIDTH, WIDTH)
        self.balances: list[torch.Tensor] = []
        self.losses: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (in_list,), in_dict = self.conditions
        routed = self.router(x)
        self.balance = routed.cos()
        self.balances = [routed.sin()]
        self.losses = {"router": routed.exp()}
        return nn.functional.gelu(self.left(x) * self.condition * in_list + in_dict["bias"])


class Nest(nn.Module):
    """A block that holds another block, which is wrapped too."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.linear(x).tanh())


class Stack(nn.Module):
    """A layer, blocks, a layer.

    Attributes:
        by_name: the numbers of the blocks that are called by keyword alone.
    """

    def __init__(self, blocks: list[nn.Module], stem: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH) if stem else nn.Identity()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.by_name: frozenset[int] = frozenset()

    def wrap(self, wrap: Wrap) -> None:
        """Replace each block by its wrapper."""
        for index, block in enumerate(self.blocks):
            self.blocks[index] = wrap_levels(block, wrap)

    def forward(self, x: torch.Tensor, used: tuple[bool, ...] = ()) -> torch.Tensor:
        """Leave out the blocks that are not ``used``."""
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if not used or used[index]:
                x = block(x=x) if index in self.by_name else block(x)
        return self.head(x)

    def input_gradients(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients of the last inputs that have one, by names for records.

        Args:
            x: the input of the network, whose name is empty.
        """
        return {} if x.grad is None else {"": x.grad}


class Twice(Stack):
    """A block that is used twice, and shares a weight with a layer outside."""

    def __init__(self) -> None:
        super().__init__([Block("block")])
        self.shares = nn.Linear(WIDTH, 2 * WIDTH)
        self.shares.weight = self.blocks[0].inner.weight

    def forward(self, x: torch.Tensor, used: tuple[bool, ...] = ()) -> torch.Tensor:
        x = self.blocks[0](self.blocks[0](self.stem(x)).tanh())
        return self.head(self.shares(x)[:, :WIDTH])


class Calls(Stack):
    """Blocks that are called in several ways.

    As in self-attention, one tensor is both inputs of a block; and an input and a keyword of
    another. Three more blocks get drawn arguments: two give results in a drawn order, and
    one gives a tuple with one entry.

    Args:
        numbers: all other numbers are drawn from these.
        of_lone: those of the block with one result.
    """

    def __init__(self, numbers: random.Random, of_lone: random.Random) -> None:
        draws = (numbers, numbers, of_lone)
        mixes = [Mixes(WIDTH, drawn_kinds(numbers), drawn_results(numbers)) for _ in range(2)]
        mixes.append(Mixes(WIDTH, drawn_kinds(of_lone), lone_result(of_lone)))
        nest = Nest(Block("nest.block"))
        super().__init__([Joins(), nest, Joins(), Joins(), *mixes])
        self.other = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.numbers = numbers
        self.mixed = [
            MixedCalls(block, f"block {index}", draw, WATCH.returns)
            for index, (block, draw) in enumerate(zip(mixes, draws, strict=True), 4)
        ]
        self.of_lone = of_lone

    def wrap(self, wrap: Wrap) -> None:
        self.blocks[1].block = wrap(self.blocks[1].block)
        super().wrap(wrap)

    def forward(self, x: torch.Tensor, used: tuple[bool, ...] = ()) -> torch.Tensor:
        other = self.other(x)
        joined, summed = self._joined(0, self.stem(x), other, self.scale * 2)
        # Products of products would let three steps end in values that are not finite.
        same = self.blocks[1](joined).tanh()
        joined, of_two = self._joined(2, same, same, self.scale * 3)
        same = joined.tanh()
        made, of_three = self._joined(3, same, other.sin(), same)
        ends = [*self.numbers.sample((True, False), 2), self.of_lone.random() < 0.5]
        for index, ends_trained in enumerate(ends):
            mixed = self.mixed[index].call(self.blocks[4 + index], x, ends_trained)
            made = made + mixed.tanh()
        return self.head(made.tanh()) + (summed + of_two + of_three).repeat(1, 2)

    def input_gradients(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        given = {name: one for mixed in self.mixed for name, one in mixed.given.items()}
        of_given = {f", {name}": one.grad for name, one in given.items() if one.grad is not None}
        return super().input_gradients(x) | of_given

    def _joined(
        self, index: int, left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.blocks[index](
            left,
            right,
            "sum",
            scale=scale,
            sizes=(len(left), 2, WIDTH // 2),
            also=None,
            flip=True,
        )
        WATCH.returns(f"block {index}", made)
        joined, how, summed = entries(f"block {index}", made, tuple, 3)
        assert how == "sum"
        return joined, summed


class Containers(Stack):
    """Blocks with dicts and lists for their input and output; one tensor is in both of them.

    Two more blocks return lists of one entry and of two, in a drawn order.
    """

    def __init__(self, numbers: random.Random) -> None:
        counts = numbers.sample((1, 2), 2)
        super().__init__([Takes(), Takes(), *(Lists(WIDTH, count) for count in counts)])
        self.counts = counts
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, used: tuple[bool, ...] = ()) -> torch.Tensor:
        made = self.blocks[0]({"left": self.stem(x), "rest": [self.other(x)]})
        same = made["left"] + made["rest"][0]
        made = self.blocks[1]({"left": same, "rest": [same]})
        x = made["left"] + made["rest"][0]
        for index, count in enumerate(self.counts, 2):
            listed = self.blocks[index](x)
            WATCH.returns(f"block {index}", listed)
            x = torch.stack(tuple(entries(f"block {index}", listed, list, count))).sum(0)
        return self.head(x)


class Attributes(Stack):
    """A block whose tensors come and go in its attributes."""

    def __init__(self) -> None:
        super().__init__([Passes()])
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        # In a list, so that the block is not a module of the network twice.
        self.bare = [self.blocks[0]]

    def forward(self, x: torch.Tensor, used: tuple[bool, ...] = ()) -> torch.Tensor:
        (bare,) = self.bare
        bare.condition, in_list, in_dict, prior = (other(x).tanh() for other in self.others)
        bare.conditions = [in_list], {"bias": in_dict}
        bare.router.prior = prior
        made = self.head(self.blocks[0](self.stem(x)))
        left = bare.balance + bare.balances[0] + bare.losses["router"] + bare.router.balance
        return made + left


def network(scenario: Scenario) -> Any:
    """Return the network of a scenario, its weights fixed without any random state."""
    made = _layers(scenario)
    filled(made, 0)
    return made if scenario.variant in ("autocast", "module") else made.double()


def _layers(scenario: Scenario) -> Stack:
    variant = scenario.variant
    if variant == "random":
        of_modules = [Block(f"block {index}", drops=0.25, batch=True) for index in range(3)]
        momentum = generator(scenario, "momentum")
        for block in of_modules:
            block.norm.momentum = momentum.uniform(0.01, 0.5)
        return Stack([*of_modules, *drawing_blocks(WIDTH, generator(scenario, "blocks"))])
    if variant == "first":
        return Stack([Block("block")], stem=False)
    if variant == "autocast":
        # Behind a layer that runs in half precision the block's input would be in it, too.
        blocks = [BeginsWithNorm("block 0"), Block("block 1"), Block("block 2")]
        made = Stack(blocks, stem=False)
        made.stem = Offset()
        return made
    if variant == "unused":
        return Stack([Block(f"block {index}") for index in range(5)])
    if variant == "module":
        pair = nn.Sequential(Block("first"), Stateful("second"))
        nest = Nest(Stateful("nest.block"))
        return Stack([Stateful("block", drops=0.25, batch=True), pair, nest])
    if variant == "twice":
        return Twice()
    if variant == "calls":
        return Calls(generator(scenario, "arguments"), generator(scenario, "one result"))
    if variant == "containers":
        return Containers(generator(scenario, "containers"))
    if variant == "attributes":
        return Attributes()
    return Stack([Block(f"block {index}") for index in range(3)])


@torch.no_grad()
def filled(module: nn.Module, which: int) -> nn.Module:
    """Give all parameters known values, which differ for each ``which``."""
    for index, parameter in enumerate(module.parameters()):
        shape = tuple(parameter.shape)
        values = gradient("normal", shape, torch.float32, world=1, rank=99, step=which, param=index)
        # Scales of a norm are around one, as those of a trained network.
        offset = 1.0 if parameter.dim() == 1 else 0.0
        parameter.copy_(values / math.sqrt(WIDTH) + offset)
    return module
