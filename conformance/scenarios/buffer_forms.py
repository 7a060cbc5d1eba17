"""Dtypes, shapes, memory layouts and layers of a model's buffers under a strategy, and modes of the
layers, as data.

A running covariance may be kept transposed, a statistic of images as channels_last, and statistics
of many layers in one flat tensor. In drawn steps the modes of layers differ, as in fine-tuning: in
some the model is in evaluation mode, by ``ddp.eval()``, and a layer is trained, such as an adapter;
in others the model is trained, and a layer is in evaluation mode. As a BatchNorm does, a layer in
evaluation mode leaves its buffers as they are.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from conformance.scenarios.model import Scenario
from conformance.scenarios.model_buffers import BITS
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy_uses import models_of

BUFFERS = "buffers"  # a variant

DTYPES: Mapping[str, str] = {
    "running": "float32",
    "seen": "int64",
    "samples": "int32",
    "wrapped": "uint8",
    "mask": "bool",
    "total": "float64",
    "share": "float16",
    "level": "bfloat16",
    # The last ones: with a fault of torch there are no complex buffers.
    "phase": "complex64",
    "angle": "complex128",
}

# The model, which trains parameters, and layers that train none; the last one is in the first.
MODEL = ""
LAYERS = (MODEL, "frozen", "bare", "frozen.inner")

CONTIGUOUS = "contiguous"
SLICE = "a slice of a larger tensor"
TRANSPOSED = "transposed"
CHANNELS_LAST = "channels_last"
LAYOUTS = (TRANSPOSED, CHANNELS_LAST, SLICE)


@dataclass(frozen=True)
class Form:
    """A buffer of a model.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        layout: its layout in memory.
        layer: the name of the module that has it.
        in_state: whether state_dict() has it; DDP sends it in any case.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str
    layer: str
    in_state: bool


def has_buffers(scenario: Scenario) -> bool:
    """Whether the models of a scenario have buffers."""
    return scenario.variant == BUFFERS or models_of(scenario) > 1


@lru_cache(maxsize=16)
def forms(scenario: Scenario) -> Mapping[str, Form]:
    """Return the buffers of the scenario's model, by their names.

    Each layer has a buffer that is not complex. Each layout comes with two or more elements, and
    so do contiguous ones.
    """
    draws = generator(scenario, "layers of buffers")
    real = [name for name in DTYPES if not DTYPES[name].startswith("complex")]
    homes = dict(zip(draws.sample(real, len(real)), LAYERS, strict=False))
    # A count is a number, as in a BatchNorm.
    # Running statistics are another tensor later on, which is no slice.
    laid_out = [name for name in real if name not in ("seen", "mask", "running")]
    layouts = dict(zip(draws.sample(laid_out, len(laid_out)), (*LAYOUTS, CONTIGUOUS), strict=False))
    made = {}
    for name, dtype in DTYPES.items():
        layout = layouts.get(name) or draws.choice((*LAYOUTS, CONTIGUOUS))
        if name == "mask":
            # Of a mask alone the elements differ, so that their order in memory shows.
            layout = draws.choice(LAYOUTS[:2])
        layout = CONTIGUOUS if name == "seen" else layout
        made[name] = Form(
            dtype=dtype,
            shape=_shape(draws, name, layout),
            layout=layout,
            layer=homes.get(name) or draws.choice(LAYERS),
            in_state=name != "samples",
        )
    return made


@lru_cache(maxsize=64)
def modes(scenario: Scenario, step: int) -> Mapping[str, bool]:
    """Return whether the model and its layers are in training mode, by their names.

    They are in all steps if there are two models. If there is one, they are not in three drawn
    steps. In two of these, one after the other, the model is not and a layer is: in the second one,
    buffers that were not sent after the first are not sent either. In the third one the model is
    and a layer is not.
    """
    trained = dict.fromkeys(LAYERS, True)
    if models_of(scenario) > 1:
        return trained
    draws = generator(scenario, "modes of layers")
    count = len(scenario.steps)
    first = draws.randrange(count - 1)
    model_rests = (first, first + 1)
    layer_rests = draws.choice([at for at in range(count) if at not in model_rests])
    if step not in (*model_rests, layer_rests):
        return trained
    trained[MODEL] = step == layer_rests
    one, *others = draws.sample(LAYERS[1:], len(LAYERS) - 1)
    trained[one] = not trained[MODEL]
    draws_of_step = generator(scenario, f"modes of layers {step}")
    for layer in others:
        trained[layer] = draws_of_step.random() < 0.5
    return trained


def is_updated(scenario: Scenario, step: int, name: str) -> bool:
    """Whether the forwards of a step change a buffer: its layer is in training mode."""
    return modes(scenario, step)[forms(scenario)[name].layer]


def _shape(draws: random.Random, name: str, layout: str) -> tuple[int, ...]:
    """Return a shape with more than one element, and with more than one layout."""
    if name == "seen":
        return ()
    shapes = {
        TRANSPOSED: (draws.randint(2, 5), draws.randint(2, 5)),
        CHANNELS_LAST: (draws.randint(1, 2), draws.randint(2, 4), 2, draws.randint(1, 3)),
    }
    if name == "mask":
        shapes = {TRANSPOSED: (2, 8), CHANNELS_LAST: (2, 4, 1, 2)}
        assert all(math.prod(shape) == BITS for shape in shapes.values())
        return shapes.get(layout, (BITS,))
    return shapes.get(layout, (draws.randint(2, 9),))
