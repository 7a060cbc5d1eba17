"""A probe with buffers of many dtypes and layouts, in itself and in layers that train nothing."""

import random

import torch
from torch import nn

from conformance.ranks.models.probe import Probe
from conformance.scenarios.buffer_forms import MODEL, SLICE, Form, forms, modes
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.model_buffers import BITS, LEVEL, Update
from conformance.scenarios.seeds import generator
from conformance.torch_versions.faults import faults_of


class BufferedProbe(Probe):
    """A probe with running statistics, as a BatchNorm's, and buffers of other dtypes, which each
    forward updates.

    Attributes:
        homes: the modules that have the buffers, by the names of these.
    """

    def __init__(self, params: tuple[Param, ...], level: float, rank: int) -> None:
        super().__init__(params, level, rank)
        self.homes: dict[str, nn.Module] = {}

    def add_buffers(self, scenario: Scenario) -> None:
        """Make the buffers of a scenario, with zeros, and the layers that have them.

        A layer has frozen parameters alone, as a frozen BatchNorm has; another one has no
        parameters, and so has one inside of the first.
        """
        draw = generator(scenario, "parameters beside buffers")
        frozen = nn.Module()
        for name in ("weight", "bias"):
            value = torch.ones(draw.randint(1, 9))
            frozen.register_parameter(name, nn.Parameter(value, requires_grad=False))
        frozen.add_module("inner", nn.Module())
        self.add_module("bare", nn.Module())
        self.add_module("frozen", frozen)
        for name, form in forms(scenario).items():
            # With a fault, DDP sends no complex tensors.
            if form.dtype.startswith("complex") and faults_of(torch.__version__):
                continue
            home = self.get_submodule(form.layer)
            home.register_buffer(name, _zeros(form, draw), persistent=form.in_state)
            self.homes[name] = home

    def forward(
        self, grads: list[torch.Tensor | None], update: Update | None = None
    ) -> torch.Tensor:
        """Return the loss, and update the buffers as ``scenarios/model_buffers.py`` has it."""
        if update is not None:
            self._update(update)
        return super().forward(grads)

    @torch.no_grad()
    def clear_buffers(self) -> None:
        """Set all buffers to zeros, as ``reset_running_stats()`` does."""
        for buffer in self.buffers():
            buffer.zero_()

    @torch.no_grad()
    def _update(self, update: Update) -> None:
        for name, home in self.homes.items():
            if home.training:
                _update_one(home, name, update)


def set_modes(model: nn.Module, probe: nn.Module, scenario: Scenario, step: int) -> None:
    """Give DDP, the probe inside and its layers their modes in a step.

    Args:
        model: the probe in DDP.
        probe: the probe.
        scenario: the scenario.
        step: the step.
    """
    for name, is_training in modes(scenario, step).items():
        # Not by train() and eval(), which set the modes of all parts.
        probe.get_submodule(name).training = is_training
    model.training = modes(scenario, step)[MODEL]


def turn_mask(mask: torch.Tensor, update: Update) -> None:
    """Rotate a mask of bools, and change the bits of an update."""
    bits = torch.tensor([bool(update.mask >> bit & 1) for bit in range(BITS)], device=mask.device)
    mask.copy_(mask.roll(1) ^ bits.view(mask.shape))


def _update_one(home: nn.Module, name: str, update: Update) -> None:
    buffer: torch.Tensor = getattr(home, name)
    match name:
        case "running":
            # Another tensor in each forward, as many modules have it.
            home.running = buffer.lerp(torch.full_like(buffer, update.statistic), 0.5)
        case "mask":
            turn_mask(buffer, update)
        case "phase":
            buffer.mul_(1j).add_(update.statistic)
        case "angle":
            buffer.mul_(1j).add_(update.added("float64"))
        case "share":
            buffer.copy_((buffer.float() + update.added("float16")) % 2**11)
        case "level":
            buffer.copy_((buffer.float() / LEVEL + update.added("bfloat16")) % 256 * LEVEL)
        case "total":
            buffer.add_(update.added("float64"))
        case _:
            buffer.add_(update.added(str(buffer.dtype).removeprefix("torch.")))


def _zeros(form: Form, draw: random.Random) -> torch.Tensor:
    zeros = torch.zeros(form.shape, dtype=getattr(torch, form.dtype))
    if form.layout != SLICE:
        return lay_out(zeros, form.layout)
    before = draw.randint(1, 9)
    whole = zeros.new_zeros(before + zeros.numel() + draw.randint(1, 9))
    return whole[before : before + zeros.numel()].view(form.shape)
