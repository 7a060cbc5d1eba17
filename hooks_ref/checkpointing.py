"""Activation checkpointing: recompute a forward's activations in its backward, or offload them.

A wrapped module gives the outputs and gradients of the module, and its parameters, buffers and
state_dict keys keep their names. Wrap a module of a DDP model before making the DDP module.

    checkpoint_wrapper    keeps only the inputs, and runs the forward again in the backward;
                          only the first forward updates buffers. The backward raises
                          RuntimeError if an input, a parameter, or a buffer that the forward
                          left alone has been changed in place
    offload_wrapper       keeps the saved tensors of the forward in main memory; parameters stay
                          on their device. Tensors that are there already are kept as they are: the
                          backward raises RuntimeError if one has been changed in place

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016,
arXiv:1604.06174; torch documentation, ``torch.utils.checkpoint`` (which is called here) and
``torch.autograd.graph.saved_tensors_hooks``; tests of
``torch.distributed.algorithms._checkpoint.checkpoint_wrapper`` (names, arguments).
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

PREFIX = "_checkpoint_wrapped_module"


class CheckpointImpl(enum.Enum):
    """The implementation: see ``use_reentrant`` of ``torch.utils.checkpoint.checkpoint``."""

    REENTRANT = enum.auto()
    NO_REENTRANT = enum.auto()


class ActivationWrapper(torch.nn.Module):
    """Base of the wrappers: a module in place of another module, with the same names.

    Attributes and items that the wrapper lacks are those of the module inside.
    """

    def __init__(self, mod: torch.nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = mod
        if hasattr(torch.nn.Module, "register_load_state_dict_pre_hook"):
            self.register_load_state_dict_pre_hook(_add_prefix)
        else:  # torch 2.4
            self._register_load_state_dict_pre_hook(_add_prefix, with_module=True)

    @property
    def wrapped(self) -> torch.nn.Module:
        """The module inside."""
        inside: torch.nn.Module = self._modules[PREFIX]  # type: ignore[assignment]
        return inside

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.wrapped, name)

    def __getitem__(self, key: int) -> Any:
        return self.wrapped[key]  # type: ignore[index]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state_dict of the module inside."""
        return self.wrapped.state_dict(*args, **kwargs)

    def named_modules(
        self,
        memo: set[torch.nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[Any]:
        """Yield this module, then the module inside by the same name, and its submodules.

        So parameters keep their names, which torch derives from the names of modules.
        """
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.wrapped.named_modules(memo, prefix, remove_duplicate)


class CheckpointWrapper(ActivationWrapper):
    """See :func:`checkpoint_wrapper`."""

    def __init__(
        self,
        mod: torch.nn.Module,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> None:
        super().__init__(mod)
        self.checkpoint_impl = CheckpointImpl(checkpoint_impl)
        # A context of selective checkpoints keeps the results of operations: the copies of buffers
        # that a repeated forward takes must be made outside of it.
        self._context_fn = checkpoint_fn_kwargs.get("context_fn")
        reentrant = self.checkpoint_impl is CheckpointImpl.REENTRANT
        # Up to torch 2.12 a checkpoint without reentry leaves its hooks on saved tensors in force
        # if the forward raises an error. So the error is raised after the checkpoint has returned.
        self._leaves_hooks = checkpoint_fn is None and not reentrant
        self.checkpoint_fn = partial(
            checkpoint_fn or partial(checkpoint, use_reentrant=reentrant), **checkpoint_fn_kwargs
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ran = False
        raised: list[Exception] = []
        versions = _Versions(self.wrapped, args, kwargs)
        makes_contexts = self._context_fn is not None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran
            again = ran
            ran = True
            try:
                if again:
                    versions.require_unchanged()
                    with nullcontext() if makes_contexts else _on_copies_of_buffers(self.wrapped):
                        return self.wrapped(*args, **kwargs)
                result = self.wrapped(*args, **kwargs)
                versions.ignore_changed_buffers()
                return result
            except Exception as error:
                if again or not self._leaves_hooks:
                    raise
                raised.append(error)
                return None

        if self.checkpoint_impl is CheckpointImpl.REENTRANT and kwargs:
            # A reentrant checkpoint passes only positional arguments on.
            count = len(args)

            def run_with_names(*both: Any) -> Any:
                return run(*both[:count], **dict(zip(kwargs, both[count:], strict=True)))

            return self.checkpoint_fn(run_with_names, *args, *kwargs.values())
        if makes_contexts:
            result = self.checkpoint_fn(run, *args, context_fn=self._contexts, **kwargs)
        else:
            result = self.checkpoint_fn(run, *args, **kwargs)
        if raised:
            raise raised[0]
        return result

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of both forwards; the repeated one enters its own behind copies."""
        assert self._context_fn is not None
        first, again = self._context_fn()
        return first, _OnCopies(self.wrapped, again)


class _OnCopies:
    """A context on copies of a module's buffers, with another context inside.

    It is entered again for each backward of a graph.
    """

    def __init__(self, module: torch.nn.Module, inside: AbstractContextManager[Any]) -> None:
        self._module = module
        self._inside = inside

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(_on_copies_of_buffers(self._module))
            stack.enter_context(self._inside)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


class _Versions:
    """The versions of the tensors that a forward reads, as a second forward has to find them.

    torch's checkpoint compares those of positional arguments alone. Tensors that it keeps neither
    in the graph nor in a closure are not kept here.

    Args:
        module: parameters and buffers are those of this module.
        args: positional arguments. Tensors in containers are compared, others are torch's.
        kwargs: keyword arguments.
    """

    def __init__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._inputs: list[tuple[torch.Tensor, int]] = []
        self._parameters: list[tuple[torch.Tensor, int]] = []
        self._buffers: list[tuple[torch.Tensor, int]] = []
        if not torch.is_grad_enabled():
            return
        others = [arg for arg in args if not isinstance(arg, torch.Tensor)]
        self._inputs = _with_versions(_tensors([others, kwargs]))
        self._parameters = _with_versions(module.parameters())
        self._buffers = _with_versions(module.buffers())

    def ignore_changed_buffers(self) -> None:
        """Leave out buffers that the forward itself updates, as running statistics."""
        self._buffers = [
            (buffer, version) for buffer, version in self._buffers if buffer._version == version
        ]

    def require_unchanged(self) -> None:
        """Raise RuntimeError if a tensor has another version than before the first forward."""
        for name, watched in (
            ("an input", self._inputs),
            ("a parameter", self._parameters),
            ("a buffer", self._buffers),
        ):
            for tensor, version in watched:
                if tensor._version != version:
                    raise RuntimeError(
                        f"{name} of shape {tuple(tensor.shape)} has been changed in place after "
                        "the forward, which cannot be run again"
                    )


class OffloadWrapper(ActivationWrapper):
    """See :func:`offload_wrapper`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with offload_to_cpu(self.wrapped):
            return self.wrapped(*args, **kwargs)


def checkpoint_wrapper(
    module: torch.nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> torch.nn.Module:
    """Wrap a module so that its forward is run again in the backward.

    Args:
        module: any module.
        checkpoint_impl: the implementation; the forward may have keyword arguments with both.
        checkpoint_fn: called instead of ``torch.utils.checkpoint.checkpoint``, with a function that
            runs the module, and its arguments.
        checkpoint_fn_kwargs: arguments of ``checkpoint_fn``, e.g. ``preserve_rng_state=False``.
    """
    return CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


def offload_wrapper(module: torch.nn.Module) -> torch.nn.Module:
    """Wrap a module so that the saved tensors of its forward are kept in main memory."""
    return OffloadWrapper(module)


def offload_to_cpu(module: torch.nn.Module | None = None) -> AbstractContextManager[Any]:
    """Return a context in which autograd keeps its saved tensors in main memory.

    The memory is pinned if there is an accelerator.

    Args:
        module: its parameters are not offloaded, since they have their own memory already.
    """
    parameters = module.parameters() if module is not None else ()
    stays = {parameter.data_ptr() for parameter in parameters}

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor, int]:
        if tensor.data_ptr() in stays or tensor.device.type == "cpu":
            return tensor.device, tensor, tensor._version
        # empty_like keeps the strides.
        there = torch.empty_like(tensor, device="cpu", pin_memory=not tensor.is_sparse)
        there.copy_(tensor)
        return tensor.device, there, there._version

    def unpack(packed: tuple[torch.device, torch.Tensor, int]) -> torch.Tensor:
        device, tensor, version = packed
        if tensor._version != version:
            # Autograd compares the versions of saved tensors, but not of those that hooks return.
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that the backward needs has been changed "
                "in place after the forward saved it"
            )
        return tensor.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def apply_activation_checkpointing(
    model: torch.nn.Module,
    checkpoint_wrapper_fn: Callable[[torch.nn.Module], torch.nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[torch.nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Callable[..., bool] | None = None,
) -> None:
    """Wrap modules inside ``model`` in place: inner ones first, each once, never ``model`` itself.

    Args:
        model: the model whose modules are replaced.
        checkpoint_wrapper_fn: makes the wrapper.
        check_fn: returns whether to wrap a module; called once for each, before any is wrapped.
        auto_wrap_policy: called instead of ``check_fn``, with ``module``, ``recurse`` and
            ``nonwrapped_numel``. On the way down (``recurse=True``) it returns whether to go inside
            the module, on the way up whether to wrap it. ``nonwrapped_numel`` is the number of
            elements in the module's parameters that are not wrapped yet.

    Raises:
        ValueError: ``auto_wrap_policy`` is not callable.
    """
    if auto_wrap_policy is not None and not callable(auto_wrap_policy):
        raise ValueError(
            f"auto_wrap_policy is called with module, recurse and nonwrapped_numel; "
            f"got {auto_wrap_policy!r}"
        )
    chosen = {
        module
        for module in model.modules()
        if auto_wrap_policy is None and module is not model and check_fn(module)
    }
    policy = auto_wrap_policy or (
        lambda module, recurse, nonwrapped_numel: recurse or module in chosen
    )
    made: dict[torch.nn.Module, torch.nn.Module] = {}
    done: dict[torch.nn.Module, int] = {}

    def walk(module: torch.nn.Module) -> int:
        """Wrap inside ``module``; return how many elements of its parameters are wrapped."""
        if module in done:
            return done[module]
        numel = sum(parameter.numel() for parameter in module.parameters())
        wrapped = 0
        if policy(module=module, recurse=True, nonwrapped_numel=numel):
            for name, child in list(module._modules.items()):
                if child is not None:
                    wrapped += walk(child)
                    setattr(module, name, made.get(child, child))
            if module is not model and policy(
                module=module, recurse=False, nonwrapped_numel=numel - wrapped
            ):
                made[module] = checkpoint_wrapper_fn(module)
                wrapped = numel
        done[module] = wrapped
        return wrapped

    walk(model)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among a value and the containers in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item)


def _with_versions(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return tensors with their versions, except those of inference mode, which have none."""
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


@contextmanager
def _on_copies_of_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Run a repeated forward on copies of the buffers.

    Otherwise a batch would count twice in buffers such as running statistics.
    """
    owners = [(inside, dict(inside._buffers)) for inside in module.modules() if inside._buffers]
    for inside, buffers in owners:
        inside._buffers.update(
            {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}
        )
    try:
        yield
    finally:
        for inside, buffers in owners:
            inside._buffers.update(buffers)


def _add_prefix(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the wrapper's name to keys, so that a state_dict without it can be loaded."""
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(f"{prefix}{PREFIX}."):
            state_dict[f"{prefix}{PREFIX}.{key[len(prefix) :]}"] = state_dict.pop(key)
