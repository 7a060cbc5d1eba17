"""The names and options of the parts of blocks."""

from dataclasses import replace

import torch

from conformance.ranks.drivers._parts_of_blocks import parted_blocks
from conformance.scenarios.wrapper_parts import NORMS, PARTS, PARTS_OF_BLOCK, options_of_norms


def test_modes_are_drawn_for_all_modules_of_a_block() -> None:
    for block in parted_blocks(PARTS):
        assert tuple(dict(block.named_modules())) == PARTS_OF_BLOCK


def test_norms_have_the_options_that_are_drawn() -> None:
    scenario = replace(PARTS, session_seed=7)
    options = options_of_norms(scenario)
    for index, block in enumerate(parted_blocks(scenario)):
        for name in NORMS:
            norm = block.get_submodule(name)
            assert isinstance(norm, torch.nn.BatchNorm1d)
            assert (norm.momentum, norm.eps) == options[index, name]
    assert len({momentum for momentum, _ in options.values()}) >= 5
    assert None in {momentum for momentum, _ in options.values()}
