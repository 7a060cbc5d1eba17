"""An optimizer inside the hook steps as after vanilla DDP's backward, bit for bit."""

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from conformance.hosts.pool import Pool
from conformance.records.run import Run
from conformance.scenarios.hook import COLLECTIVE_RAISES, SPARSE, TRAINING
from conformance.scenarios.model import Param, Scenario
from hooks_ref.optimizer_overlap import (
    OptimizerHookState,
    apply_optim_in_backward_hook,
    functional,
    hook_then_optimizer,
)
from tests.hooks_ref.algorithms import (
    PARAMS,
    every,
    gradients,
    other_tensors,
    require_same_bits,
    result,
    run_hook,
    scenario,
    torchs_own_fails,
    try_hook,
)
from tests.torch_marks import needs_build_for_cpu, taken_by_gloo

SUBJECTS = "tests.hooks_ref.optimizer_overlap_subjects"
TEN_STEPS = replace(TRAINING, steps=("normal",) * 10)
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
CHANNELS_LAST = 2
TRANSPOSED = 4  # in PARAMS

OPTIMIZERS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", MOMENTUM),
    ("SGD", {**MOMENTUM, "nesterov": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.1}),
]
MORE_OPTIMIZERS = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    *((name, {"lr": 0.01}) for name in ("Adadelta", "Adamax", "Rprop", "NAdam", "RAdam", "ASGD")),
]


def setup(name: str, **kwargs: Any) -> str:
    return ",".join([f"{SUBJECTS}:{name}", *(f"{key}={value!r}" for key, value in kwargs.items())])


def train(
    pool: Pool,
    what: Scenario,
    name: str,
    world: int = 2,
    *,
    algorithm: str = "SGD",
    options: Any = MOMENTUM,
    **kwargs: Any,
) -> Run:
    return run_hook(
        pool, what, world, setup=setup(name, algorithm=algorithm, options=options, **kwargs)
    )


def require_same_tensors(one: Run, other: Run) -> None:
    """Everything recorded, parameters of every step among them, on every rank."""
    for mine, theirs in zip(one.ranks, other.ranks, strict=True):
        assert mine.tensors.keys() == theirs.tensors.keys()
        assert other_tensors(mine.tensors, theirs.tensors) == []


def require_replicas(run: Run) -> None:
    first, *others = run.ranks
    for other in others:
        assert other_tensors(first.tensors, other.tensors) == []


def require_trained(run: Run) -> None:
    """Every parameter changed at every step, so that equal runs mean something.

    A bias before batch norm has no gradient.
    """
    for name, tensor in run.ranks[0].tensors.items():
        step, _, rest = name.partition("/")
        if step.isdigit() and step != "0" and not rest.endswith("0.bias"):
            assert not torch.equal(tensor, run.ranks[0].tensors[f"{int(step) - 1}/{rest}"]), name


def by_name(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize(("algorithm", "options"), OPTIMIZERS, ids=by_name)
def test_every_optimizer_trains_as_after_vanilla(
    pool: Pool, algorithm: str, options: dict[str, Any]
) -> None:
    one, other = (
        train(pool, TEN_STEPS, name, algorithm=algorithm, options=options)
        for name in ("ours", "vanilla")
    )
    require_trained(one)
    require_replicas(one)
    require_same_tensors(one, other)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"inner": "fp16"},
        {"inner": "torch_fp16_wrapped"},
        {"inner": "powerSGD"},
        {"inner": "elsewhere"},
        {"accumulate": True},
        {"decay": True},
    ],
    ids=lambda kwargs: (
        "-".join(map(str, kwargs.values())) if "inner" in kwargs else "-".join(kwargs)
    ),
)
def test_any_hook_accumulation_and_schedules(pool: Pool, kwargs: dict[str, Any]) -> None:
    one, other = (train(pool, TEN_STEPS, name, **kwargs) for name in ("ours", "vanilla"))
    require_replicas(one)
    require_same_tensors(one, other)


def test_training_with_gradients_as_views_of_buckets(pool: Pool) -> None:
    one, other = (
        train(
            pool,
            replace(TEN_STEPS, ddp=replace(TEN_STEPS.ddp, gradient_as_bucket_view=True)),
            name,
            3,
        )
        for name in ("ours", "vanilla")
    )
    require_replicas(one)
    require_same_tensors(one, other)


