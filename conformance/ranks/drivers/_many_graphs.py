"""Steps of a wrapped network with many graphs. Runs in ranks only."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from conformance.ranks.drivers._blocks import WATCH
from conformance.ranks.drivers._graphs_alive import Draw, Keep
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.wrapper_graphs import (
    BACKWARD,
    FIRST_IN_TURNS,
    FORWARD,
    passes_in_turns,
    share_in_graphs,
)

MakeInput = Callable[[int], torch.Tensor]


def run_graphs(
    net: Any,
    inside: Sequence[Any],
    scenario: Scenario,
    step: int,
    make_input: MakeInput,
    draw: Draw,
    keep: Keep,
) -> None:
    """Run several forwards, and then their backwards in another order; in later steps they take
    turns.

    Args:
        net: the network.
        inside: its blocks, without the wrapper.
        scenario: decides the orders.
        step: the number of the step.
        make_input: makes an input of a number of rows.
        draw: draws a gradient.
        keep: records a result.
    """
    inputs = [make_input(rows) for rows in scenario.params[step].shape]
    if step < FIRST_IN_TURNS:
        outputs = _run_at_once(net, scenario, step, inputs, make_input, draw)
    else:
        outputs = _run_in_turns(net, inside, scenario, step, inputs, draw)
    for place, (x, output) in enumerate(zip(inputs, outputs, strict=True)):
        keep(f"output/{place}", output)
        keep(f"input/{place}", x.grad)
    for index, block in enumerate(inside):
        for name, buffer in block.named_buffers():
            keep(f"buffer/{index}.{name}", buffer)


def _run_at_once(
    net: Any,
    scenario: Scenario,
    step: int,
    inputs: Sequence[torch.Tensor],
    make_input: MakeInput,
    draw: Draw,
) -> list[torch.Tensor]:
    """Run all forwards before the first backward."""
    WATCH.phase = "forward"
    outputs = []
    for place, x in enumerate(inputs):
        outputs.append(net(x))
        if place == 0:
            # Nobody runs the backward of this one.
            net(make_input(3))
    with torch.no_grad():
        net(make_input(2))
    grads = [draw(output.shape) for output in outputs]
    WATCH.phase = "backward"
    for place in _order(scenario, step, len(inputs)):
        outputs[place].backward(grads[place])
    return outputs


def _run_in_turns(
    net: Any,
    inside: Sequence[Any],
    scenario: Scenario,
    step: int,
    inputs: Sequence[torch.Tensor],
    draw: Draw,
) -> list[torch.Tensor]:
    """Run forwards and backwards in a drawn sequence, in some steps with dropout."""
    share = share_in_graphs(scenario, step)
    for block in inside:
        if hasattr(block, "dropout"):
            block.dropout.p = share
    grads = [draw(x.shape) for x in inputs]
    outputs: dict[int, torch.Tensor] = {}
    for direction, graph in passes_in_turns(scenario, step):
        WATCH.phase = direction
        if direction == BACKWARD:
            outputs[graph].backward(grads[graph])
            continue
        assert direction == FORWARD
        if share:
            # Recomputations may draw from the generator, too: with the claim draws_anew.
            seed = generator(scenario, f"seed/{step}/{graph}").getrandbits(60)
            torch.manual_seed(seed)
        outputs[graph] = net(inputs[graph])
    return [outputs[graph] for graph in range(len(inputs))]


def _order(scenario: Scenario, step: int, count: int) -> Sequence[int]:
    """Return the order of backwards: that of forwards, the reverse, or a drawn one."""
    if step == 0:
        return range(count)
    if step == 1:
        return range(count)[::-1]
    key = f"{scenario.session_seed}/order/{step}"
    return random.Random(key).sample(range(count), count)


def run_many(
    blocks: Sequence[Any],
    graphs: int,
    order: Sequence[int],
    make_input: MakeInput,
    draw: Draw,
    keep: Keep,
) -> None:
    """Run many graphs of blocks, or one of a block with many layers.

    Args:
        blocks: these, in a row.
        graphs: their number.
        order: of the backwards.
        make_input: makes an input of a number of rows.
        draw: draws a gradient.
        keep: records a result.
    """
    inputs = [make_input(2) for _ in range(graphs)]
    outputs = inputs
    WATCH.phase = "forward"
    for block in blocks:
        outputs = [block(x) for x in outputs]
    grads = [draw(output.shape) for output in outputs]
    WATCH.phase = "backward"
    for place in order:
        outputs[place].backward(grads[place])
    present = [x.grad for x in inputs if x.grad is not None]
    keep("output/all", torch.cat(outputs))
    keep("input/all", torch.cat(present) if present else None)
