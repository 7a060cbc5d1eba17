"""When to average gradients if a step consists of several micro-batches.

With ``g_i,r`` the gradient of micro-batch ``i`` of ``n`` on rank ``r`` of ``W``, all strategies end
with

    sum_i  1/W sum_r g_i,r

on every rank if every micro-batch uses every parameter. They differ in their communication, and in
their treatment of a parameter that some micro-batches, or some ranks, do not use:

    single_auto_sync    DDP averages the accumulated gradients in the last micro-batch alone. If a
                        rank does not use a parameter in its last micro-batch,
                        ``find_unused_parameters`` is needed; without it, all gradients of the
                        bucket stay each rank's own: a lost sync, which DDP notices in the next
                        step, if there is one.
    multi_auto_sync     DDP averages in every micro-batch. Needs ``find_unused_parameters`` if some
                        parameters are not used; n times the communication.
    forced_sync         DDP averages nothing; once the last backward is over, every gradient that
                        some rank has is averaged, with zeros for ranks that do not have it.
    overlapped_sync     the same, begun during the last backward, in an order that all ranks share:
                        the average of a gradient begins as soon as this gradient and all before it
                        have arrived.

With any of them a trainer says which micro-batch is the last one of its step.
:class:`GradientAccumulation` counts micro-batches itself.

A parameter that no rank has used has no gradient afterwards, with the last two; and DDP does not
have to look for used parameters. They use no communication hook and no buckets. After an exception
no collective is begun: ranks without an exception wait for it, as they do in a backward of DDP.

Buffers, such as the statistics of a BatchNorm, are broadcast in the first forward of a step, as by
DDP itself.

Source: MosaicML Composer, ``composer.distributed.DDPSyncStrategy``, ``ddp_sync_context`` and
``prepare_ddp_module`` (names, the first three strategies). Composer's ``forced_sync`` averages
different parameters together if ranks use different ones. torch documentation,
DistributedDataParallel (``no_sync``).
"""

import enum
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hooks_ref.model_averaging import average_parameters


class DDPSyncStrategy(str, enum.Enum):
    """The strategies; a member equals its name in lower case."""

    SINGLE_AUTO_SYNC = "single_auto_sync"
    MULTI_AUTO_SYNC = "multi_auto_sync"
    FORCED_SYNC = "forced_sync"
    OVERLAPPED_SYNC = "overlapped_sync"


@contextmanager
def ddp_sync_context(
    model: torch.nn.Module,
    is_final_microbatch: bool,
    sync_strategy: str | DDPSyncStrategy,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
) -> Iterator[None]:
    """Average gradients by a strategy, in a context around one micro-batch's forward and backward.

    Args:
        model: a DDP module; around any other module the context does nothing.
        is_final_microbatch: whether it is the last of its step; the same on all ranks.
        sync_strategy: a member of :class:`DDPSyncStrategy`, or its value.
        optimizers: ``forced_sync`` and ``overlapped_sync`` average the parameters of these
            optimizers, each parameter once; None is all parameters of the model. Which of them
            require gradients is the same on all ranks.

    Raises:
        ValueError: there is no such strategy.
    """
    strategy = DDPSyncStrategy(sync_strategy)
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    automatic = strategy is DDPSyncStrategy.MULTI_AUTO_SYNC or (
        strategy is DDPSyncStrategy.SINGLE_AUTO_SYNC and is_final_microbatch
    )
    forced = (
        strategy in (DDPSyncStrategy.FORCED_SYNC, DDPSyncStrategy.OVERLAPPED_SYNC)
        and is_final_microbatch
    )
    made = _Overlapped if strategy is DDPSyncStrategy.OVERLAPPED_SYNC else _Forced
    averaging = made(_parameters(model, optimizers), model.process_group) if forced else None
    with nullcontext() if automatic else model.no_sync(), averaging or nullcontext():
        yield
    if averaging:
        averaging.finish()
        # The next forward broadcasts buffers, as after a backward in which DDP averages.
        model.require_forward_param_sync = True


class GradientAccumulation:
    """Average the accumulated gradients in every ``steps``-th micro-batch, which it counts itself.

        accumulation = GradientAccumulation(4)
        for batch in batches:
            with accumulation.accumulate(model):
                loss(model(batch)).backward()
            if accumulation.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()

    Each model has a count of its own. A micro-batch counts once its context has ended without an
    exception. Gradients are those of ``single_auto_sync``. As a subject of ``--strategy`` it is
    called instead of :meth:`accumulate`.

    Args:
        steps: the number of micro-batches of a step.

    Attributes:
        sync_gradients: whether the last micro-batch was the last one of its step.

    Raises:
        ValueError: ``steps`` is less than one.

    Source: Hugging Face's accelerate, ``Accelerator.accumulate`` and
    ``gradient_accumulation_steps`` (the shape); torch documentation, DistributedDataParallel
    (``no_sync``).
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"a step has one micro-batch or more, not {steps}")
        self.steps = steps
        self.sync_gradients = True
        self._counts: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()

    @contextmanager
    def accumulate(self, model: torch.nn.Module) -> Iterator[None]:
        """Return the context around one micro-batch's forward and backward.

        Args:
            model: a DDP module; around any other module micro-batches are only counted.
        """
        count = self._counts.get(model, 0) + 1
        self.sync_gradients = count == self.steps
        waits = isinstance(model, DistributedDataParallel) and not self.sync_gradients
        with model.no_sync() if waits else nullcontext():
            yield
        self._counts[model] = count % self.steps

    def __call__(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return :meth:`accumulate`'s context."""
        return self.accumulate(model)


