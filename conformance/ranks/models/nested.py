"""Submodules for the parameters of a probe, as models have that are no list of layers."""

import random

import torch
from torch import nn


def nest(probe: nn.Module, seed: str) -> None:
    """Put drawn parameters of a probe into submodules, and let one parameter have two names.

    Each parameter lies in the probe itself, in its submodule ``block``, or in ``block.layer``; two
    of these have submodules, and parameters beside them, as the token of a vision transformer is. A
    further submodule, ``head``, has one of the parameters too: a tied weight. The modes of training
    of the submodules are drawn; one is in evaluation mode at least, and one is not.

    Args:
        probe: has its dense parameters in itself.
        seed: of the draws, the same on all ranks.
    """
    draw = random.Random(f"{seed}/modules")
    block = nn.Module()
    layer = nn.Module()
    head = nn.Module()
    parameters = list(probe._parameters.items())
    draw.shuffle(parameters)
    homes = [probe, block, layer]
    # The first three go to different modules.
    homes += [draw.choice((probe, probe, block, layer)) for _ in parameters[len(homes) :]]
    for home, (name, parameter) in zip(homes, parameters, strict=False):
        if home is not probe:
            delattr(probe, name)
            home.register_parameter(name, parameter)
    tied = draw.choice([one for _, one in parameters if _has_gradients(one)])
    head.register_parameter("tied", tied)
    block.add_module("layer", layer)
    probe.add_module("block", block)
    probe.add_module("head", head)
    modules = [block, layer, head]
    draw.shuffle(modules)
    modes = [True, False, draw.random() < 0.5]
    for module, is_training in zip(modules, modes, strict=True):
        # Not by train() and eval(), which set the modes of all parts.
        module.training = is_training


def put_buffers_into_layers(probe: nn.Module, seed: str) -> dict[str, nn.Module]:
    """Put drawn buffers of a probe into layers that train no parameters, as a frozen BatchNorm has.

    A layer has frozen parameters alone, another one has no parameters, and so has one inside of the
    first. Each has a buffer, and so has the probe itself, whose parameters are trained.

    Args:
        probe: has its buffers in itself.
        seed: of the draws, the same on all ranks.

    Returns:
        The layers by the names of their buffers.
    """
    draw = random.Random(f"{seed}/layers of buffers")
    frozen = nn.Module()
    for name in ("weight", "bias"):
        value = torch.ones(draw.randint(1, 9))
        frozen.register_parameter(name, nn.Parameter(value, requires_grad=False))
    bare = nn.Module()
    inner = nn.Module()
    names = list(probe._buffers)
    draw.shuffle(names)
    homes = [probe, frozen, bare, inner]
    homes += [draw.choice((probe, frozen, frozen, bare, inner)) for _ in names[len(homes) :]]
    found = {name: home for name, home in zip(names, homes, strict=True) if home is not probe}
    saved = probe.state_dict()
    for name, home in found.items():
        buffer = probe._buffers[name]
        delattr(probe, name)
        home.register_buffer(name, buffer, persistent=name in saved)
    frozen.add_module("inner", inner)
    probe.add_module("bare", bare)
    probe.add_module("frozen", frozen)
    return found


def _has_gradients(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad and parameter.numel() > 1
