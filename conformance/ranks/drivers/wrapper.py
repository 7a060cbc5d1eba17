"""What ranks do with a wrapper of modules: train a network whose blocks are wrapped, and write down what comes of it.

The same network without the wrapper trains in a run of its own, in other processes: a subject that patches torch, or draws
numbers, would change what it is compared with if that were in the same one.
"""

import copy
import gc
import inspect
import io
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.errors import TargetError
from conformance.ranks.drivers._blocks import BATCH, WATCH, WIDTH, Block, Planned, Wrap, filled, network
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.enum_arguments import with_members
from conformance.ranks.instruments import process_state
from conformance.scenarios.gradients import gradient, uses
from conformance.scenarios.profiles import CUDA
from conformance.scenarios.wrapper import LIMITED

LR = 0.05
_INPUT, _TARGET = 70, 80  # of the first micro-batch: numbers that no parameter has


def play(stage: RankDriver) -> None:
    """Run the scenario's steps, or look at wrapped modules without any."""
    if stage.scenario.variant == "module":
        _look(stage)
        return
    net = network(stage.scenario.variant).to(stage.device)
    parameters, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    hooks = _Hooks(net) if stage.scenario.variant == "hooked" else None
    net.wrap(_wrap(stage))
    if hooks:
        hooks.register("wrapper", net.blocks[0])
    with stage.inside("DistributedDataParallel"):
        ddp = stage.data_parallel(
            net, find_unused_parameters=stage.scenario.ddp.find_unused_parameters, static_graph=stage.scenario.ddp.static_graph
        )
        ddp.register_comm_hook(stage.group, _mean_in_order)
    for step, kind in enumerate(stage.scenario.steps):
        stage.begin_step(step, kind)
        torch.manual_seed(1000 * step + stage.rank)
        if stage.scenario.variant == "raises" and step == 1:
            _raise_inside(stage, ddp)
        try:
            _train(stage, ddp)
        except Exception as error:
            if stage.scenario.name not in {scenario.name for scenario in LIMITED} or stage.without_subject:
                raise
            stage.where = "kit"
            stage.recorder.event("refused", error=f"{type(error).__name__}: {error}".splitlines()[0][:300], lacks=[])
            return
        lacking = [name for name, parameter in parameters.items() if parameter.requires_grad and parameter.grad is None]
        stage.recorder.event("stepped", generator=_generators(), packs=_packs())
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                stage.keep(f"gradient/{name}", parameter.grad)
        if lacking and not stage.scenario.ddp.find_unused_parameters:
            stage.recorder.event("refused", error=f"{len(lacking)} parameters have no gradient, such as {lacking[0]}", lacks=lacking)
            return
        _descend(parameters.values())
        for what, tensors in (("parameter", parameters), ("buffer", buffers)):
            for name, tensor in tensors.items():
                stage.keep(f"{what}/{name}", tensor)
        if stage.scenario.variant == "modes":
            _evaluate(stage, net)
        if hooks:
            hooks.write(stage)


def _train(stage: RankDriver, ddp: DistributedDataParallel) -> None:
    """Forward and backward of one step, in as many micro-batches as it has shares."""
    scenario, step = stage.scenario, stage.recorder.step
    for number, share in enumerate(scenario.microbatch_weights):
        WATCH.begin()
        x, target = _fed(stage, _INPUT + number), _fed(stage, _TARGET + number)
        x.requires_grad_(scenario.variant != "first")
        used = tuple(uses(stage.size, stage.group_rank, step, index) for index in range(5)) if scenario.variant == "unused" else ()
        syncs = nullcontext() if number == len(scenario.microbatch_weights) - 1 else ddp.no_sync()
        with syncs:
            WATCH.phase = "forward"
            with stage.inside("the forward"), _autocast(stage):
                output = ddp(x, used)
            kept = WATCH.alive()
            loss = ((output.to(target.dtype) - target) ** 2).mean() * share
            WATCH.phase = "backward"
            with stage.inside("the backward"):
                loss.backward()
        WATCH.phase = ""
        stage.keep(f"output/{number}", output)
        stage.keep(f"loss/{number}", loss)
        if x.grad is not None:
            stage.keep(f"input/{number}", x.grad)
        del output, loss
        stage.recorder.event("ran", micro=number, kept=kept, left=_left(), autocast=WATCH.autocast, **WATCH.runs)


def _autocast(stage: RankDriver) -> AbstractContextManager[Any]:
    return torch.autocast(stage.device.type, dtype=torch.bfloat16) if stage.scenario.variant == "autocast" else nullcontext()


def _left() -> dict[str, int]:
    """Return what blocks have computed on the way and is there still, now that the backward is over; cycles are no fault."""
    if not WATCH.alive():
        return {}
    gc.collect()
    return WATCH.alive()


def _fed(stage: RankDriver, param: int) -> torch.Tensor:
    step = stage.recorder.step
    dtype = torch.float32 if stage.scenario.variant in ("autocast", "module") else torch.float64
    return gradient("normal", (BATCH, WIDTH), dtype, world=stage.size, rank=stage.rank, step=step, param=param).to(stage.device)


