"""Graphs of a wrapped network that live together, or through several backwards.

Runs in ranks only.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from conformance.ranks.drivers._blocks import WATCH
from conformance.scenarios.model import Scenario
from conformance.scenarios.wrapper_training import (
    BACKWARD_UNDER,
    FORWARD_UNDER,
    OTHER_FORWARD,
    has_one_backward,
    order_of_backwards,
    orders_of_settings,
    retained_share,
)

Draw = Callable[[Sequence[int]], torch.Tensor]
Keep = Callable[[str, torch.Tensor | None], None]

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def evaluate_between(net: Any, step: int, x: torch.Tensor) -> None:
    """In two of three steps, run the network under another autocast than that of the forward
    whose backward is to come.
    """
    WATCH.phase = OTHER_FORWARD
    match step % 3:
        case 1:
            with torch.no_grad():
                net(x)
        case 2:
            with torch.no_grad(), torch.autocast(x.device.type, dtype=torch.bfloat16):
                net(x)


def run_under_settings(
    net: Any,
    scenario: Scenario,
    step: int,
    make_input: Callable[[], torch.Tensor],
    draw: Draw,
    keep: Keep,
) -> None:
    """Run forwards under several settings of autocast, and then their backwards without it: each
    for itself, or all in one.
    """
    forwards, backwards = orders_of_settings(scenario, step)
    inputs = {name: make_input() for name in forwards}
    outputs: dict[str, torch.Tensor] = {}
    for name in forwards:
        WATCH.phase = f"{FORWARD_UNDER}{name}"
        with _setting(name, inputs[name].device.type):
            outputs[name] = net(inputs[name])
    grads = {name: draw(outputs[name].shape).to(outputs[name].dtype) for name in backwards}
    if has_one_backward(step):
        WATCH.phase = "backward"
        torch.autograd.backward([outputs[name] for name in backwards], list(grads.values()))
    else:
        for name, grad in grads.items():
            WATCH.phase = f"{BACKWARD_UNDER}{name}"
            outputs[name].backward(grad)
    for name in forwards:
        keep(f"output/{name}", outputs[name])
        keep(f"input/{name}", inputs[name].grad)


def _setting(name: str, device: str) -> AbstractContextManager[Any]:
    if name == "float32":
        return nullcontext()
    return torch.autocast(device, dtype=getattr(torch, name))


def run_retained(
    net: Any,
    inside: Sequence[Any],
    scenario: Scenario,
    step: int,
    make_input: Callable[[], torch.Tensor],
    draw: Draw,
    keep: Keep,
    keep_gradients: Callable[[str], None],
) -> None:
    """Run several backwards of one graph or more, with other gradients of the output.

    Args:
        net: the network.
        inside: its blocks, without the wrapper.
        scenario: decides the share of dropout in blocks, and the order of backwards.
        step: the number of the step.
        make_input: makes the input of a graph.
        draw: draws a gradient.
        keep: records a result.
        keep_gradients: records the gradients of parameters.
    """
    share = retained_share(scenario, step)
    order = order_of_backwards(scenario, step)
    inputs = [make_input() for _ in {*order}]
    first, _, third, last = inside
    first.dropout.p = third.dropout.p = last.settings["drop"] = share
    WATCH.phase = "forward"
    outputs = [net(x) for x in inputs]
    for graph, output in enumerate(outputs):
        keep(f"output/{graph}", output)
    WATCH.phase = "backward"
    for place, graph in enumerate(order):
        if len(inputs) > 1:
            # A sum of many gradients would be further away from the one without the wrapper.
            for tensor in (*inputs, *net.parameters()):
                tensor.grad = None
        is_over = graph not in order[place + 1 :]
        outputs[graph].backward(draw(outputs[graph].shape), retain_graph=not is_over)
        if place + 1 < len(order):
            number = f"{graph} " * (len(inputs) > 1)
            moment = f"after the {_ORDINALS[place]} backward"
            keep(f"input/{number}{moment}", inputs[graph].grad)
            keep_gradients(f" {moment}")
    keep(f"input/{order[-1]}", inputs[order[-1]].grad)