def prepare_ddp_module(module: torch.nn.Module, find_unused_parameters: bool) -> torch.nn.Module:
    """Wrap a module in DDP if one of its parameters requires a gradient; otherwise return it.

    Args:
        module: the module.
        find_unused_parameters: DDP's argument.

    Raises:
        RuntimeError: torch.distributed is not available, or not initialised.
    """
    if not dist.is_available():
        raise RuntimeError("torch.distributed is not available in this build of torch")
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group yet: call torch.distributed.init_process_group first"
        )
    if any(parameter.requires_grad for parameter in module.parameters()):
        return DistributedDataParallel(module, find_unused_parameters=find_unused_parameters)
    return module


class _Forced:
    """The averaging of one step's gradients once its last backward is over."""

    def __init__(self, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = parameters
        self.group = group

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def finish(self) -> None:
        kinds = self._kinds()
        for parameter, kind in zip(self.parameters, kinds, strict=True):
            if kind and parameter.grad is None:
                parameter.grad = torch.zeros_like(
                    parameter, layout=torch.sparse_coo if kind == _SPARSE else torch.strided
                )
        sparse = [p for p, kind in zip(self.parameters, kinds, strict=True) if kind == _SPARSE]
        dense = [
            p.grad
            for p, kind in zip(self.parameters, kinds, strict=True)
            if kind == _DENSE and p.grad is not None
        ]
        average_parameters(dense, self.group)
        for parameter in sparse:
            mean = parameter.grad.coalesce() / self.group.size()
            dist.all_reduce(mean, group=self.group)
            parameter.grad = mean

    def _kinds(self) -> list[int]:
        """Return each parameter's kind of gradient over all ranks: 0 (none), dense or sparse."""
        device = self.parameters[0].device if self.parameters else None
        mine = [_kind(parameter.grad) for parameter in self.parameters]
        kinds = torch.tensor(mine, dtype=torch.uint8, device=device)
        dist.all_reduce(kinds, op=dist.ReduceOp.MAX, group=self.group)
        found: list[int] = kinds.tolist()
        return found


class _Overlapped(_Forced):
    """The averaging of one step's gradients, begun during its last backward.

    Each parameter has one collective, from the last of the model to the first, on all ranks: in a
    backward gradients arrive in about that order. If a gradient has not arrived when the backward
    is over, its collective begins then, with zeros if there is none. Frozen parameters may have
    gradients of earlier micro-batches; these are averaged afterwards.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        super().__init__([p for p in reversed(parameters) if p.requires_grad], group)
        self._frozen = _Forced([p for p in parameters if not p.requires_grad], group)
        self._there: set[torch.Tensor] = set()
        self._begun: list[tuple[dist.Work, torch.Tensor]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._is_there)
            for parameter in self.parameters
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _is_there(self, parameter: torch.Tensor) -> None:
        if parameter in self._there:
            raise RuntimeError(
                "overlapped_sync: a gradient came in two parts in one backward "
                "(checkpointed twice?); use forced_sync"
            )
        self._there.add(parameter)
        while (
            len(self._begun) < len(self.parameters)
            and self.parameters[len(self._begun)] in self._there
        ):
            self._begin(self.parameters[len(self._begun)])

    def _begin(self, parameter: torch.nn.Parameter) -> None:
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if grad.is_sparse:
            raise TypeError("overlapped_sync: no sparse gradients; use forced_sync")
        sent = grad.div_(self.group.size()).contiguous()
        self._begun.append((dist.all_reduce(sent, group=self.group, async_op=True), sent))

    def finish(self) -> None:
        for parameter in self.parameters[len(self._begun) :]:
            self._begin(parameter)
        kinds = self._kinds()
        for parameter, kind, (work, mean) in zip(self.parameters, kinds, self._begun, strict=True):
            work.wait()
            if kind and parameter.grad is None:
                parameter.grad = mean
            elif parameter.grad is not None and parameter.grad is not mean:
                parameter.grad.copy_(mean)
        if self._frozen.parameters:
            self._frozen.finish()


_DENSE = 1
_SPARSE = 2


def _kind(grad: torch.Tensor | None) -> int:
    if grad is None:
        return 0
    return _SPARSE if grad.is_sparse else _DENSE


def _parameters(
    model: DistributedDataParallel,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
) -> list[torch.nn.Parameter]:
    """Return the parameters to average, each once, in an order that all ranks share.

    Parameters that are frozen now are among them: they may have gradients of earlier micro-batches.
    """
    if optimizers is None:
        return list(model.parameters())
    every = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    given = [
        parameter
        for optimizer in every
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    return list(dict.fromkeys(given))
