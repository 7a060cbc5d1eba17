"""A DDP model with wrapped modules beside the same without. It checks itself, in its ranks."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import hooks_ref
from conformance import Case

WRAPPERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "plain": hooks_ref.checkpoint_wrapper,
    "reentrant": lambda module: hooks_ref.checkpoint_wrapper(
        module, hooks_ref.CheckpointImpl.REENTRANT
    ),
    "offload": hooks_ref.offload_wrapper,
    "both": lambda module: hooks_ref.offload_wrapper(hooks_ref.checkpoint_wrapper(module)),
}


class Block(torch.nn.Module):
    """Takes a keyword argument, draws a dropout mask, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return torch.nn.functional.dropout(
            self.norm(self.linear(x)).tanh() * factor + self.shift, 0.25
        )


class Net(torch.nn.Module):
    """Two blocks; the first is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.again = self.blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.again(self.blocks[0](self.first(x)), factor=0.5))


def network() -> Net:
    torch.manual_seed(11)
    return Net()


def trains(process_group: Any, rank: int, *, name: str) -> Case:
    """Three steps give the same bits, in outputs, gradients and parameters."""

    def train(net: torch.nn.Module) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(
            net, process_group=process_group, static_graph=name == "reentrant"
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        seen = []
        for step in range(3):
            torch.manual_seed(100 * step + rank)
            output = ddp(torch.randn(4, 6, requires_grad=True))
            output.square().sum().backward()
            seen += [
                output.detach().clone(),
                *(parameter.grad.clone() for parameter in ddp.parameters()),
            ]
            optimizer.step()
            optimizer.zero_grad()
        return seen + [parameter.detach().clone() for parameter in ddp.parameters()]

    def check() -> None:
        state = torch.get_rng_state()
        plain = network()
        wrapped = network()
        hooks_ref.apply_activation_checkpointing(
            wrapped, WRAPPERS[name], lambda module: isinstance(module, Block)
        )
        assert wrapped.again is wrapped.blocks[0]
        expected = train(plain)
        got = train(wrapped)
        torch.set_rng_state(state)
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
        copied = copy.deepcopy(plain)
        copied.load_state_dict(wrapped.state_dict())
        wrapped.load_state_dict(plain.state_dict())

    return Case(None, hooks_ref.noop_hook, after_backward=check)