@torch.no_grad()
def _descend(parameters: Iterable[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter -= LR * parameter.grad
            parameter.grad = None


def _generators() -> str:
    """Return the states of the generators that dropout draws from."""
    states = process_state.rng()
    return " ".join(states[name] for name in ("torch", CUDA) if name in states)


def _packs() -> bool:
    """Whether hooks on what autograd saves are in force here: one that has some takes no others."""
    saved = torch.ones(1, requires_grad=True).exp().grad_fn
    try:
        saved._raw_saved_result.register_hooks(lambda tensor: tensor, lambda tensor: tensor)  # type: ignore[union-attr]
    except RuntimeError:
        return True
    return False


def _mean_in_order(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean, summed in the order of ranks wherever a gradient lies in its bucket, so that it is the same bits in any."""
    buffer, size = bucket.buffer(), dist.get_world_size(group)
    parts = [torch.empty_like(buffer) for _ in range(size)]

    def mean(_: object) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total / size

    return dist.all_gather(parts, buffer, group=group, async_op=True).get_future().then(mean)


def _raise_inside(stage: RankDriver, ddp: DistributedDataParallel) -> None:
    """Have a block raise an error; the step is made after it."""
    came = None
    WATCH.raises = "block 1"
    try:
        with stage.inside("the forward"):
            try:
                ddp(_fed(stage, _INPUT))
            except Exception as error:
                came = error
    finally:
        WATCH.raises = ""
    _compared(stage, "error", lambda: f"{type(came).__name__}: {came}", f"{Planned.__name__}: block 1 was told to")


def _evaluate(stage: RankDriver, net: Any) -> None:
    """Run the network where there is nothing to go back for."""
    x = _fed(stage, _INPUT)
    for name, trains, grad in (("evaluation", False, False), ("no_grad", True, False), ("evaluation with gradients", False, True)):
        WATCH.begin()
        WATCH.phase = name
        torch.manual_seed(stage.rank)
        net.train(trains)
        with stage.inside(name), torch.set_grad_enabled(grad):
            output = net(x)
            runs = dict(WATCH.runs.get(name, {}))
            asks = net.blocks[0](net.stem(x)).requires_grad
        WATCH.phase = ""
        net.train()
        stage.keep(f"output/{name}", output)
        stage.recorder.event("evaluated", what=name, runs=runs, asks=asks)


class _Hooks:
    """Hooks on the first block, on a layer in it, and on what is put around it, that count."""

    def __init__(self, net: Any) -> None:
        self._fired: dict[str, int] = {}
        self.register("block", net.blocks[0])
        self.register("layer", net.blocks[0].inner)

    def register(self, name: str, module: torch.nn.Module) -> None:
        """Put one of each kind on a module."""
        module.register_forward_pre_hook(self._counts(f"{name}: forward pre-hook"))
        module.register_forward_hook(self._counts(f"{name}: forward hook"))
        module.register_full_backward_hook(self._counts(f"{name}: full backward hook"))

    def _counts(self, name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            key = f"{name} in the {WATCH.phase}"
            self._fired[key] = self._fired.get(key, 0) + 1

        return count

    def write(self, stage: RankDriver) -> None:
        """Write down what a hook has fired, but forward hooks that fire again where the forward runs again."""
        again = ("forward pre-hook in the backward", "forward hook in the backward")
        fired = {name: often for name, often in self._fired.items() if not name.endswith(again)}
        stage.recorder.event("fired", hooks=fired)
        self._fired.clear()


def _wrap(stage: RankDriver) -> Wrap:
    """Return what puts a wrapper around a module: nothing, where there is no subject."""
    if stage.without_subject:
        return lambda module: module
    made = stage.make(lambda target: replace(target, kwargs=with_members(target.function, target.kwargs, enums=("checkpoint_impl",))))
    stage.where = "make"
    called = getattr(getattr(made, "func", made), "__name__", type(made).__name__)
    if not callable(made) or not _takes_one(made):
        raise TargetError(f"a wrapper is called with a module and returns one in its place; {called} cannot be called with one argument")
    stage.where = "kit"

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        with stage.inside("wrapper"):
            wrapped = made(module)
        if not isinstance(wrapped, torch.nn.Module):
            raise TargetError(
                f"a wrapper is called with a module and returns one in its place; {called} returned a {type(wrapped).__name__}"
            )
        return wrapped

    return wrap


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True  # it has no signature that can be read
    return True


def _compared(stage: RankDriver, what: str, got: Callable[[], Any], wanted: Any) -> None:
    """Put on record what something is, or the error that it raised, beside what it is to be."""
    try:
        value = got()
    except Exception as error:
        value = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    stage.recorder.event("compared", what=what, got=value, wanted=wanted)


def _look(stage: RankDriver) -> None:
    """Compare wrapped modules with what they wrap: alone, and in a network."""
    wrap = _wrap(stage)
    stage.begin_step(0, "none")
    stage.where = "wrapped module"
    alone, net = network("module").to(stage.device).blocks[0], network("module").to(stage.device)
    before = {id(parameter): name for name, parameter in alone.named_parameters()}
    plain = network("module").to(stage.device)
    _wrap_nested(net, wrap)
    wrapped = wrap(alone)
    for where, module, bare in (("wrapper", wrapped, plain.blocks[0]), ("network", net, plain)):
        _compare_names(stage, where, module, bare)
        _compare_states(stage, where, module, bare)
    _compared(
        stage, "parameters: wrapper", lambda: sorted(before.get(id(p), "another") for p in wrapped.parameters()), sorted(before.values())
    )
    _compared(stage, "attribute: width", lambda: wrapped.width, WIDTH)
    _compared(stage, "attribute: inner.out_features", lambda: wrapped.inner.out_features, 2 * WIDTH)
    _compared(stage, "attribute: item 1 of a Sequential", lambda: net.blocks[1][1].called, "second")
    _compare_modes(stage, wrapped, alone)
    _compare_copies(stage, wrap)


def _wrap_nested(net: Any, wrap: Wrap) -> None:
    net.blocks[2].block = wrap(net.blocks[2].block)
    net.wrap(wrap)


def _compare_names(stage: RankDriver, where: str, module: torch.nn.Module, bare: torch.nn.Module) -> None:
    def names(named: Iterable[tuple[str, Any]]) -> list[str]:
        return [name for name, _ in named]

    _compared(stage, f"keys: {where}", lambda: list(module.state_dict()), list(bare.state_dict()))
    _compared(stage, f"keys: {where} with a prefix", lambda: list(module.state_dict(prefix="a.")), list(bare.state_dict(prefix="a.")))
    _compared(stage, f"parameter names: {where}", lambda: names(module.named_parameters()), names(bare.named_parameters()))
    _compared(stage, f"buffer names: {where}", lambda: names(module.named_buffers()), names(bare.named_buffers()))


def _compare_states(stage: RankDriver, where: str, module: torch.nn.Module, bare: torch.nn.Module) -> None:
    """Load what the one has saved into the other, strictly."""

    def loaded(source: torch.nn.Module, target: torch.nn.Module, which: int) -> list[str]:
        filled(source, which)
        values = [parameter.detach().clone() for parameter in source.parameters()]
        target.load_state_dict({key: tensor.clone() for key, tensor in source.state_dict().items()}, strict=True)
        pairs = zip(target.parameters(), values, strict=True)
        return [f"parameter {index}" for index, (parameter, value) in enumerate(pairs) if not torch.equal(parameter, value)]

    _compared(stage, f"load: saved without the wrapper, loaded with it: {where}", lambda: loaded(bare, module, 1), [])
    _compared(stage, f"load: saved with the wrapper, loaded without it: {where}", lambda: loaded(module, bare, 2), [])
    _compared(stage, f"load: saved and loaded with the wrapper: {where}", lambda: loaded(module, module, 3), [])


def _compare_modes(stage: RankDriver, wrapped: torch.nn.Module, inside: torch.nn.Module) -> None:
    """Do to the wrapper what is done to modules, and look at the module inside."""

    def all_in(module: torch.nn.Module) -> list[bool]:
        return sorted({part.training for part in module.modules()})

    _compared(stage, "mode: eval()", lambda: (wrapped.eval(), all_in(inside))[1], [False])
    _compared(stage, "mode: train()", lambda: (wrapped.train(), all_in(inside))[1], [True])
    _compared(
        stage,
        "mode: to(float64)",
        lambda: (wrapped.to(torch.float64), sorted({str(p.dtype) for p in inside.parameters()}))[1],
        ["torch.float64"],
    )
    _compared(
        stage,
        "mode: requires_grad_(False)",
        lambda: (wrapped.requires_grad_(False), sorted({p.requires_grad for p in inside.parameters()}))[1],
        [False],
    )


def _compare_copies(stage: RankDriver, wrap: Wrap) -> None:
    """A copy is a module of its own; a state that went through a file is the same."""
    wrapped = wrap(filled(Block("block"), 4).to(stage.device))
    x = _fed(stage, _INPUT).requires_grad_()

    def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        module(x).square().sum().backward()
        return [torch.empty(0) if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]

    def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        return len(some) == len(others) and all(map(torch.equal, some, others))

    def copied() -> list[str]:
        right = gradients(wrapped)
        other = copy.deepcopy(wrapped)
        same = all(grad.numel() for grad in right) and equal(gradients(other), right)
        filled(other, 5)
        apart = equal(gradients(wrapped), right)
        return [said for said, holds in (("its gradients differ", same), ("it shares parameters", apart)) if not holds]

    def through_a_file() -> list[str]:
        file = io.BytesIO()
        torch.save(wrapped.state_dict(), file)
        file.seek(0)
        return list(torch.load(file, weights_only=True))

    _compared(stage, "copy: deepcopy", copied, [])
    _compared(stage, "copy: state_dict through torch.save", through_a_file, list(Block("block").state_dict()))
