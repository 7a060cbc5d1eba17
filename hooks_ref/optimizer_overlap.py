"""Step the optimizer inside the hook: each bucket's parameters once its averaged gradient arrives.

With ``theta`` the parameters of one bucket, ``g_r`` their gradient on rank ``r`` and ``hook`` any
communication hook, every rank does, bucket by bucket while backward goes on,

    g = hook(g_r)                          the only communication
    theta, s <- optimizer(theta, g, s)     the same on every rank; s is the optimizer's state

so that after ``backward()`` the model equals that of vanilla DDP after ``optimizer.step()``, bit
for bit, for every optimizer whose update of a parameter depends on that parameter, its gradient and
its state alone. The trainer calls ``zero_grad()`` but not ``step()``. Operations between backward
and step (clipping by the norm of the whole model, unscaling, skipping a step) are not possible.
Accumulation under ``no_sync`` works: no hook runs there, so no step is taken. With
``find_unused_parameters`` a parameter that no rank used is stepped with a gradient of zeros, while
vanilla DDP leaves it alone. If backward reads a parameter after its gradient is complete, through
``detach``, autograd raises. A step cannot be taken back: when a collective fails, parameters whose
buckets had arrived are updated already.

Gradients are views of the result of the hook, in each parameter's own layout; ``param.grad`` stays
DDP's. Nothing waits: the step is a callback on the hook's future.

Source: torch documentation, "DDP Communication Hooks" and
``DistributedDataParallel._register_fused_optim``;
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
from hooks_ref.default_hooks import Hook, allreduce_hook, in_dtype_of


class FunctionalOptimizer(Protocol):
    """An object that steps one parameter: :func:`functional`, or torch's ``_FunctionalSGD`` etc."""

    def step_param(self, param: torch.Tensor, grad: torch.Tensor) -> Any:
        """Update ``param`` in place; ``grad`` has its shape and dtype."""


