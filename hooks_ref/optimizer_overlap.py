"""Step the optimizer inside the hook: each bucket's parameters as soon as its averaged gradient is there.

With ``theta`` the parameters of one bucket, ``g_r`` their gradient on rank ``r`` and ``hook`` any communication hook,
every rank does, bucket by bucket while backward goes on,

    g = hook(g_r)                          all that is communicated
    theta, s <- optimizer(theta, g, s)     the same on every rank; s is the optimizer's state

so that after ``backward()`` the model is where vanilla DDP with ``optimizer.step()`` would have it, bit for bit, for every
optimizer whose update of a parameter depends on that parameter, its gradient and its state alone. The trainer calls
``zero_grad()`` but not ``step()``, and what it would do between backward and step (clipping by the norm of the whole
model, unscaling, skipping a step) has no place. Accumulation under ``no_sync`` works: no hook runs there, so no step.
With ``find_unused_parameters`` a parameter that no rank used is stepped with a gradient of zeros, where vanilla DDP leaves
it alone. A parameter that backward reads after its gradient is complete, through ``detach``, makes autograd raise. A step
cannot be taken back: when a collective fails, parameters whose buckets had arrived are updated already.

Gradients are views of what the hook returned, in each parameter's own layout; ``param.grad`` stays DDP's. Nothing
waits: the step is a callback on the hook's future.

Source: torch documentation, "DDP Communication Hooks" and ``DistributedDataParallel._register_fused_optim``;
``torch.distributed.optim._apply_optimizer_in_backward``.
"""

import copy
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hooks_ref._buckets import gradient, pieces
from hooks_ref._state import HookState
from hooks_ref.default_hooks import Hook, allreduce_hook


class FunctionalOptimizer(Protocol):
    """What steps one parameter: that of :func:`functional`, or torch's ``_FunctionalSGD`` and its like."""

    def step_param(self, param: torch.Tensor, grad: torch.Tensor) -> Any:
        """Update ``param`` in place; ``grad`` has its shape and dtype."""


