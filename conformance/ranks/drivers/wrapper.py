"""The driver of module wrappers: trains a network whose blocks are wrapped, and records the steps.

The same network without the wrapper trains in a run of its own, in other processes: a subject that
patches torch or draws numbers would otherwise change the network that it is compared with.
"""

import gc
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from conformance.errors import TargetError
from conformance.ranks.drivers._blocks import (
    BATCH,
    WATCH,
    WIDTH,
    Wrap,
    network,
)
from conformance.ranks.drivers._compared_modules import ModuleComparison
from conformance.ranks.drivers._module_hooks import Hooks, generators
from conformance.ranks.drivers._wrapper_training import WrapperTraining
from conformance.ranks.drivers.base import KIT, RankDriver
from conformance.ranks.enum_arguments import with_enum_members
from conformance.ranks.instruments import process_state
from conformance.ranks.instruments.default_dtype import default_dtype
from conformance.ranks.resolve import Factory
from conformance.scenarios.gradients import gradient, uses
from conformance.scenarios.interrupts import ERROR, INTERRUPTS_OF_FORWARDS, drawn_interrupts
from conformance.scenarios.wrapper import LIMITED, blocks_by_name
from conformance.scenarios.wrapper_training import TRAINING
from conformance.torch_versions.private import saved_tensors_are_packed

LR = 0.05
# The numbers of the first micro-batch's inputs and targets, which no parameter has.
_INPUT = 70
_TARGET = 80


