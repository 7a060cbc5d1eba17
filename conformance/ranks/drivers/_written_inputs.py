"""A step in which tensors are changed in place before the backward. Runs in ranks only."""

import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from conformance.ranks.drivers._blocks import WATCH
from conformance.ranks.drivers._changed_products import PRODUCTS, ChangesProduct
from conformance.ranks.drivers._training_blocks import Chain
from conformance.ranks.drivers._written_blocks import (
    INTEGERS,
    Picks,
    Rectifies,
    integers,
    others_than,
)
from conformance.scenarios.wrapper_training import BY_BLOCKS, BY_PRODUCTS, OF_INTEGERS, OF_MODULES


class WrittenStep:
    """A forward, a change of tensors, and a backward.

    If blocks save these tensors, autograd raises an error in a network without the wrapper. There
    the gradients are those of unchanged tensors.

    Args:
        net: the network with wrapped blocks.
        inside: the blocks without the wrapper.
        beside: blocks that change the results of products, without the wrapper.
        parameters: of the network.
        way: one of ``scenarios/wrapper_training.py``.
        saves: whether blocks save the tensors that are changed.
        drawn: returns random values of a shape.
        numbers: draws integers.
    """

    def __init__(
        self,
        net: Chain,
        inside: Sequence[nn.Module],
        beside: Sequence[nn.Module],
        parameters: Mapping[str, nn.Parameter],
        way: str,
        saves: bool,
        drawn: Callable[[Sequence[int]], torch.Tensor],
        numbers: torch.Generator,
    ) -> None:
        self._net = net
        self._inside = inside
        self._beside = beside
        self._parameters = parameters
        self._way = way
        self._drawn = drawn
        self._numbers = numbers
        for block in inside:
            if isinstance(block, Rectifies):
                block.saves = saves
                block.writes = way in BY_BLOCKS

    def run(self, x: torch.Tensor, in_place: bool) -> torch.Tensor:
        """Return the output.

        Args:
            x: the input, which gets its gradient.
            in_place: whether tensors are changed that blocks have.
        """
        other = self._drawn(x.shape)
        grad = self._drawn(x.shape)
        owned = self._owned()
        before = [tensor.detach().clone() for tensor in owned]
        changed = [
            self._drawn(tensor.shape) if tensor.is_floating_point() else others_than(tensor)
            for tensor in owned
        ]
        WATCH.phase = "forward"
        try:
            output = self._forward(x, other, in_place)
            if in_place:
                _write(owned, changed)
            WATCH.phase = "backward"
            output.backward(grad)
        finally:
            _write(owned, before)
        return output

    def _owned(self) -> list[torch.Tensor]:
        """Return the parameters or buffers of blocks that are changed."""
        if self._way in ("ids_buffer", "mask_buffer", "buffers"):
            name = {"buffers": "gain"}.get(self._way, self._way.partition("_")[0])
            buffers = [dict(block.named_buffers()) for block in self._inside]
            return [named[name] for named in buffers if name in named]
        ending = {"weights": "weight", "biases": "bias"}.get(self._way)
        return [
            parameter
            for name, parameter in self._parameters.items()
            if ending and name.endswith(ending)
        ]

    def _forward(self, x: torch.Tensor, other: torch.Tensor, in_place: bool) -> torch.Tensor:
        if self._way in OF_MODULES:
            return self._net(x)
        if self._way == "staged":
            output = self._net(x)
            with torch.no_grad():
                (x if in_place else x.clone()).copy_(other)
            return output
        if self._way in OF_INTEGERS:
            return self._forward_of_integers(x, in_place)
        if self._way in BY_PRODUCTS:
            return self._forward_of_products(x)
        # A leaf that requires a gradient cannot be changed in place.
        stream = x * 2
        for index, block in enumerate(self._of_kind(Rectifies)):
            stream = self._next(block, stream, index, other, in_place)
        return stream

    def _next(
        self,
        block: nn.Module,
        stream: torch.Tensor,
        index: int,
        other: torch.Tensor,
        in_place: bool,
    ) -> torch.Tensor:
        """Run a block, and change its input or its output."""
        match self._way:
            case "first":
                return block(stream)
            case "first_by_name":
                return block(by_name=stream)
            case "keyword":
                made = block(by_name=stream)
            case "list":
                made = block(by_name=[stream])
            case "mapping":
                made = block({"h": stream})
            case "nested":
                made = block(by_name={"of layers": [(stream, None)]})
            case _:
                made = block(stream)
        if self._way == "output":
            stream = made if in_place else made.clone()
            return stream.add_(other)
        columns = slice(index, None, 2) if self._way == "columns" else slice(None)
        stream = stream if in_place else stream.clone()
        stream[:, columns].add_(made[:, columns])
        return stream

    def _forward_of_integers(self, x: torch.Tensor, in_place: bool) -> torch.Tensor:
        """Run blocks on indices and masks, one of which then gets the values of the next batch."""
        given = {name: value.to(x.device) for name, value in integers(self._numbers).items()}
        stream = x
        for block in self._of_kind(Picks):
            match OF_INTEGERS[self._way]:
                case "position":
                    stream = block(stream, *(given[name] for name in INTEGERS))
                case "keyword":
                    stream = block(stream, **given)
                case "mapping":
                    stream = block(stream, given)
        if in_place:
            written = given[self._way.partition(" ")[0]]
            written.copy_(others_than(written))
        return stream

    def _forward_of_products(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks that change a product of theirs, each another one."""
        seed = int(torch.randint(2**60, (), generator=self._numbers))
        numbers = random.Random(seed)
        products = numbers.sample(PRODUCTS, len(PRODUCTS))
        stream = x
        both = zip(self._net.beside, self._beside, strict=True)
        for (block, inside), product in zip(both, products, strict=True):
            assert isinstance(inside, ChangesProduct)
            inside.draw(self._way, product, numbers)
            stream = block(stream)
        return stream

    def _of_kind(self, kind: type[nn.Module]) -> list[nn.Module]:
        """Return the wrapped blocks that are of a class inside."""
        both = zip(self._net.blocks, self._inside, strict=True)
        return [block for block, inside in both if isinstance(inside, kind)]


@torch.no_grad()
def _write(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
