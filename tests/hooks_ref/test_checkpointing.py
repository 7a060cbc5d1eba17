"""Wrapped modules: the same bits under DDP, and the names that they have without."""

import copy
from functools import partial
from typing import Any

import pytest
import torch

import hooks_ref
from conformance.hosts.pool import Pool
from conformance.scenarios.model import Param, Scenario
from tests.hooks_ref.algorithms import run_hook
from tests.hooks_ref.checkpointing_subjects import WRAPPERS, Block, network
from tests.torch_marks import ignores_autocast_of_torch

WHAT = Scenario("algorithm", "one step", (Param((3,)),), ("crafted",), initial_value=0.0)


@pytest.mark.parametrize("name", WRAPPERS)
def test_trains_to_the_same_bits(pool: Pool, name: str) -> None:
    run_hook(pool, WHAT, 2, setup=f"tests.hooks_ref.checkpointing_subjects:trains,name={name!r}")


@pytest.mark.parametrize("name", WRAPPERS)
def test_has_the_names_of_what_it_wraps(name: str) -> None:
    plain = network()
    wrapped = network()
    hooks_ref.apply_activation_checkpointing(wrapped, WRAPPERS[name])
    assert isinstance(wrapped.first, hooks_ref.ActivationWrapper)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert [key for key, _ in wrapped.named_parameters()] == [
        key for key, _ in plain.named_parameters()
    ]
    assert [key for key, _ in wrapped.named_buffers()] == [key for key, _ in plain.named_buffers()]
    for parameter in wrapped.parameters():
        torch.nn.init.zeros_(parameter)
    wrapped.load_state_dict(plain.state_dict())
    assert all(
        torch.equal(one, other)
        for one, other in zip(wrapped.parameters(), plain.parameters(), strict=True)
    )
    alone = WRAPPERS[name](Block())
    assert list(alone.state_dict()) == list(Block().state_dict())
    alone.load_state_dict(Block().state_dict())


def test_what_a_wrapper_lacks_is_the_modules() -> None:
    wrapped = hooks_ref.checkpoint_wrapper(torch.nn.Sequential(torch.nn.Linear(2, 3)))
    assert wrapped[0].out_features == 3
    assert hooks_ref.offload_wrapper(torch.nn.Linear(2, 3)).in_features == 2
    with pytest.raises(AttributeError, match="nothing"):
        wrapped.nothing  # noqa: B018


