"""The driver of module wrappers: trains a network whose blocks are wrapped, and records the steps.

The same network without the wrapper trains in a run of its own, in other processes: a subject that
patches torch or draws numbers would otherwise change the network that it is compared with.
"""

import copy
import gc
import inspect
import io
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from conformance.errors import TargetError
from conformance.ranks.drivers._blocks import (
    BATCH,
    WATCH,
    WIDTH,
    Block,
    Wrap,
    filled,
    network,
)
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
# The names under which DDP and torch.compile hold a module.
_NAMES_AROUND = ("module", "_orig_mod")


class WrapperDriver(RankDriver):
    """One rank that trains a wrapped network."""

    def run(self) -> None:
        """Run the scenario's steps, or compare wrapped modules without any."""
        if self.scenario.variant == "module":
            _ModuleComparison(self, self._make_wrap()).run()
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


class _ModuleComparison:
    """Compares wrapped modules with the modules inside them, alone and in a network.

    Args:
        driver: of this rank.
        wrap: wraps a module.
    """

    def __init__(self, driver: WrapperDriver, wrap: Wrap) -> None:
        self._driver = driver
        self._wrap = wrap
        self._compare = driver.record_comparison

    def run(self) -> None:
        """Record all comparisons."""
        self._driver.begin_step(0, "none")
        with self._driver.doing("wrapped module"):
            self._compare_modules()
            self._compare_copies()

    def _network(self) -> Any:
        return network(self._driver.scenario).to(self._driver.device)

    def _compare_modules(self) -> None:
        alone = self._network().blocks[0]
        net = self._network()
        names = {id(parameter): name for name, parameter in alone.named_parameters()}
        plain = self._network()
        net.blocks[2].block = self._wrap(net.blocks[2].block)  # a wrapper inside a wrapper
        net.wrap(self._wrap)
        wrapped = self._wrap(alone)
        for place, module, bare in (
            ("wrapper", wrapped, plain.blocks[0]),
            ("network", net, plain),
        ):
            self._compare_names(place, module, bare)
            self._compare_states(place, module, bare)
            for name in _NAMES_AROUND:
                # As DDP and torch.compile hold a module: their part of a key is not the wrapper's.
                pair = (torch.nn.ModuleDict({name: one}) for one in (module, bare))
                self._compare_states(f"{place} in a module as {name}", *pair)
        self._compare(
            "parameters: wrapper",
            lambda: sorted(names.get(id(p), "another") for p in wrapped.parameters()),
            sorted(names.values()),
        )
        self._compare("attribute: width", lambda: wrapped.width, WIDTH)
        self._compare(
            "attribute: inner.out_features", lambda: wrapped.inner.out_features, 2 * WIDTH
        )
        self._compare(
            "attribute: item 1 of a Sequential", lambda: net.blocks[1][1].called, "second"
        )
        self._compare_modes(wrapped, alone)

    def _compare_names(self, place: str, module: torch.nn.Module, bare: torch.nn.Module) -> None:
        def names(named: Iterable[tuple[str, Any]]) -> list[str]:
            return [name for name, _ in named]

        compare = self._compare
        for prefix in ("", "a.", *(f"{name}." for name in _NAMES_AROUND)):
            behind = f" with the prefix {prefix}" if prefix else ""
            compare(f"keys: {place}{behind}", partial(_keys, module, prefix), _keys(bare, prefix))
        compare(
            f"parameter names: {place}",
            lambda: names(module.named_parameters()),
            names(bare.named_parameters()),
        )
        compare(
            f"buffer names: {place}",
            lambda: names(module.named_buffers()),
            names(bare.named_buffers()),
        )

    def _compare_states(self, place: str, module: torch.nn.Module, bare: torch.nn.Module) -> None:
        """Load the state of one module into the other, strictly."""

        def loaded(source: torch.nn.Module, target: torch.nn.Module, which: int) -> list[str]:
            filled(source, which)
            values = [parameter.detach().clone() for parameter in source.parameters()]
            state = {key: tensor.clone() for key, tensor in source.state_dict().items()}
            target.load_state_dict(state, strict=True)
            pairs = enumerate(zip(target.parameters(), values, strict=True))
            return [
                f"parameter {index}"
                for index, (parameter, value) in pairs
                if not torch.equal(parameter, value)
            ]

        self._compare(
            f"load: saved without the wrapper, loaded with it: {place}",
            lambda: loaded(bare, module, 1),
            [],
        )
        self._compare(
            f"load: saved with the wrapper, loaded without it: {place}",
            lambda: loaded(module, bare, 2),
            [],
        )
        self._compare(
            f"load: saved and loaded with the wrapper: {place}",
            lambda: loaded(module, module, 3),
            [],
        )

    def _compare_modes(self, wrapped: torch.nn.Module, inside: torch.nn.Module) -> None:
        """Change the wrapper's mode, and record the mode of the module inside."""

        def training(change: Callable[[], object]) -> list[bool]:
            change()
            return sorted({part.training for part in inside.modules()})

        def dtypes() -> list[str]:
            wrapped.to(torch.float64)
            return sorted({str(p.dtype) for p in inside.parameters()})

        def frozen() -> list[bool]:
            wrapped.requires_grad_(False)
            return sorted({p.requires_grad for p in inside.parameters()})

        self._compare("mode: eval()", lambda: training(wrapped.eval), [False])
        self._compare("mode: train()", lambda: training(wrapped.train), [True])
        self._compare("mode: to(float64)", dtypes, ["torch.float64"])
        self._compare("mode: requires_grad_(False)", frozen, [False])

    def _compare_copies(self) -> None:
        """Record whether a copy is a module of its own, and a saved state the same."""
        wrapped = self._wrap(filled(Block("block"), 4).to(self._driver.device))
        x = self._driver.inputs(_INPUT).requires_grad_()

        def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
            module.zero_grad()
            module(x).square().sum().backward()
            grads = [parameter.grad for parameter in module.parameters()]
            return [torch.empty(0) if grad is None else grad.clone() for grad in grads]

        def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
            return len(some) == len(others) and all(map(torch.equal, some, others))

        def differences_of_copy() -> list[str]:
            right = gradients(wrapped)
            other = copy.deepcopy(wrapped)
            is_same = all(grad.numel() for grad in right) and are_equal(gradients(other), right)
            filled(other, 5)
            is_separate = are_equal(gradients(wrapped), right)
            found = []
            if not is_same:
                found.append("its gradients differ")
            if not is_separate:
                found.append("it shares parameters")
            return found

        def keys_from_file() -> list[str]:
            file = io.BytesIO()
            torch.save(wrapped.state_dict(), file)
            file.seek(0)
            return sorted(torch.load(file, weights_only=True))

        self._compare("copy: deepcopy", differences_of_copy, [])
        self._compare("copy: state_dict through torch.save", keys_from_file, _keys(Block("block")))


def _keys(module: torch.nn.Module, prefix: str = "") -> list[str]:
    """Return the keys of a state_dict; their order says nothing."""
    return sorted(module.state_dict(prefix=prefix))


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