class WrapperDriver(RankDriver):
    """One rank that trains a wrapped network."""

    def run(self) -> None:
        """Run the scenario's steps, or compare wrapped modules without any."""
        if self.scenario.variant == "module":
            wrap = self._make_wrap()
            ModuleComparison(self, wrap, self.record_comparison, self.inputs).run()
            return
        if self.scenario.variant.startswith(TRAINING):
            # It observes more from the step on in which dropout begins.
            self.own_keepers = (WATCH,)
            WrapperTraining(self, self._make_wrap()).run()
            return
        self._make_network()
        if self.scenario.variant == "random":
            WATCH.generator = generators
        for step, kind in enumerate(self.scenario.steps):
            self.begin_step(step, kind)
            # Dropout draws the same numbers with and without the wrapper.
            torch.manual_seed(1000 * step + self.rank)
            if self.scenario.variant == "random":
                # Later steps would show what a second forward adds to the statistics of a norm.
                self._net.train(step > 0)
            if not self._step(step):
                return

    def _make_network(self) -> None:
        net = network(self.scenario).to(self.device)
        # Wrapping may rename parameters and buffers: their names are taken before.
        self._parameters = dict(net.named_parameters())
        self._buffers = dict(net.named_buffers())
        self._hooks = Hooks(net, self.scenario) if self.scenario.variant == "hooked" else None
        net.wrap(self._make_wrap())
        if self._hooks:
            self._hooks.register("wrapper", net.blocks[0])
        options = self.scenario.ddp
        with self.inside("DistributedDataParallel"):
            self._ddp = self.data_parallel(
                net,
                find_unused_parameters=options.find_unused_parameters,
                static_graph=options.static_graph,
            )
            self._ddp.register_comm_hook(self.group, _mean_in_order)
        self._net = net

    def _step(self, step: int) -> bool:
        """Train one step; return False if the wrapper refuses it, as it may in some scenarios."""
        if self.scenario.variant == "raises" and step:
            interrupts = drawn_interrupts(self.scenario, INTERRUPTS_OF_FORWARDS)
            self._raise_inside((ERROR, *interrupts)[step - 1])
        try:
            self._train()
        except Exception as error:
            may_refuse = self.scenario.name in {scenario.name for scenario in LIMITED}
            if not may_refuse or self.without_subject:
                raise
            self.activity = KIT
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self.recorder.event("refused", error=text, lacks=[])
            return False
        self.recorder.event("stepped", generator=generators(), packs=saved_tensors_are_packed())
        lacking = []
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.keep(f"gradient/{name}", parameter.grad)
            elif parameter.requires_grad:
                lacking.append(name)
        if lacking and not self.scenario.ddp.find_unused_parameters:
            text = f"{len(lacking)} parameters have no gradient, such as {lacking[0]}"
            self.recorder.event("refused", error=text, lacks=lacking)
            return False
        _descend(self._parameters.values())
        for name, parameter in self._parameters.items():
            self.keep(f"parameter/{name}", parameter)
        for name, buffer in self._buffers.items():
            self.keep(f"buffer/{name}", buffer)
        if self.scenario.variant == "modes":
            self._evaluate()
        if self._hooks:
            self._hooks.record(self)
        return True

    def _train(self) -> None:
        """Run forward and backward of one step, in its micro-batches."""
        weights = self.scenario.microbatch_weights
        for number, weight in enumerate(weights):
            is_last = number == len(weights) - 1
            with nullcontext() if is_last else self._ddp.no_sync():
                self._train_micro_batch(number, weight)

    def _train_micro_batch(self, number: int, weight: int) -> None:
        scenario = self.scenario
        step = self.recorder.step
        WATCH.begin()
        x = self.inputs(_INPUT + number)
        target = self.inputs(_TARGET + number)
        x.requires_grad_(scenario.variant != "first")
        used: tuple[bool, ...] = ()
        if scenario.variant == "unused":
            used = tuple(uses(self.size, self.group_rank, step, index) for index in range(5))
        WATCH.phase = "forward"
        # Another rule compares the draws with those of the network without the wrapper.
        drawn = process_state.TORCHS_GENERATORS if scenario.variant == "random" else ()
        around_forward, around_backward = self._autocasts()
        with self.inside("the forward", drawn=drawn), around_forward:
            output = self._ddp(x, used)
        # The wrapper exists to keep fewer activations between forward and backward.
        kept = WATCH.alive()
        loss = ((output.to(target.dtype) - target) ** 2).mean() * weight
        WATCH.phase = "backward"
        with self.inside("the backward", drawn=drawn), around_backward:
            loss.backward()
        WATCH.phase = ""
        self.keep(f"output/{number}", output)
        self.keep(f"loss/{number}", loss)
        for name, grad in self._net.input_gradients(x).items():
            self.keep(f"input/{number}{name}", grad)
        # They hold the graph, and with it the activations.
        del output, loss
        left = _left()
        self.recorder.event(
            "ran", micro=number, kept=kept, left=left, **WATCH.observed(), **WATCH.runs
        )

    def _autocasts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts around this step's forward and its backward."""
        if self.scenario.variant != "autocast":
            return nullcontext(), nullcontext()
        self._net.by_name = blocks_by_name(self.scenario, self.recorder.step)

        def cast(enabled: bool = True) -> torch.autocast:
            return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)

        match self.recorder.step % 3:
            case 0:
                return cast(), nullcontext()
            case 1:
                return nullcontext(), cast()
        # As norms and losses in full precision within a region of autocast.
        return cast(enabled=False), cast()

    def inputs(self, param: int) -> torch.Tensor:
        """Return the inputs, or targets, that belong to a number."""
        is_single = self.scenario.variant in ("autocast", "module")
        values = gradient(
            "normal",
            (BATCH, WIDTH),
            torch.float32 if is_single else torch.float64,
            world=self.size,
            rank=self.rank,
            step=self.recorder.step,
            param=param,
        )
        return values.to(self.device)

    def _raise_inside(self, name: str) -> None:
        """Let a block raise an exception of Python's, and record the one that arrives; the step
        follows it.
        """
        caught: BaseException | None = None
        WATCH.raises = "block 1"
        WATCH.raised = name
        try:
            with self.inside("the forward"):
                try:
                    self._ddp(self.inputs(_INPUT))
                except BaseException as error:
                    caught = error
        finally:
            WATCH.raises = ""
        self.record_comparison(
            "error",
            lambda: f"{type(caught).__name__}: {caught}",
            f"{name}: block 1 raises as planned",
        )

    def _evaluate(self) -> None:
        """Run the network without a backward to follow."""
        net = self._net
        x = self.inputs(_INPUT)
        modes = (
            ("evaluation", False, False),
            ("no_grad", True, False),
            ("evaluation with gradients", False, True),
        )
        for name, trains, grad in modes:
            WATCH.begin()
            WATCH.phase = name
            torch.manual_seed(self.rank)
            net.train(trains)
            with self.inside(name), torch.set_grad_enabled(grad):
                output = net(x)
                runs = dict(WATCH.runs.get(name, {}))
                requires_grad = net.blocks[0](net.stem(x)).requires_grad
            WATCH.phase = ""
            net.train()
            self.keep(f"output/{name}", output)
            self.recorder.event("evaluated", what=name, runs=runs, asks=requires_grad)

    def _make_wrap(self) -> Wrap:
        """Return a function that wraps a module; without a subject, it returns the module."""
        if self.without_subject:
            return lambda module: module
        made = self.make(_understood)
        called = getattr(getattr(made, "func", made), "__name__", type(made).__name__)
        with self.doing("make"):
            if not callable(made) or not _takes_one(made):
                raise TargetError(
                    "a wrapper is called with a module and returns one in its place; "
                    f"{called} cannot be called with one argument"
                )

        def wrap(module: torch.nn.Module) -> torch.nn.Module:
            with self.inside("wrapper"), default_dtype(self.scenario.default_dtype(0)):
                wrapped = made(module)
            if not isinstance(wrapped, torch.nn.Module):
                raise TargetError(
                    "a wrapper is called with a module and returns one in its place; "
                    f"{called} returned a {type(wrapped).__name__}"
                )
            return wrapped

        return wrap

    def record_comparison(self, name: str, get: Callable[[], Any], wanted: Any) -> None:
        """Record a value, or the error of its computation, beside the value that it should be."""
        try:
            value = get()
        except Exception as error:
            value = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self.recorder.event("compared", what=name, got=value, wanted=wanted)


def _left() -> dict[str, int]:
    """Return the activations that are left after the backward; cycles are no fault."""
    if not WATCH.alive():
        return {}
    gc.collect()
    return WATCH.alive()


@torch.no_grad()
def _descend(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make a step of gradient descent, and forget the gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter -= LR * parameter.grad
            parameter.grad = None


def _mean_in_order(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average in the order of ranks, so that the result's bits do not depend on the bucket."""
    buffer = bucket.buffer()
    size = dist.get_world_size(group)
    parts = [torch.empty_like(buffer) for _ in range(size)]

    def mean(_: object) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total / size

    return dist.all_gather(parts, buffer, group=group, async_op=True).get_future().then(mean)


def _understood(target: Factory) -> Factory:
    """Return the target with enum members in place of their names."""
    kwargs = with_enum_members(target.function, target.kwargs, enums=("checkpoint_impl",))
    return replace(target, kwargs=kwargs)


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument; yes if its signature is unknown."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
