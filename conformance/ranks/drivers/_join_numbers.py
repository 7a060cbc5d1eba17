"""The numbers that a joinable computes: gradients of each step, and its state after the join."""

import hashlib
import numbers
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from conformance.ranks.drivers._join_parts import parts_of
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.digest import digest
from conformance.scenarios.join_draws import DIVISOR

MANY = 4096  # elements of a parameter on record
LEARNING_RATE = 2.0**-6


class Numbers:
    """Trains a joinable in one context, and records its gradients and digests of its state.

    Args:
        driver: of this rank.
        subject: the joinable.
        take_step: takes one of its steps.
        drawn_as: the context from whose seeds the inputs are drawn, if it is another one.

    Attributes:
        is_trainer: clear gradients before a step, and step the parameters that it leaves as they
            are.
    """

    def __init__(
        self,
        driver: RankDriver,
        subject: Any,
        take_step: Callable[[], None],
        drawn_as: int | None = None,
    ) -> None:
        self.driver = driver
        self.subject = subject
        self.take_step = take_step
        self.drawn_as = drawn_as
        self.is_trainer = True
        self.parameters = trained_by(subject)
        self.local: dict[int, torch.Tensor] = {}
        self.calls = 0
        self.at = 0
        self.context = 0
        self._may_ask = False

    @contextmanager
    def watched(self, context: int) -> Iterator[None]:
        """Watch the gradients that autograd computes for the parameters on this rank.

        A hook of a leaf sees its gradient before it is accumulated, and so before any exchange.
        """
        self.context = context
        self.driver.recorder.step = context
        self._may_ask = self._state_is_local()
        handles = [
            _register_hook(parameter, self._receiver(index))
            for index, parameter in enumerate(self.parameters)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def step(self) -> None:
        """Take a step with inputs of its own, and step the parameters that it does not step."""
        drawn_as = self.context if self.drawn_as is None else self.drawn_as
        name = f"{self.driver.scenario.session_seed}/{self.driver.rank}/{drawn_as}/{self.at}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
        torch.manual_seed(seed)
        random.seed(seed)
        self.local = {}
        self.calls = 0
        if self.is_trainer:
            for parameter in self.parameters:
                parameter.grad = None
        before = [(one._version, one.detach().clone()) for one in self.parameters]
        self.take_step()
        self._keep_gradients()
        for parameter, (version, value) in zip(self.parameters, before, strict=True):
            # A step at a rate of 0, as in a warm-up, leaves the values, and raises the version.
            is_stepped = parameter._version != version or not torch.equal(parameter, value)
            if self.is_trainer and parameter.grad is not None and not is_stepped:
                parameter.data.sub_(parameter.grad, alpha=LEARNING_RATE)
        self.at += 1

    def leaving(self) -> None:
        """Record the state at the end of the body, before the join."""
        self._note_state("leaving", asks=self._may_ask)

    def stepped_outside(self) -> None:
        """Record the state after steps outside of any context."""
        self._note_state("outside", asks=self._may_ask)

    def left(self) -> None:
        """Record the state after the join."""
        self._note_state("left", asks=True)

    def _receiver(self, index: int) -> Callable[[torch.Tensor], None]:
        def receive(gradient: torch.Tensor) -> None:
            known = self.local.get(index)
            gradient = gradient.detach()
            self.local[index] = gradient.clone() if known is None else known + gradient
            self.calls += 1

        return receive

    def _keep_gradients(self) -> None:
        named = self.driver.recorder.event
        named("gradients", at=self.at, parameters=len(self.parameters), calls=self.calls)
        for index, parameter in enumerate(self.parameters):
            stride = -(-parameter.numel() // MANY) or 1
            gradients = {"local": self.local.get(index), "grad": parameter.grad}
            for name, gradient in gradients.items():
                if gradient is not None and not gradient.is_sparse:
                    kept = gradient.detach().reshape(-1)[::stride].clone()
                    self.driver.keep(f"{self.at}/{name}/p{index}", kept)

    def _state_is_local(self) -> bool:
        """Whether ``state_dict()`` issues no collective, so that a rank may call it alone."""
        self.driver.collectives.take_sent()
        self._state(asks=True)
        return not self.driver.collectives.take_sent()

    def _note_state(self, when: str, asks: bool) -> None:
        self.driver.recorder.event(
            "state_of_joinable",
            when=when,
            digests=self._state(asks),
            divides=_knows_divisor(self.subject),
        )

    def _state(self, asks: bool) -> dict[str, str]:
        """Return digests of the values of its state, by name."""
        digests = {f"parameter {at}": digest_of(value) for at, value in enumerate(self.parameters)}
        parts = {"": self.subject, **parts_of(self.subject)}
        left_out = _left_to_ranks(parts.values())
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module):
                tensors = [*part.named_parameters(), *part.named_buffers()]
                digests |= {
                    f"{name}{key}": digest_of(value)
                    for key, value in tensors
                    if _address(value) not in left_out
                }
            if isinstance(part, torch.optim.Optimizer):
                digests |= _optimizer_state(name, part)
        if asks and hasattr(self.subject, "state_dict"):
            try:
                state = self.subject.state_dict()
            except RuntimeError:
                # ZeroRedundancyOptimizer has none before it is consolidated.
                return digests
            digests |= _flat("state_dict", state, left_out)
        return digests


class NumbersOfOne(Numbers):
    """Records the numbers of one of several joinables in a context under a number of their own."""

    def _keep_gradients(self) -> None:
        with self._on_its_record():
            super()._keep_gradients()

    def _note_state(self, when: str, asks: bool) -> None:
        with self._on_its_record():
            super()._note_state(when, asks)

    @contextmanager
    def _on_its_record(self) -> Iterator[None]:
        recorder = self.driver.recorder
        of_context = recorder.step
        recorder.step = self.context
        try:
            yield
        finally:
            recorder.step = of_context


def trained_by(subject: Any) -> list[torch.Tensor]:
    """Return the parameters that a joinable or one of its parts trains, each once.

    Those of an optimizer are among them if they are frozen just now, as one of two models that are
    trained in turns: so all ranks count parameters alike, whatever their last step has been.
    """
    parts = (subject, *parts_of(subject).values())
    optimized = {id(tensor) for part in parts for tensor in _optimized(part)}
    found: dict[int, torch.Tensor] = {}
    for part in parts:
        tensors = _optimized(part)
        if isinstance(part, torch.nn.Module):
            tensors = list(part.parameters())
        elif isinstance(part, (list, tuple)):
            tensors = [tensor for tensor in part if isinstance(tensor, torch.Tensor)]
        elif isinstance(part, torch.Tensor):
            tensors = [part]
        for tensor in tensors:
            if tensor.is_leaf and (tensor.requires_grad or id(tensor) in optimized):
                found.setdefault(id(tensor), tensor)
    return list(found.values())


def are_cleared(parameters: list[torch.Tensor]) -> bool:
    """Whether no parameter has a gradient other than 0."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    return not any(one.to_dense().any() for one in gradients)


def clear_gradients(parameters: list[torch.Tensor], are_dropped: list[bool]) -> None:
    """Clear gradients: drop some, and set the others to zeros in their memory, which may be a part
    of a flat vector.
    """
    for parameter, is_dropped in zip(parameters, are_dropped, strict=False):
        if is_dropped:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def _optimized(part: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer that may have gradients; none of another part."""
    groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else ()
    return [
        tensor
        for group in groups
        for tensor in group["params"]
        if tensor.is_floating_point() or tensor.is_complex()
    ]


def _register_hook(
    parameter: torch.Tensor, receive: Callable[[torch.Tensor], None]
) -> torch.utils.hooks.RemovableHandle:
    """Register a hook of a leaf, also of one that is frozen just now."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_hook(receive)
    parameter.requires_grad_(is_trained)
    return handle


def _optimizer_state(name: str, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    digests: dict[str, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            key = f"{name}group {number}, parameter {place}"
            digests[key] = digest_of(parameter)
            for field, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, (torch.Tensor, numbers.Number)):
                    digests[f"{key}, {field}"] = digest_of(value)
    return digests


def _left_to_ranks(parts: Iterable[Any]) -> set[int]:
    """Return the addresses of the buffers that torch's DDP leaves to each rank, as the statistics
    of its own inputs: those under ``broadcast_buffers=False``.
    """
    return {
        _address(buffer)
        for part in parts
        if isinstance(part, torch.nn.Module)
        for module in part.modules()
        if isinstance(module, DistributedDataParallel) and not module.broadcast_buffers
        for buffer in module.buffers()
    } - {0}


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a dense tensor; 0 for one that has none."""
    return tensor.data_ptr() if tensor.layout == torch.strided else 0


def _flat(name: str, value: Any, left_out: set[int]) -> dict[str, str]:
    """Return digests of the tensors in nested dictionaries and lists, but for those at the
    addresses that are left out.
    """
    if isinstance(value, torch.Tensor):
        return {} if _address(value) in left_out else {name: digest_of(value)}
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    digests: dict[str, str] = {}
    for at, inner in items:
        digests |= _flat(f"{name}/{at}", inner, left_out)
    return digests


def digest_of(value: Any) -> str:
    """Return a digest of a tensor, or the text of another value."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return digest(value.coalesce().to_dense() if value.is_sparse else value)


def _knows_divisor(subject: Any) -> bool:
    """Whether ``join_hook`` names the keyword argument that decides the divisor, or calls that of a
    base class which does.
    """
    if isinstance(subject, DistributedDataParallel):
        return True
    for made in type(subject).__mro__:
        code = getattr(made.__dict__.get("join_hook"), "__code__", None)
        if code is None:
            continue
        if DIVISOR in (*code.co_varnames, *code.co_names, *code.co_consts):
            return True
        if "super" not in code.co_names:
            return False
    return False