@pytest.mark.parametrize(("world", "view"), [(2, False), (3, True)], ids=["copies", "views"])
def test_frees_gradients_in_backward(pool: Pool, world: int, view: bool) -> None:
    what = replace(TEN_STEPS, ddp=replace(TEN_STEPS.ddp, gradient_as_bucket_view=view))
    adam = {"algorithm": "Adam", "options": {"lr": 0.01}}
    # The run itself requires None after backward.
    one = train(pool, what, "ours", world, in_backward=True, **adam)
    require_same_tensors(one, train(pool, what, "vanilla", world, **adam))


def test_only_some_parameters(pool: Pool) -> None:
    one, other = (train(pool, scenario(4), name, only=[0, 4, 7]) for name in ("ours", "vanilla"))
    require_same_bits(one, other)
    for step, rank, index in every(one):
        assert bool(result(one, rank, step, index).any()) == (index in (0, 4, 7))
    # The run itself requires that the other gradients stay.
    freed = train(pool, scenario(4), "ours", only=[0, 4, 7], in_backward=True)
    require_same_bits(freed, other)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.rarely), 3])
def test_agrees_with_an_oracle_to_the_last_bit(pool: Pool, world: int) -> None:
    """Momentum SGD in float64, all in powers of two.

    A crafted mean is a multiple of 2**-3 below 2**8. With momentum 1/2, ten steps make the buffer a
    multiple of 2**-12 below 2**9, and with a learning rate of 1/2 the parameter one of 2**-13 below
    10 * 2**8 / 2 * 2 < 2**12, of which one is added per step: 24 bits while it stays below 2**11,
    which is asserted. All of it is exact in float32.
    """
    run = train(
        pool, scenario(10, kind="crafted"), "ours", world, options={"lr": 0.5, "momentum": 0.5}
    )
    for index in range(len(PARAMS)):
        parameter = buffer = torch.zeros((), dtype=torch.float64)
        for step in range(10):
            buffer = buffer / 2 + gradients(run, step, index).mean(0)
            parameter = parameter - buffer / 2
            assert parameter.abs().max() < 2**11
            for rank in range(world):
                assert torch.equal(result(run, rank, step, index), parameter), (rank, step, index)


@pytest.mark.parametrize(("algorithm", "world"), [("SGD", 3), ("Adam", 2)])
def test_every_layout_and_shape(pool: Pool, algorithm: str, world: int) -> None:
    options = MOMENTUM if algorithm == "SGD" else {"lr": 0.01}
    one, other = (
        train(pool, scenario(10), name, world, algorithm=algorithm, options=options)
        for name in ("ours", "vanilla")
    )
    require_same_bits(one, other)
    require_replicas(one)


DTYPES = (
    *(Param((3, 5), dtype) for dtype in ("float32", "float64", "float16", "bfloat16", "complex64")),
    *(
        Param((0,)),
        Param((2, 3), "complex64", "transposed"),
        Param((), "float64"),
        Param((0, 3), "complex64"),
    ),
)


@pytest.mark.parametrize("inner", ["allreduce", "elsewhere"])
def test_every_dtype(pool: Pool, inner: str) -> None:
    what = scenario(5, params=taken_by_gloo(DTYPES))
    one, other = (train(pool, what, name, inner=inner) for name in ("ours", "vanilla"))
    require_same_bits(one, other)