@ignores_autocast_of_torch
def test_the_forward_runs_again() -> None:
    """In the backward; not with another function, which keeps its own tensors."""
    calls: list[int] = []

    class Counts(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x.exp()

    for module, often in (
        (hooks_ref.checkpoint_wrapper(Counts()), 2),
        (
            hooks_ref.checkpoint_wrapper(
                Counts(), hooks_ref.CheckpointImpl.REENTRANT, preserve_rng_state=False
            ),
            2,
        ),
        (hooks_ref.checkpoint_wrapper(Counts(), checkpoint_fn=lambda function, x: function(x)), 1),
        (hooks_ref.offload_wrapper(Counts()), 1),
    ):
        calls.clear()
        module(torch.ones(2, requires_grad=True)).sum().backward()
        assert len(calls) == often


def test_choosing_what_to_wrap() -> None:
    net = network()
    hooks_ref.apply_activation_checkpointing(
        net, check_fn=lambda module: isinstance(module, torch.nn.LayerNorm)
    )
    assert sum(isinstance(module, hooks_ref.CheckpointWrapper) for module in net.modules()) == 2
    assert not isinstance(net.blocks[0], hooks_ref.CheckpointWrapper)


@pytest.mark.parametrize("policy", ["size", "classes"])
def test_a_policy_chooses_what_torchs_does(policy: str) -> None:
    """On the way up, by the elements not wrapped yet; never inside a module it did not enter."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

    chosen: Any = {
        "size": partial(
            size_based_auto_wrap_policy,
            min_num_params=50,
            exclude_wrap_modules={torch.nn.Sequential},
        ),
        "classes": ModuleWrapPolicy({Block, torch.nn.LayerNorm}),
    }[policy]
    ours, theirs = (
        torch.nn.Sequential(torch.nn.Linear(6, 6), Block(), torch.nn.Sequential(Block(), Block()))
        for _ in range(2)
    )
    hooks_ref.apply_activation_checkpointing(ours, auto_wrap_policy=chosen)
    torchs.apply_activation_checkpointing(theirs, auto_wrap_policy=chosen)
    assert [type(module).__name__ for module in ours.modules()] == [
        type(module).__name__ for module in theirs.modules()
    ]
    assert sum(isinstance(module, hooks_ref.CheckpointWrapper) for module in ours.modules()) > 2


def test_a_policy_is_called() -> None:
    with pytest.raises(ValueError, match="is called with module, recurse and nonwrapped_numel"):
        hooks_ref.apply_activation_checkpointing(network(), auto_wrap_policy={torch.nn.Linear})  # type: ignore[arg-type]


@ignores_autocast_of_torch
@pytest.mark.parametrize("name", ["plain", "reentrant", "both"])
def test_buffers_are_updated_by_the_first_forward_alone(name: str) -> None:
    plain = torch.nn.BatchNorm1d(3)
    wrapped = WRAPPERS[name](torch.nn.BatchNorm1d(3))
    buffer = wrapped.running_mean
    for module in (plain, wrapped):
        module(torch.arange(12.0).view(4, 3).requires_grad_()).square().sum().backward()
    assert wrapped.running_mean is buffer
    assert all(
        torch.equal(one, other)
        for one, other in zip(plain.buffers(), wrapped.buffers(), strict=True)
    )


@ignores_autocast_of_torch
def test_selective_checkpoints_leave_buffers_to_the_first_forward() -> None:
    """Copies of buffers are no operations of the forward, whose results would be kept."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    ran: list[str] = []

    class Block(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ran.append("forward")
            return super().forward(x)

    plain = Block(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh())
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    wrapped = hooks_ref.checkpoint_wrapper(copy.deepcopy(plain), context_fn=contexts)
    for module in (plain, wrapped):
        module(torch.arange(12.0).view(4, 3).requires_grad_()).square().sum().backward()
    assert ran == ["forward"] * 3
    for one, other in zip(plain.buffers(), wrapped.buffers(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class Noting:
    """A context that may be entered several times."""

    def __init__(self, name: str, entered: list[str]) -> None:
        self.name = name
        self.entered = entered

    def __enter__(self) -> None:
        self.entered.append(self.name)

    def __exit__(self, *_: object) -> None:
        self.entered.append("left")


@ignores_autocast_of_torch
def test_contexts_are_entered_for_each_forward() -> None:
    entered: list[str] = []
    wrapped = hooks_ref.checkpoint_wrapper(
        torch.nn.BatchNorm1d(3),
        context_fn=lambda: (Noting("first", entered), Noting("again", entered)),
    )
    output = wrapped(torch.arange(12.0).view(4, 3).requires_grad_()).square().sum()
    output.backward(retain_graph=True)
    output.backward()
    assert entered == ["first", "left", "again", "left", "again", "left"]
    assert wrapped.num_batches_tracked == 1


def test_a_saved_tensor_that_is_changed_in_place_is_an_error() -> None:
    """Autograd does not compare the versions of tensors that hooks keep."""
    wrapped = hooks_ref.offload_wrapper(torch.nn.Tanh())
    output = wrapped(torch.ones(3, requires_grad=True))
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        output.sum().backward()


class Reads(torch.nn.Module):
    """Reads inputs in any places, a parameter and a buffer; the buffer counts is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("gain", torch.ones(3))
        self.register_buffer("counts", torch.zeros(1))

    def forward(
        self, x: torch.Tensor, *, by_name: torch.Tensor, listed: dict[str, list[torch.Tensor]]
    ) -> torch.Tensor:
        self.counts += 1
        return (torch.relu(x) + by_name + listed["a"][0]) * self.weight * self.gain


@ignores_autocast_of_torch
@pytest.mark.parametrize("name", ["plain", "reentrant", "both"])
@pytest.mark.parametrize("place", ["x", "by_name", "listed", "weight", "gain"])
def test_a_second_forward_on_changed_tensors_is_an_error(name: str, place: str) -> None:
    wrapped = WRAPPERS[name](Reads())
    tensors = {at: torch.ones(3, requires_grad=at == "x") * 2 for at in ("x", "by_name", "listed")}
    given = {"by_name": tensors["by_name"], "listed": {"a": [tensors["listed"]]}}
    output = wrapped(tensors["x"], **given)
    with torch.no_grad():
        tensors.get(place, getattr(wrapped, place, None)).add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|changed in place"):
        output.sum().backward()


@ignores_autocast_of_torch
def test_a_buffer_that_the_forward_updates_may_change() -> None:
    """Two forwards come before their backwards; inference tensors have no versions."""
    wrapped = WRAPPERS["plain"](Reads())
    with torch.inference_mode():
        factor = torch.ones(3)
    outputs = [
        wrapped(torch.ones(3, requires_grad=True), by_name=factor, listed={"a": [factor]})
        for _ in range(2)
    ]
    sum(output.sum() for output in outputs).backward()
    assert wrapped.counts == 2
