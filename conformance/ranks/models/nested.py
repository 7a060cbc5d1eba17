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


def _has_gradients(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad and parameter.numel() > 1
