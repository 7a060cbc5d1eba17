"""Blocks with parts of their own modes, and blocks with idle parts. Runs in ranks only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from conformance.ranks.drivers._blocks import BATCH, WATCH, WIDTH
from conformance.ranks.drivers.base import RankDriver
from conformance.scenarios.model import Scenario
from conformance.scenarios.wrapper_parts import (
    BLOCKS,
    BRANCHES,
    NORMS,
    WAYS_OF_CHOOSING,
    WHOLE,
    NormOptions,
    chosen_branches,
    is_skipped,
    modes_of_parts,
    moment_of_evaluation,
    network_trains,
    options_of_norms,
    share_in_parts,
)

Draw = Callable[[Sequence[int]], torch.Tensor]

# The mode of a module, and the options of norms and dropouts.
_OPTIONS = ("training", "momentum", "eps", "track_running_stats", "p", "inplace")


class Parted(nn.Module):
    """A residual block with parts whose results depend on their mode.

    Its tail is a row of layers in which the next one lies, and so on.

    Args:
        called: its name.
        options: those of its norm, and of the norm in its tail.
    """

    def __init__(self, called: str, options: Sequence[NormOptions]) -> None:
        super().__init__()
        self.called = called
        of_norm, of_tail = options
        # Before batch norm the gradient of a bias is zero: its value would be rounding alone.
        self.inner = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(2 * WIDTH, momentum=of_norm.momentum, eps=of_norm.eps)
        self.dropout = nn.Dropout()
        self.tail = nn.Sequential(
            nn.Linear(2 * WIDTH, WIDTH, bias=False),
            nn.Sequential(
                nn.BatchNorm1d(WIDTH, momentum=of_tail.momentum, eps=of_tail.eps),
                nn.Sequential(nn.Dropout(), nn.Linear(WIDTH, WIDTH)),
            ),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        return x + self.tail(self.dropout(nn.functional.gelu(self.norm(self.inner(x)))))


class Experts(nn.Module):
    """A residual block with branches; one of them runs.

    Attributes:
        which: the number of the branch, if the forward gets none.
    """

    def __init__(self, called: str) -> None:
        super().__init__()
        self.called = called
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES))
        self.which = 0

    def forward(self, x: torch.Tensor, which: int | None = None) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        inside = torch.tanh(self.shared(x))
        return x + inside + self.experts[self.which if which is None else which](inside)


class Skips(nn.Module):
    """A residual block with a layer and a head that it may skip.

    Attributes:
        skips_layer: whether it skips the layer, as in stochastic depth.
    """

    def __init__(self, called: str) -> None:
        super().__init__()
        self.called = called
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Parameter(torch.empty(WIDTH))
        self.skips_layer = False

    def forward(self, x: torch.Tensor, skips_head: bool) -> torch.Tensor:
        WATCH.enters(self.called, x.device.type)
        inside = torch.tanh(self.shared(x))
        if not self.skips_layer:
            inside = inside + torch.tanh(self.layer(inside))
        return x + (inside if skips_head else inside * self.head)


def parted_blocks(scenario: Scenario) -> list[nn.Module]:
    """Return the blocks of ``wrapper_parts``."""
    options = options_of_norms(scenario)
    return [
        Parted(f"block {index}", [options[index, norm] for norm in NORMS])
        for index in range(BLOCKS)
    ]


def idle_blocks() -> list[nn.Module]:
    """Return the blocks of ``wrapper_idle``: one for each way to choose a branch, and another."""
    return [*(Experts(f"block of {way}") for way in WAYS_OF_CHOOSING), Skips("block that skips")]


def run_parts(
    driver: RankDriver,
    net: Any,
    inside: Sequence[Any],
    modules: Mapping[str, nn.Module],
    draw: Draw,
) -> None:
    """Run a forward and its backward with parts in modes of their own, and record the modes.

    Args:
        driver: of this rank.
        net: the network.
        inside: its blocks, without the wrapper.
        modules: all modules of the network as it was before the wrapping, by name.
        draw: draws values of a shape.
    """
    step = driver.recorder.step
    moment = moment_of_evaluation(driver.scenario, step)
    share = share_in_parts(driver.scenario, step)
    for block in inside:
        for part in block.modules():
            if isinstance(part, nn.Dropout):
                part.p = share
        # A norm that trains may count the recomputation, too: later steps begin anew.
        for name, buffer in block.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(draw(buffer.shape))
            elif name.endswith("running_var"):
                buffer.copy_(draw(buffer.shape).square() + 0.5)
            else:
                buffer.zero_()
    if moment == "before":
        _evaluate(net, draw)
    parts = _Parts(net, inside, modules)
    parts.set_modes(driver.scenario, step)
    parts.keep_buffers(driver, "begins")
    before = _options(modules)
    x = _input(draw)
    WATCH.phase = "forward"
    output = net(x)
    if moment == "between":
        _evaluate(net, draw)
        parts.set_modes(driver.scenario, step)
    WATCH.phase = "backward"
    output.backward(draw(output.shape).double())
    driver.recorder.event("parts", before=before, after=_options(modules))
    driver.keep("output/0", output)
    if x.grad is not None:
        driver.keep("input/0", x.grad)
    parts.keep_buffers(driver, "ends")


class _Parts:
    """The parts of a network's blocks as they are now: a wrapper may put others in their place.

    Args:
        net: the network.
        inside: its blocks, without the wrapper.
        modules: all modules of the network as it was before the wrapping, by name.
    """

    def __init__(self, net: Any, inside: Sequence[Any], modules: Mapping[str, nn.Module]) -> None:
        self._net = net
        self._inside = inside
        self._modules = modules

    def set_modes(self, scenario: Scenario, step: int) -> None:
        """Set the modes of the network, of its blocks, and then of single parts."""
        self._net.train(network_trains(scenario, step))
        for (block, name), trains in modes_of_parts(scenario, step).items():
            if name == WHOLE:
                self._net.blocks[block].train(trains)
                continue
            part = self._now(block, name)
            if part is self._before(block, name):
                part.training = trains
            else:
                # Its train() sets the mode of the layer that it holds.
                part.train(trains)

    def keep_buffers(self, driver: RankDriver, moment: str) -> None:
        """Record the buffers of all norms, at the begin or the end of a step."""
        for block in range(BLOCKS):
            for norm in NORMS:
                for name, buffer in self._now(block, norm).named_buffers():
                    last = name.rpartition(".")[2]
                    driver.keep(f"{moment}/{block}/{norm}/{last}", buffer)

    def _before(self, block: int, name: str) -> nn.Module:
        return self._modules[f"blocks.{block}.{name}"]

    def _now(self, block: int, name: str) -> nn.Module:
        """Return a part by its attribute, or the one before the wrapping if there is none."""
        part = self._inside[block]
        for attribute in name.split("."):
            part = getattr(part, attribute, None)
        return part if isinstance(part, nn.Module) else self._before(block, name)


def _options(modules: Mapping[str, nn.Module]) -> dict[str, bool | float | str | None]:
    """Return the mode and the options of all modules but the network, by name."""
    found = {}
    for name, module in modules.items():
        for option in _OPTIONS:
            if name and hasattr(module, option):
                value = getattr(module, option)
                is_plain = value is None or isinstance(value, (bool, int, float))
                found[f"{name}.{option}"] = value if is_plain else repr(value)
    return found


def _evaluate(net: Any, draw: Draw) -> None:
    WATCH.phase = "evaluation"
    net.eval()
    with torch.no_grad():
        net(_input(draw))


def run_idle(driver: RankDriver, net: Any, inside: Sequence[Any], draw: Draw) -> None:
    """Run a forward that leaves out some parts of each block, and its backward.

    Args:
        driver: of this rank.
        net: the network.
        inside: its blocks, without the wrapper.
        draw: draws values of a shape.
    """
    step = driver.recorder.step
    scenario = driver.scenario
    chosen = chosen_branches(scenario, step)
    by_argument, by_keyword, by_attribute, skips = net.blocks
    # A wrapper need not pass on attributes that are set.
    inside[2].which = chosen["attribute"]
    inside[3].skips_layer = is_skipped(scenario, "layer", step)
    x = _input(draw)
    WATCH.phase = "forward"
    made = by_attribute(by_keyword(by_argument(x, chosen["argument"]), which=chosen["keyword"]))
    output = skips(made, is_skipped(scenario, "head", step))
    WATCH.phase = "backward"
    output.backward(draw(output.shape).double())
    driver.keep("output/0", output)
    if x.grad is not None:
        driver.keep("input/0", x.grad)


def _input(draw: Draw) -> torch.Tensor:
    return draw((BATCH, WIDTH)).double().requires_grad_()
