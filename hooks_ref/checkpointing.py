"""Activation checkpointing: what a forward would keep for its backward is computed again, or kept elsewhere.

A wrapped module gives the outputs and gradients of the module, and has its parameters, buffers and state_dict keys, under the
names that they have without. Around a module of a DDP model it is made before DDP is.

    checkpoint_wrapper    keeps the inputs alone, and runs the forward again in the backward; buffers are updated the first time alone
    offload_wrapper       keeps what the forward keeps, but in main memory; parameters stay where they are

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174; torch documentation,
``torch.utils.checkpoint`` (which does the work) and ``torch.autograd.graph.saved_tensors_hooks``; tests of
``torch.distributed.algorithms._checkpoint.checkpoint_wrapper`` (names, arguments).
"""

import enum
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

PREFIX = "_checkpoint_wrapped_module"


class CheckpointImpl(enum.Enum):
    """How a forward is run again: see ``use_reentrant`` of ``torch.utils.checkpoint.checkpoint``."""

    REENTRANT = enum.auto()
    NO_REENTRANT = enum.auto()


class ActivationWrapper(torch.nn.Module):
    """Base of the wrappers: a module in place of another, which has its names.

    Attributes and items that the wrapper has none of are those of the module.
    """

    def __init__(self, mod: torch.nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = mod
        self.register_load_state_dict_pre_hook(_add_prefix)

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
        """Return that of the module inside."""
        return self.wrapped.state_dict(*args, **kwargs)

    def named_modules(
        self,
        memo: set[torch.nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[Any]:
        """Yield this module, then the one inside by the same name, and its own: names of parameters follow from these."""
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
        reentrant = self.checkpoint_impl is CheckpointImpl.REENTRANT
        self.checkpoint_fn = partial(
            checkpoint_fn or partial(checkpoint, use_reentrant=reentrant), **checkpoint_fn_kwargs
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ran = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran
            again, ran = ran, True
            with _on_copies_of_buffers(self.wrapped) if again else nullcontext():
                return self.wrapped(*args, **kwargs)

        if self.checkpoint_impl is CheckpointImpl.REENTRANT and kwargs:
            # A reentrant checkpoint hands on what has a position alone.
            count, names = len(args), list(kwargs)
            return self.checkpoint_fn(
                lambda *both: run(*both[:count], **dict(zip(names, both[count:], strict=True))),
                *args,
                *kwargs.values(),
            )
        return self.checkpoint_fn(run, *args, **kwargs)


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
        checkpoint_impl: how; keyword arguments of the forward are fine with both.
        checkpoint_fn: called instead of ``torch.utils.checkpoint.checkpoint``, with a function that runs the module, and its arguments.
        checkpoint_fn_kwargs: handed to it, e.g. ``preserve_rng_state=False``.
    """
    return CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


def offload_wrapper(module: torch.nn.Module) -> torch.nn.Module:
    """Wrap a module so that what its forward keeps for the backward lies in main memory."""
    return OffloadWrapper(module)


def offload_to_cpu(module: torch.nn.Module | None = None) -> AbstractContextManager[Any]:
    """Return a context in which what autograd keeps lies in main memory, pinned where there is an accelerator.

    Args:
        module: whose parameters are kept as they are, since they lie somewhere already.
    """
    stays = (
        {parameter.data_ptr() for parameter in module.parameters()} if module is not None else set()
    )

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        if tensor.data_ptr() in stays or tensor.device.type == "cpu":
            return tensor.device, tensor
        there = torch.empty_like(
            tensor, device="cpu", pin_memory=not tensor.is_sparse
        )  # with its strides
        return tensor.device, there.copy_(tensor)

    def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, tensor = packed
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
        model: whose modules are replaced.
        checkpoint_wrapper_fn: makes the wrapper.
        check_fn: whether to wrap a module; asked once for each, before anything is wrapped.
        auto_wrap_policy: asked instead of it, with ``module``, ``recurse`` and ``nonwrapped_numel``: on the way down whether to look
            inside the module, on the way up whether to wrap it, and how many elements its parameters have that are not wrapped yet.
    """
    if auto_wrap_policy is not None and not callable(auto_wrap_policy):
        raise ValueError(
            f"auto_wrap_policy is called with module, recurse and nonwrapped_numel; got {auto_wrap_policy!r}"
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
        """Return how many elements are wrapped, of the module's parameters."""
        if module in done:
            return done[module]
        numel, wrapped = sum(parameter.numel() for parameter in module.parameters()), 0
        if policy(module=module, recurse=True, nonwrapped_numel=numel):
            for name, child in list(module._modules.items()):
                if child is not None:
                    wrapped += walk(child)
                    setattr(module, name, made.get(child, child))
            if module is not model and policy(
                module=module, recurse=False, nonwrapped_numel=numel - wrapped
            ):
                made[module], wrapped = checkpoint_wrapper_fn(module), numel
        done[module] = wrapped
        return wrapped

    walk(model)


@contextmanager
def _on_copies_of_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Let a forward that runs again update copies: in the buffers themselves, as running statistics, a batch would count twice."""
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
    """Let a state_dict without the wrapper's name be loaded."""
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(f"{prefix}{PREFIX}."):
            state_dict[f"{prefix}{PREFIX}.{key[len(prefix) :]}"] = state_dict.pop(key)