class functional:
    """Make any optimizer step some of its parameters at a time, each as the optimizer alone would.

    Args:
        optimizer_class: a ``torch.optim.Optimizer`` that steps without a closure.
        defaults: its options, which ``optimizer_class`` checks when the first parameter is stepped.

    Attributes:
        defaults: the options; a change, as of a learning rate by a schedule, holds from the next step on.
        state: what the optimizer remembers, by parameter.

    Raises:
        TypeError: ``optimizer_class`` is no class of optimizers.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], **defaults: Any) -> None:
        if not (
            isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
        ):
            raise TypeError(
                f"optimizer_class: a subclass of torch.optim.Optimizer; got {optimizer_class!r}"
            )
        self.optimizer_class, self.defaults = optimizer_class, defaults
        self.state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._optimizer: torch.optim.Optimizer | None = (
            None  # handed other parameters for each step
        )

    def step_param(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Update ``param`` in place with ``grad``, of its shape and dtype; ``param.grad`` stays as it is."""
        self.step_params([param], [grad])

    def step_params(self, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Update each of ``params`` in place with its own of ``grads``; a step of an optimizer costs more than most updates."""
        for param in params:
            if self._optimizer is None or param not in self.state:
                self._optimizer = self.optimizer_class([param], **self.defaults)
                self.state.setdefault(
                    param, self._optimizer.state[param]
                )  # loaded before, or as the class begins
        if self._optimizer is None:
            return
        aliases = [
            param.detach() for param in params
        ]  # their .grad is nobody else's: DDP goes on with that of params meanwhile
        for alias, grad in zip(aliases, grads, strict=True):
            alias.grad = grad
        self._optimizer.param_groups[0].update(self.defaults, params=aliases)
        self._optimizer.state = defaultdict(
            dict, zip(aliases, map(self.state.__getitem__, params), strict=True)
        )
        self._optimizer.step()


class OptimizerHookState(HookState):
    """Which parameters a fused optimizer steps, and the optimizer.

    Args:
        functional_optim: made by :func:`functional`, or anything with ``step_param(param, grad)``; called by one thread at
            a time, always on the same parameters on all ranks.
        params: the parameters to step; None is all of the model.

    Attributes:
        iter: steps begun.

    Raises:
        ValueError: ``functional_optim`` has no method ``step_param``.
        TypeError: ``params`` is no iterable of tensors.
    """

    def __init__(
        self, functional_optim: FunctionalOptimizer, params: Iterable[torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        if not callable(getattr(functional_optim, "step_param", None)):
            raise ValueError(
                f"functional_optim: an object with a method step_param(param, grad); got {functional_optim!r}"
            )
        if isinstance(params, torch.Tensor) or not isinstance(params, Iterable | None):
            raise TypeError(f"params: an iterable of tensors, or None; got {params!r}")
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)
        if not all(isinstance(param, torch.Tensor) for param in self.params_to_optimize or ()):
            raise TypeError("params: an iterable of tensors, or None; got one of other things")
        self._loaded: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def steps(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is one of those to step."""
        return self.params_to_optimize is None or parameter in self.params_to_optimize

    def put_loaded(self, bucket: dist.GradBucket) -> None:
        """Hand the optimizer what was loaded for the bucket's parameters."""
        for key, parameter in zip(self.keys(bucket), bucket.parameters(), strict=True):
            if key in self._loaded:
                self._state_of_all()[parameter] = self._loaded.pop(key)

    def step(self, parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
        """Step those of ``parameters`` that are to be stepped with their gradients."""
        stepped = [pair for pair in zip(parameters, gradients, strict=True) if self.steps(pair[0])]
        with self._lock:  # callbacks of two buckets may run at once
            if isinstance(self.functional_optimizer, functional):
                self.functional_optimizer.step_params(
                    [parameter for parameter, _ in stepped], [gradient for _, gradient in stepped]
                )
                return
            for parameter, gradient in stepped:
                self.functional_optimizer.step_param(parameter, gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return the step count, and by each parameter's key (:meth:`HookState.keys`) what the optimizer remembers of it.

        Tensors are the optimizer's own, as in ``Optimizer.state_dict``; options such as the learning rate are not saved.
        """
        state = self._state_of_all()
        kept = {
            key: dict(state[parameter])
            for parameter, key in self._keys.items()
            if parameter in state
        }
        return {"iter": self.iter, "state": {**kept, **self._loaded}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned, in a new process too; tensors are copied, on the device they are on.

        Raises:
            ValueError: it was saved by another kind of state.
        """
        if saved.keys() != {"iter", "state"}:
            raise ValueError(
                f"load_state_dict: saved by another kind of state; it has {sorted(saved)} and not ['iter', 'state']"
            )
        self._state_of_all().clear()
        self.iter, self._loaded = saved["iter"], copy.deepcopy(saved["state"])

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an OptimizerHookState belongs to the parameters of its model: save its state_dict()"
        )

    def _state_of_all(self) -> dict[torch.Tensor, dict[str, Any]]:
        state = getattr(self.functional_optimizer, "state", None)
        if not isinstance(state, dict):
            raise TypeError(
                f"{type(self.functional_optimizer).__name__} has no dict `state` by parameter, so nothing to save or load"
            )
        return state


def hook_then_optimizer(hook: Hook, optimizer_state: OptimizerHookState) -> Hook:
    """Make the hook that runs ``hook`` on a bucket, then steps the bucket's parameters with what it returned.

    Args:
        hook: a communication hook ``(state, bucket) -> Future[Tensor]``.
        optimizer_state: made once per DDP model, with the same arguments on all ranks.

    Returns:
        A hook with the state of ``hook``; its future holds what that of ``hook`` held, in the bucket's own dtype, once the
        bucket's parameters are updated.
    """

    def hook_then_optimizer_wrapper(
        hook_state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        parameters, dtype = bucket.parameters(), bucket.buffer().dtype
        optimizer_state.put_loaded(bucket)
        future = hook(hook_state, bucket)
        optimizer_state.maybe_increase_iter(bucket)

        def step(fut: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            result = fut.value().to(dtype)  # a hook that compresses may leave it in half precision
            optimizer_state.step(
                parameters,
                [result] if result.is_sparse else map(gradient, pieces(bucket, result), parameters),
            )
            return result

        return future.then(step)

    return hook_then_optimizer_wrapper


def apply_optim_in_backward_hook(
    optimizer_state: OptimizerHookState, hook: Hook = allreduce_hook
) -> Hook:
    """Make the hook of :func:`hook_then_optimizer` that also frees the gradients: None once backward is over.

    Saves the memory of the gradients between steps, and ``zero_grad()``; parameters that are not stepped keep theirs. On
    any device. torch's own takes ``gradient_is_bucket_view`` instead, since DDP itself makes and registers it for
    parameters on which ``_apply_optimizer_in_backward`` was called; do not call that as well.

    Args:
        optimizer_state: made once per DDP model, with the same arguments on all ranks.
        hook: a communication hook ``(state, bucket) -> Future[Tensor]``.

    Returns:
        A hook with the state of ``hook``; its future is that of :func:`hook_then_optimizer`.
    """
    fused = hook_then_optimizer(hook, optimizer_state)
    engine = torch.autograd.Variable._execution_engine

    def apply_optim_in_backward(
        hook_state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        stepped = [
            parameter for parameter in bucket.parameters() if optimizer_state.steps(parameter)
        ]

        def free() -> None:
            for parameter in stepped:
                parameter.grad = None

        if (
            torch._C._current_graph_task_id() != -1
        ):  # there is no backward on a rank that has joined
            # DDP writes gradients in such a callback of its own, queued after this one: queue again, to come after it.
            engine.queue_callback(lambda: engine.queue_callback(free))
        return fused(hook_state, bucket)

    return apply_optim_in_backward
