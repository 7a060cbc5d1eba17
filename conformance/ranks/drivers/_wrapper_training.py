"""The steps of the scenarios of ``scenarios/wrapper_training.py``, with wrapped blocks.

The same steps without the wrapper run in other processes. All values are drawn by generators of
the kit's own, from the session's seed.
"""

import gc
import itertools
import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch

from conformance.ranks.drivers._blocks import BATCH, WATCH, WIDTH, Wrap
from conformance.ranks.drivers._convolutions import convolution_shapes, without_tf32
from conformance.ranks.drivers._exact_factors import clear_all_but_one
from conformance.ranks.drivers._expanded_views import expanded_shape
from conformance.ranks.drivers._graphs_alive import (
    evaluate_between,
    run_retained,
    run_under_settings,
)
from conformance.ranks.drivers._late_draws import draw_in
from conformance.ranks.drivers._many_graphs import run_graphs, run_many
from conformance.ranks.drivers._module_hooks import generators
from conformance.ranks.drivers._nested_blocks import innermost
from conformance.ranks.drivers._parts_of_blocks import run_idle, run_parts
from conformance.ranks.drivers._training_blocks import (
    COLUMNS,
    LOOKS,
    add_layer,
    replace_weight,
    training_network,
)
from conformance.ranks.drivers._written_inputs import WrittenStep
from conformance.ranks.drivers.base import KIT, RankDriver
from conformance.ranks.instruments import process_state
from conformance.scenarios.wrapper import blocks_by_name
from conformance.scenarios.wrapper_graphs import GRAPHS, share_in_graphs
from conformance.scenarios.wrapper_parts import PARTS
from conformance.scenarios.wrapper_training import (
    ADDS,
    COMPLEX,
    HALF,
    INDICES,
    LARGE,
    LONG,
    PENALTY,
    REPLACES,
    RETAINED,
    SPECIAL_VALUES,
    evaluates_before,
    first_with_dropout,
    has_settings,
    has_trained_input,
    order_of_writing,
    retained_share,
    ways_of_drawing,
)
from conformance.torch_versions.private import saved_tensors_are_packed

_Value = TypeVar("_Value")
# Ways to compute one gradient alone, and whether parameters have gradients before.
_WAYS = tuple(itertools.product(("grad", "backward", "parameter"), (False, True)))
# Here a wrapper may raise an error: rules tell an error from a wrong result.
MAY_REFUSE = (RETAINED.name, PENALTY.name, COMPLEX.name)