class functional:
    """Make any optimizer step some of its parameters at a time, each as the optimizer alone would.

    Args:
        optimizer_class: a ``torch.optim.Optimizer`` that steps without a closure.
        defaults: its options, which ``optimizer_class`` checks when the first parameter is stepped.

    Attributes:
        defaults: the options; a change, for example a scheduled learning rate, holds from the next
            step on.
        state: the optimizer's state, by parameter.

    Raises:
        TypeError: ``optimizer_class`` is not a class of optimizers.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], **defaults: Any) -> None:
        if not (
            isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
        ):
            raise TypeError(
                f"optimizer_class: a subclass of torch.optim.Optimizer; got {optimizer_class!r}"
            )
        self.optimizer_class = optimizer_class
        self.defaults = defaults
        self.state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        # One optimizer, which gets other parameters for each step.
        self._optimizer: torch.optim.Optimizer | None = None

    def step_param(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Update ``param`` in place with ``grad``, of its shape and dtype; ``param.grad`` stays."""
        self.step_params([param], [grad])

    def step_params(self, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Update each of ``params`` in place with its own gradient, in one step of the optimizer.

        One step for all parameters is faster, because most updates cost less than the step around
        them.

        Args:
            params: parameters of any shapes.
            grads: their gradients, of the same shapes and dtypes.
        """
        for param in params:
            if self._optimizer is None or param not in self.state:
                self._optimizer = self.optimizer_class([param], **self.defaults)
                # A state that was loaded before is kept.
                self.state.setdefault(param, self._optimizer.state[param])
        if self._optimizer is None:
            return
        # The aliases have a .grad of their own: DDP still uses the .grad of params.
        aliases = [param.detach() for param in params]
        for alias, grad in zip(aliases, grads, strict=True):
            alias.grad = grad
        self._optimizer.param_groups[0].update(self.defaults, params=aliases)
        self._optimizer.state = defaultdict(
            dict, zip(aliases, map(self.state.__getitem__, params), strict=True)
        )
        self._optimizer.step()


class OptimizerHookState(HookState):
    """The optimizer of a fused hook, and the parameters that it steps.

    Args:
        functional_optim: made by :func:`functional`, or another object with ``step_param(param,
            grad)``; called by one thread at a time, always on the same parameters on all ranks.
        params: the parameters to step; None is all of the model.

    Attributes:
        iter: steps begun.

    Raises:
        ValueError: ``functional_optim`` has no method ``step_param``.
        TypeError: ``params`` is not an iterable of tensors.
    """

    def __init__(
        self, functional_optim: FunctionalOptimizer, params: Iterable[torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        if not callable(getattr(functional_optim, "step_param", None)):
            raise ValueError(
                f"functional_optim: an object with a method step_param(param, grad); "
                f"got {functional_optim!r}"
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
        """Return whether ``parameter`` is stepped."""
        return self.params_to_optimize is None or parameter in self.params_to_optimize

    def put_loaded(self, bucket: dist.GradBucket) -> None:
        """Give the optimizer the loaded state of the bucket's parameters."""
        for key, parameter in zip(self.keys(bucket), bucket.parameters(), strict=True):
            if key in self._loaded:
                self._state_of_all()[parameter] = self._loaded.pop(key)

    def step(self, parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
        """Step the selected ``parameters`` with their ``gradients``, which have the same order."""
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
        """Return the step count, and the optimizer's state of each parameter by its key.

        Keys are those of :meth:`HookState.keys`. Tensors are the optimizer's own, as in
        ``Optimizer.state_dict``; options such as the learning rate are not saved.

        Raises:
            TypeError: the optimizer has no dict ``state``.
        """
        state = self._state_of_all()
        kept = {
            key: dict(state[parameter])
            for parameter, key in self._keys.items()
            if parameter in state
        }
        return {"iter": self.iter, "state": {**kept, **self._loaded}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from the result of ``state_dict``, also in a new process.

        Tensors are copied, and stay on their device.

        Raises:
            ValueError: it was saved by another kind of state.
            TypeError: the optimizer has no dict ``state``.
        """
        if saved.keys() != {"iter", "state"}:
            raise ValueError(
                f"load_state_dict: saved by another kind of state; "
                f"it has {sorted(saved)} and not ['iter', 'state']"
            )
        self._state_of_all().clear()
        self.iter = saved["iter"]
        self._loaded = copy.deepcopy(saved["state"])

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an OptimizerHookState belongs to the parameters of its model: save its state_dict()"
        )

    def _state_of_all(self) -> dict[torch.Tensor, dict[str, Any]]:
        state = getattr(self.functional_optimizer, "state", None)
        if not isinstance(state, dict):
            raise TypeError(
                f"{type(self.functional_optimizer).__name__} has no dict `state` by parameter, "
                f"so nothing to save or load"
            )
        return state


def hook_then_optimizer(hook: Hook, optimizer_state: OptimizerHookState) -> Hook:
    """Make the hook that runs ``hook`` on a bucket, then steps its parameters with the result.

    Args:
        hook: a communication hook ``(state, bucket) -> Future[Tensor]``.
        optimizer_state: made once per DDP model, with the same arguments on all ranks.

    Returns:
        A hook with the state of ``hook``. Its future holds the result of ``hook``, in the bucket's
        own dtype, once the bucket's parameters are updated.
    """

    def hook_then_optimizer_wrapper(
        hook_state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        parameters = bucket.parameters()
        dtype = bucket.buffer().dtype
        optimizer_state.put_loaded(bucket)
        future = hook(hook_state, bucket)
        optimizer_state.maybe_increase_iter(bucket)

        def step(fut: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            # The result of a compressing hook may be in half precision.
            result = in_dtype_of(bucket.buffer(), fut.value()).to(dtype)
            if result.is_sparse:
                gradients = [result]
            else:
                gradients = list(map(gradient, pieces(bucket, result), parameters))
            optimizer_state.step(parameters, gradients)
            return result

        return future.then(step)

    return hook_then_optimizer_wrapper


def apply_optim_in_backward_hook(
    optimizer_state: OptimizerHookState, hook: Hook = allreduce_hook
) -> Hook:
    """Make the hook of :func:`hook_then_optimizer` that also frees the gradients.

    Gradients are None once backward is over. This saves the memory of the gradients between steps,
    and ``zero_grad()``; parameters that are not stepped keep their gradients. It works on any
    device. torch's own hook takes ``gradient_is_bucket_view`` instead, since DDP itself makes and
    registers it for parameters on which ``_apply_optimizer_in_backward`` was called; do not call
    that function as well.

    Args:
        optimizer_state: made once per DDP model, with the same arguments on all ranks.
        hook: a communication hook ``(state, bucket) -> Future[Tensor]``.

    Returns:
        A hook with the state of ``hook``; its future is that of :func:`hook_then_optimizer`.
    """
    fused = hook_then_optimizer(hook, optimizer_state)
    engine = torch.autograd.Variable._execution_engine

    stepped: list[torch.nn.Parameter] = []

    def free() -> None:
        for parameter in stepped:
            parameter.grad = None
        stepped.clear()

    def apply_optim_in_backward(
        hook_state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        # A rank that has joined runs its hooks outside of a backward.
        if torch._C._current_graph_task_id() != -1:
            stepped.extend(filter(optimizer_state.steps, bucket.parameters()))
            if bucket.is_last():
                # DDP writes all gradients in a callback that it queues after this one, at the end
                # of this graph task: a reentrant checkpoint has a task of its own. Queueing twice
                # puts free behind it.
                engine.queue_callback(lambda: engine.queue_callback(free))
        return fused(hook_state, bucket)

    return apply_optim_in_backward