@pytest.mark.parametrize(
    ("algorithm", "options"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adagrad", {"lr": 0.1})]
)
def test_sparse_gradients(pool: Pool, algorithm: str, options: dict[str, Any]) -> None:
    # Without the steps of NaN and infinities: an optimizer keeps these.
    what = replace(SPARSE, steps=SPARSE.steps[:3], groups=())
    one, other = (
        train(pool, what, name, algorithm=algorithm, options=options)
        for name in ("ours", "vanilla")
    )
    require_same_bits(one, other)


def test_leaves_gradients_to_ddp(pool: Pool) -> None:
    """After backward every gradient is the mean, as without an optimizer in the hook."""
    plain = run_hook(pool, scenario(4), hook="hooks_ref:allreduce_hook")
    for view in (False, True):
        require_same_bits(
            train(
                pool,
                replace(scenario(4), ddp=replace(scenario(4).ddp, gradient_as_bucket_view=view)),
                "ours",
                shown=False,
            ),
            plain,
        )


@pytest.mark.parametrize("algorithm", ["SGD", "Adam"])
def test_gives_the_bits_that_torch_gives(pool: Pool, algorithm: str) -> None:
    """torch's hook, and torch's functional optimizers in our hook."""
    options = MOMENTUM if algorithm == "SGD" else {"lr": 0.01}
    one = train(pool, TEN_STEPS, "ours", algorithm=algorithm, options=options)
    require_same_tensors(
        one, train(pool, TEN_STEPS, "torchs", algorithm=algorithm, options=options)
    )
    require_same_tensors(
        one, train(pool, TEN_STEPS, "ours", algorithm=algorithm, options=options, torchs=True)
    )


def test_torchs_own_steps_with_the_wrong_elements(pool: Pool) -> None:
    """If the parameter is not C-contiguous, torch permutes it silently."""
    torchs, vanilla = (train(pool, scenario(3), name) for name in ("torchs", "vanilla"))
    wrong = {
        index
        for step, rank, index in every(torchs)
        if not torch.equal(result(torchs, rank, step, index), result(vanilla, rank, step, index))
    }
    assert wrong == {CHANNELS_LAST, TRANSPOSED}


def test_torchs_own_steps_with_what_is_in_the_bucket(pool: Pool) -> None:
    """If the hook returns its mean in another tensor, torch steps with the local gradient."""
    torchs = train(pool, scenario(1), "torchs", inner="elsewhere")
    assert not torch.equal(result(torchs, 0, 0, 0), result(torchs, 1, 0, 0))


@needs_build_for_cpu
def test_torchs_own_in_backward_needs_an_accelerator(pool: Pool) -> None:
    with torchs_own_fails("Cannot access accelerator device when none is available"):
        run_hook(pool, TRAINING, setup=setup("torchs_in_backward"))


@pytest.mark.parametrize(
    ("algorithm", "torchs"), [("Adagrad", False), ("SGD", False), ("Adam", True)]
)
def test_resumes_bit_for_bit(pool: Pool, tmp_path: Path, algorithm: str, torchs: bool) -> None:
    options = {"lr": 0.01, "weight_decay": 0.1} | ({"momentum": 0.9} if algorithm == "SGD" else {})
    common: dict[str, Any] = {"algorithm": algorithm, "options": options, "torchs": torchs}
    whole = train(pool, scenario(12), "ours", **common)
    train(pool, scenario(6), "ours", save=str(tmp_path), **common)
    rest = train(pool, scenario(6, first_step=6), "ours", load=str(tmp_path), **common)
    require_same_bits(rest, whole, steps=lambda step: step + 6)


def test_a_failed_collective_surfaces(pool: Pool) -> None:
    run = try_hook(pool, COLLECTIVE_RAISES, setup=setup("ours", options=MOMENTUM, shown=False))
    assert [rank.first("fault", raised=True) is not None for rank in run.ranks] == [True, True]


class Bucket:
    """The part of ``GradBucket`` that hooks use, in this process."""

    def __init__(
        self, parameters: list[torch.Tensor], gradient: float | torch.Tensor = 1.0
    ) -> None:
        self._parameters = parameters
        self._buffer = torch.ones(sum(p.numel() for p in parameters)) * gradient

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return True


def local(_: object, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def failed(_: object, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
    def fail(fut: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        raise ValueError("this collective failed")

    return local(_, bucket).then(fail)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(("algorithm", "options"), MORE_OPTIMIZERS, ids=by_name)
def test_steps_like_the_optimizer_itself(algorithm: str, options: dict[str, Any]) -> None:
    ours, vanilla = (
        [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.zeros(2, 3))] for _ in range(2)
    )
    hook = hook_then_optimizer(
        local, OptimizerHookState(functional(getattr(torch.optim, algorithm), **options))
    )
    optimizer = getattr(torch.optim, algorithm)(vanilla, **options)
    for step in range(10):
        bucket = Bucket(ours, math.sin(step) * torch.arange(11.0))
        for parameter, gradient in zip(vanilla, bucket.buffer().split([5, 6]), strict=True):
            parameter.grad = gradient.view_as(parameter).clone()
        hook(None, bucket)
        optimizer.step()
        assert all(map(torch.equal, ours, vanilla)), step
        assert all(parameter.grad is None for parameter in ours)


def test_no_step_on_a_failed_reduction() -> None:
    p = parameter()
    state = OptimizerHookState(functional(torch.optim.SGD, lr=1.0))
    future = hook_then_optimizer(failed, state)(None, Bucket([p]))
    with pytest.raises(RuntimeError, match="this collective failed"):
        future.value()
    assert not p.any()


def test_a_step_that_fails_surfaces_and_leaves_the_gradient() -> None:
    p = parameter()
    state = OptimizerHookState(functional(torch.optim.LBFGS))
    p.grad = kept = torch.full((3,), 5.0)
    with pytest.raises(RuntimeError, match="closure"):
        hook_then_optimizer(local, state)(None, Bucket([p])).value()
    assert p.grad is kept


def test_an_option_that_the_optimizer_refuses_surfaces() -> None:
    state = OptimizerHookState(functional(torch.optim.SGD, lr=-1.0))
    with pytest.raises(RuntimeError, match="Invalid learning rate"):
        hook_then_optimizer(local, state)(None, Bucket([parameter()])).value()


def test_two_states_are_independent_and_the_global_generator_is_left_alone() -> None:
    one, other = (
        OptimizerHookState(functional(torch.optim.SGD, lr=1.0, momentum=0.5)) for _ in range(2)
    )
    p = parameter()
    q = parameter()
    before = torch.get_rng_state()
    for _ in range(2):
        hook_then_optimizer(local, one)(None, Bucket([p]))
    hook_then_optimizer(local, other)(None, Bucket([q]))
    assert (p.tolist(), q.tolist()) == ([-2.5] * 3, [-1.0] * 3)
    assert (one.iter, other.iter) == (2, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_goes_back_to_what_was_saved() -> None:
    """A state that has made more steps loads as a new state does: nothing of these steps stays."""
    p = parameter()
    state = OptimizerHookState(functional(torch.optim.Adagrad, lr=1.0))
    hook = hook_then_optimizer(local, state)
    fresh = copy.deepcopy(state.state_dict())
    hook(None, Bucket([p]))
    saved = copy.deepcopy(state.state_dict())
    at = p.detach().clone()
    hook(None, Bucket([p], 2.0))
    after = p.detach().clone()
    for back, begin, gradient, end in ((saved, at, 2.0, after), (fresh, torch.zeros(3), 1.0, at)):
        state.load_state_dict(back)
        assert state.state_dict()["state"].keys() == back["state"].keys()
        p.data.copy_(begin)
        hook(None, Bucket([p], gradient))
        assert torch.equal(p, end)
        assert state.iter == back["iter"] + 1


def test_refuses_wrong_arguments() -> None:
    sgd = functional(torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="optimizer_class"):
        functional(torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer_class"):
        functional(torch.optim.SGD([parameter()]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"functional_optim.*step_param"):
        OptimizerHookState(torch.optim.SGD([parameter()]))  # type: ignore[arg-type]
    for params in (parameter(), 3, [3]):
        with pytest.raises(TypeError, match="params"):
            OptimizerHookState(sgd, params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another kind of state"):
        OptimizerHookState(sgd).load_state_dict({"iter": 1})
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(OptimizerHookState(sgd))


def test_a_stepper_without_a_state_steps_but_is_not_saved() -> None:
    class Plain:
        def step_param(self, param: torch.Tensor, grad: torch.Tensor) -> None:
            with torch.no_grad():
                param.sub_(grad)

    p = parameter()
    state = OptimizerHookState(Plain(), params=iter([]))
    hook_then_optimizer(local, state)(None, Bucket([p]))
    assert not p.any()
    state = OptimizerHookState(Plain())
    hook_then_optimizer(local, state)(None, Bucket([p]))
    assert p.tolist() == [-1.0] * 3
    with pytest.raises(TypeError, match="Plain has no dict `state`"):
        state.state_dict()


class Checkpointed(torch.nn.Module):
    """Layers, each in a reentrant checkpoint, whose backward is a graph task of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@pytest.mark.usefixtures("default_group")
def test_frees_gradients_in_the_backward_of_checkpoints() -> None:
    alone = Checkpointed()
    model = DistributedDataParallel(copy.deepcopy(alone), bucket_cap_mb=300 / 2**20)
    state = OptimizerHookState(functional(torch.optim.SGD, lr=0.1))
    model.register_comm_hook(None, apply_optim_in_backward_hook(state))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        x = torch.full((2, 8), 1.0 + step, requires_grad=True)
        model(x).square().mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.zero_grad()
        alone(x).square().mean().backward()
        optimizer.step()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other)