class WrapperTraining:
    """Runs a network with wrapped blocks on one rank; its parameters stay the same.

    Args:
        driver: of this rank.
        wrap: wraps a module; returns the module itself if there is no subject.
    """

    def __init__(self, driver: RankDriver, wrap: Wrap) -> None:
        self._driver = driver
        self._scenario = driver.scenario
        weights = self._generator("weights")
        self._net = training_network(self._scenario, weights).to(driver.device)
        # Wrapping may rename parameters and modules.
        self._parameters = dict(self._net.named_parameters())
        modules = dict(self._net.named_modules())
        self._inside = [innermost(block) for block in self._net.blocks]
        self._beside = list(self._net.beside)
        self._shapes = [*convolution_shapes(self._scenario), expanded_shape(self._scenario)]
        # A wrapper may put others in the place of layers.
        self._low = getattr(self._inside[-1], "down", torch.nn.Identity())
        self._net.wrap(wrap)
        network = (driver, self._net, self._inside)
        works: dict[str, Callable[[], None]] = {
            "training_single": self._single,
            "training_large": self._large,
            "training_ranges": self._ranges,
            "training_complex": self._ranges,
            "training_graphs": self._graphs,
            "training_many": self._many,
            "training_retained": self._retained,
            "training_penalty": self._penalty,
            "training_inputs": self._inputs,
            "training_written": self._written,
            "training_frozen": self._frozen,
            "training_indices": self._indices,
            "training_half": self._half,
            "training_long": self._plain,
            "training_parts": partial(run_parts, *network, modules, self._drawn),
            "training_idle": partial(run_idle, *network, self._drawn),
        }
        self._work = works[self._scenario.variant]

    def run(self) -> None:
        """Run all steps, or those before the wrapper refuses one."""
        for step, kind in enumerate(self._scenario.steps):
            self._driver.begin_step(step, kind)
            # Dropout draws the same numbers with and without the wrapper.
            torch.manual_seed(1000 * step + self._driver.rank)
            self._values = self._generator(f"values/{step}/{self._driver.rank}")
            WATCH.begin()
            if not self._step():
                return

    def _step(self) -> bool:
        driver = self._driver
        for parameter in self._parameters.values():
            parameter.grad = None
        drawn = process_state.TORCHS_GENERATORS if self._draws() else ()
        try:
            with driver.inside("forward and backward", drawn=drawn):
                self._work()
        except Exception as error:
            if driver.without_subject or self._scenario.name not in MAY_REFUSE:
                raise
            driver.activity = KIT
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            driver.recorder.event("refused", error=text, lacks=[])
            return False
        finally:
            WATCH.phase = ""
        driver.recorder.event("stepped", generator=generators(), packs=saved_tensors_are_packed())
        driver.recorder.event("ran", **WATCH.observed(), **WATCH.runs)
        if not self._is_unrecorded():
            self._keep_gradients("")
        return True

    def _draws(self) -> bool:
        """Whether dropout of the kit's model draws in this step."""
        if self._scenario.variant == LONG.variant:
            return self._driver.recorder.step >= first_with_dropout(self._scenario)
        if self._scenario.variant == RETAINED.variant:
            return retained_share(self._scenario, self._driver.recorder.step) > 0
        if self._scenario.variant == GRAPHS.variant:
            return share_in_graphs(self._scenario, self._driver.recorder.step) > 0
        return self._scenario.variant in (INDICES.variant, PARTS.variant)

    # The work of a step, by the scenario's variant.

    def _plain(self) -> None:
        """Run one forward and its backward; the forward in float16 if the scenario has autocast."""
        rows = BATCH
        if self._scenario.variant == LONG.variant:
            rows = self._scenario.params[0].shape[self._driver.recorder.step]
            ways = ways_of_drawing(self._scenario, self._driver.recorder.step)
            self._net.arguments = draw_in(ways, self._inside)
            # Without rows nothing is drawn, and the next recomputation may begin there, too.
            WATCH.generator = generators if rows and self._draws() else None
            if evaluates_before(self._scenario, self._driver.recorder.step):
                self._net.evaluate(self._input(rows))
        x = self._input(rows)
        casts: torch.autocast | nullcontext[None] = nullcontext()
        if self._scenario.variant == HALF.variant:
            casts = torch.autocast(self._driver.device.type, dtype=torch.float16)
            self._net.by_name = blocks_by_name(self._scenario, self._driver.recorder.step)
        WATCH.phase = "forward"
        if self._scenario.variant == LONG.variant and self._driver.recorder.step % 3 == 1:
            # Nobody runs the backward of this one.
            self._net(self._input(rows))
        with casts:
            output = self._net(x)
        if self._scenario.variant == HALF.variant:
            evaluate_between(self._net, self._driver.recorder.step, self._input(rows))
        WATCH.phase = "backward"
        output.backward(self._drawn(output.shape).to(output.dtype))
        self._keep("output/0", output)
        self._keep("input/0", x.grad)

    def _single(self) -> None:
        """Run the network, and beside it convolutions and a block that expands tensors, on inputs
        of their own."""
        self._plain()
        inputs = [self._drawn(shape).requires_grad_() for shape in self._shapes]
        WATCH.phase = "forward"
        with without_tf32(self._driver.device):
            outputs = [block(x) for block, x in zip(self._net.beside, inputs, strict=True)]
            WATCH.phase = "backward"
            torch.autograd.backward(outputs, [self._drawn(output.shape) for output in outputs])
        for x, output in zip(inputs, outputs, strict=True):
            self._keep(f"output/of {x.dim()} dimensions", output)
            self._keep(f"input/of {x.dim()} dimensions", x.grad)

    def _large(self) -> None:
        """Run each wide block on an input of its own, and measure memory; the first step is
        small."""
        is_small = self._driver.recorder.step == 0
        blocks = list(zip(self._net.blocks, self._inside, strict=True))
        blocks = blocks[-1:] if is_small else blocks[:-1]
        scale = 2.0 ** self._scenario.params[0].exponent
        inputs = [
            (self._drawn(inside.scale.shape) * scale).requires_grad_() for _, inside in blocks
        ]
        if not is_small and not self._is_unrecorded() and self._scenario.name == LARGE.name:
            clear_all_but_one(inputs, self._values)
        grads = [self._drawn(x.shape) for x in inputs]
        before = _memory()
        WATCH.phase = "forward"
        outputs = [block(x) for (block, _), x in zip(blocks, inputs, strict=True)]
        between = _memory()
        WATCH.phase = "backward"
        torch.autograd.backward(outputs, grads)
        WATCH.phase = ""
        results = [output.detach() for output in outputs]
        # They hold the graph.
        del outputs
        after = _memory()
        self._driver.recorder.event("memory", before=before, between=between, after=after)
        if not self._is_unrecorded():
            for index, (x, result) in enumerate(zip(inputs, results, strict=True)):
                self._keep(f"output/{index}", result)
                self._keep(f"input/{index}", x.grad)

    def _ranges(self) -> None:
        """Run each block on numbers of all magnitudes of its dtype; in the second step on NaN and
        infinities, too; and in later ones on plain numbers, with one other among them.
        """
        step = self._driver.recorder.step
        outputs = []
        inputs = []
        grads = []
        WATCH.phase = "forward"
        for block, inside in zip(self._net.blocks, self._inside, strict=True):
            factors = inside.factors(self._values, step > SPECIAL_VALUES)
            with torch.no_grad():
                inside.first.copy_(factors.first)
                inside.second.copy_(factors.second)
            if step == SPECIAL_VALUES and factors.x.dim() == 1:
                ends = torch.tensor([math.inf, -math.inf, math.nan], dtype=factors.x.dtype)
                factors.x.view(-1)[[0, len(factors.x) // 2, -1]] = ends.to(factors.x.device)
            inputs.append(factors.x.requires_grad_())
            grads.append(factors.grad)
            outputs.append(block(inside.given(inputs[-1])))
        WATCH.phase = "backward"
        torch.autograd.backward(outputs, grads)
        for index, (x, output) in enumerate(zip(inputs, outputs, strict=True)):
            self._keep(f"output/{index}", output)
            self._keep(f"input/{index}", x.grad)

    def _graphs(self) -> None:
        """Run several graphs at once: all forwards come first, or they take turns."""
        step = self._driver.recorder.step
        functions = (self._input, self._drawn, self._keep)
        run_graphs(self._net, self._inside, self._scenario, step, *functions)

    def _many(self) -> None:
        """Run one block of many layers; in the second step, many graphs of two small blocks."""
        layers, *small = self._net.blocks
        is_first = self._driver.recorder.step == 0
        blocks = [layers] if is_first else small
        (graphs,) = (1,) if is_first else self._scenario.params[1].shape
        order = self._drawn_order(range(graphs))
        run_many(blocks, graphs, order, self._input, self._drawn, self._keep)

    def _retained(self) -> None:
        """Run several backwards of one graph, or of more; in later steps blocks have dropout."""
        step = self._driver.recorder.step
        functions = (self._input, self._drawn, self._keep, self._keep_gradients)
        run_retained(self._net, self._inside, self._scenario, step, *functions)

    def _half(self) -> None:
        """Run one forward under autocast to float16, or several under other settings each."""
        step = self._driver.recorder.step
        if not has_settings(step):
            self._plain()
            return
        self._net.by_name = blocks_by_name(self._scenario, step)
        run_under_settings(self._net, self._scenario, step, self._input, self._drawn, self._keep)

    def _penalty(self) -> None:
        """Add the norm of the input's gradient to the loss."""
        x = self._input()
        WATCH.phase = "forward"
        output = self._net(x)
        self._keep("output/0", output)
        WATCH.phase = "backward"
        # The gradient of the output depends on the output: a once_differentiable function sees that
        # its backward is differentiated, and can say so.
        first = output.square().mean()
        (slope,) = torch.autograd.grad(first, x, create_graph=True)
        loss = first + slope.square().sum()
        loss.backward()
        self._keep("input/in the loss", slope)
        self._keep("loss/0", loss)
        self._keep("input/0", x.grad)

    def _inputs(self) -> None:
        """Ask for one gradient alone; then train on another input, which adds to gradients."""
        (way, has_gradients) = self._drawn_order(_WAYS)[self._driver.recorder.step]
        if has_gradients:
            for parameter in self._parameters.values():
                parameter.grad = self._drawn(parameter.shape)
        x = self._input()
        grads = [self._drawn(x.shape), self._drawn(x.shape)]
        other = self._input()
        WATCH.phase = "forward"
        output = self._net(x)
        self._keep("output/0", output)
        WATCH.phase = "backward"
        try:
            asked = self._ask(way, output, x, grads[0])
        except Exception as error:
            self._decline(error)
            return
        self._keep("input/alone", asked)
        self._keep_gradients(" before its own backward")
        WATCH.phase = "forward"
        output = self._net(other)
        WATCH.phase = "backward"
        output.backward(grads[1])
        self._keep("input/0", other.grad)

    def _ask(
        self, way: str, output: torch.Tensor, x: torch.Tensor, grad: torch.Tensor
    ) -> torch.Tensor | None:
        if way == "backward":
            output.backward(grad, inputs=[x])
            return x.grad
        asked = x
        if way == "parameter":
            name = self._drawn_order(list(self._parameters))[0]
            asked = self._parameters[name]
        return torch.autograd.grad(output, asked, grad)[0]

    def _written(self) -> None:
        """Change tensors in place between forward and backward; a wrapper may raise an error."""
        way, saves = order_of_writing(self._scenario)[self._driver.recorder.step]
        x = self._input()
        step = WrittenStep(
            self._net,
            self._inside,
            self._beside,
            self._parameters,
            way,
            saves,
            self._drawn,
            self._values,
        )
        in_place = not (saves and self._driver.without_subject)
        try:
            with without_tf32(self._driver.device):
                output = step.run(x, in_place)
        except Exception as error:
            self._decline(error, as_without=saves and way != "biases")
            return
        self._keep("output/0", output)
        self._keep("input/0", x.grad)

    def _decline(self, error: Exception, as_without: bool = False) -> None:
        """Record that the wrapper refuses this step with an error; others follow.

        Args:
            as_without: whether a network without the wrapper raises one, too.
        """
        if self._driver.without_subject:
            raise error
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self._driver.recorder.event("declined", error=text, as_without=as_without)

    def _drawn_order(self, values: Sequence[_Value]) -> list[_Value]:
        key = f"{self._scenario.session_seed}/{self._scenario.name}/order"
        return random.Random(key).sample(values, len(values))

    def _frozen(self) -> None:
        """Train layers of low rank; the input requires a gradient in every other step, and before
        the third step the first block is unfrozen and the second one frozen."""
        step = self._driver.recorder.step
        if step == 2:
            self._inside[0].requires_grad_(True)
            self._inside[1].requires_grad_(False)
        if step == REPLACES:
            self._own("blocks.3.down", replace_weight(self._low, self._drawn))
        if step == ADDS:
            self._own("blocks.2", add_layer(self._inside[2], self._drawn))
        x = self._input().requires_grad_(has_trained_input(step))
        grad = self._drawn(x.shape)
        WATCH.phase = "forward"
        try:
            output = self._net(x)
            WATCH.phase = "backward"
            output.backward(grad)
        except Exception as error:
            # A reentrant wrapper has no gradients in steps without one of the input.
            self._decline(error)
            return
        self._keep("output/whether gradients are required", torch.tensor(self._net.asks))
        self._keep("output/0", output)
        if x.grad is not None:
            self._keep("input/0", x.grad)

    def _own(self, block: str, parameters: dict[str, torch.nn.Parameter]) -> None:
        self._parameters |= {f"{block}.{name}": one for name, one in parameters.items()}

    def _indices(self) -> None:
        """Look up rows; the last one and the first one of a half are among them."""
        self._net.train(self._driver.recorder.step > 0)
        (rows, _) = self._scenario.params[0].shape
        x = self._input()
        outputs = x
        WATCH.phase = "forward"
        for block, size in zip(self._net.blocks, (rows, rows // 2), strict=True):
            indices = torch.randint(size, (BATCH, LOOKS), generator=self._values)
            indices[0, 0] = size - 1
            order = torch.randint(LOOKS, (BATCH, LOOKS, COLUMNS), generator=self._values)
            outputs = block(outputs, *(one.to(x.device) for one in (indices, order)))
        WATCH.phase = "backward"
        outputs.backward(self._drawn(outputs.shape))
        self._keep("output/0", outputs)
        self._keep("input/0", x.grad)

    # Values and records.

    def _generator(self, purpose: str) -> torch.Generator:
        """Return a generator of the kit's own: the subject may use torch's."""
        key = f"{self._scenario.session_seed}/{self._scenario.name}/{purpose}"
        return torch.Generator().manual_seed(random.Random(key).getrandbits(60))

    def _drawn(self, shape: Sequence[int]) -> torch.Tensor:
        # The scenario may set another default dtype.
        values = torch.randn(tuple(shape), generator=self._values, dtype=torch.float32)
        return values.to(self._driver.device)

    def _input(self, rows: int = BATCH) -> torch.Tensor:
        return self._drawn((rows, WIDTH)).requires_grad_()

    def _is_unrecorded(self) -> bool:
        """Whether only the memory of this step is recorded: large tensors are kept once."""
        step = self._driver.recorder.step
        is_last = step == len(self._scenario.steps) - 1
        return self._scenario.variant == "training_large" and step > 0 and not is_last

    def _keep(self, name: str, tensor: torch.Tensor | None) -> None:
        """Record a tensor; what is missing is found by comparison."""
        if tensor is not None:
            self._driver.keep(name, tensor)

    def _keep_gradients(self, moment: str) -> None:
        """Record the gradients of all parameters; in a long run as one vector, to be fast."""
        if self._scenario.variant == LONG.variant:
            gradients = [parameter.grad for parameter in self._parameters.values()]
            present = [gradient.reshape(-1) for gradient in gradients if gradient is not None]
            self._keep("gradient/all", torch.cat(present) if present else None)
            return
        for name, parameter in self._parameters.items():
            self._keep(f"gradient/{name}{moment}", parameter.grad)


def _memory() -> int:
    """Return the bytes in use of the C library's allocator, without garbage; 0 if unknown."""
    gc.collect()
    return process_state.allocated()
