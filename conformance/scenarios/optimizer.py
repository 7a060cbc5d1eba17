"""TODO: conformance/scenarios/optimizer.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from conformance.scenarios.model import Param, Scenario

STEPS = 20


START = 999  # the step of the inputs that parameters begin with


_PARAMS = (
    Param((5, 3)),
    Param((7,)),
    Param(()),
    Param((4, 3, 2, 5), layout="channels_last"),
    Param((6, 5), layout="transposed"),
)


PLAIN = Scenario(
    "optimizer",
    f"{STEPS} steps of SGD with momentum; an averager averages from step 10 on every 4 steps",
    _PARAMS,
    ("crafted",) * STEPS,
    kind="optimizer",
    prerequisite="optimizer",
)


ADAM = replace(
    PLAIN,
    name="optimizer_adam",
    summary="Adam, on random gradients",
    steps=("normal",) * 8,
    world_sizes=(2,),
    variant="adam",
)


RANDOM = replace(
    PLAIN,
    name="optimizer_random",
    summary="SGD on random gradients",
    steps=("normal",) * 8,
    world_sizes=(3,),
    variant="random",
)


GROUPS = replace(
    PLAIN,
    name="optimizer_groups",
    summary="parameter groups with options of their own; one is added before step 2",
    steps=("crafted",) * 4,
    world_sizes=(3,),
    variant="groups",
)


SCHEDULED = replace(
    PLAIN,
    name="optimizer_scheduled",
    summary="the learning rate is written to param_groups before each step",
    steps=("crafted",) * 6,
    world_sizes=(2,),
    variant="scheduled",
)


CLOSURE = replace(
    PLAIN,
    name="optimizer_closure",
    summary="steps are given a closure",
    steps=("crafted",) * 6,
    world_sizes=(2,),
    variant="closure",
)


ZEROED = replace(
    PLAIN,
    name="optimizer_zeroed",
    summary="gradients add up unless zero_grad() forgets them, or zero_grad(set_to_none=False) fills them with zeros",
    steps=("crafted",) * 6,
    world_sizes=(2,),
    variant="zeroed",
)


UNUSED = replace(
    PLAIN,
    name="optimizer_unused",
    summary="in each step there is no gradient for some parameters, on some ranks or on all",
    params=(*_PARAMS, Param((11,)), Param((2, 3))),
    steps=("crafted",) * 8,
    world_sizes=(3,),
    variant="unused",
)


DTYPES = replace(
    PLAIN,
    name="optimizer_dtypes",
    summary="four dtypes in one model, and a parameter without elements",
    params=(
        *(Param((11,), dtype) for dtype in ("float32", "float64", "float16", "bfloat16")),
        Param((0,)),
    ),
    steps=("crafted", "zero_all"),
    world_sizes=(2,),
    variant="dtypes",
)


SUBGROUPS = replace(
    PLAIN,
    name="optimizer_subgroups",
    summary="two optimizers on two disjoint subgroups of WORLD; places in the group are not global ranks",
    groups=((1, 3), (0, 2)),
)


ORDERED = replace(
    PLAIN,
    name="optimizer_ordered",
    summary="peers enter each step when rank 0 has left it, or waits for them",
    steps=("crafted",) * 6,
    world_sizes=(2,),
    order="rank0_first",
    variant="ordered",
)


SAVED = replace(
    PLAIN,
    name="optimizer_saved",
    summary="its state is saved after 13 steps",
    world_sizes=(3,),
    resume=replace(PLAIN.resume, saves_at=13),
)


RESUMED = replace(
    SAVED,
    name="optimizer_resumed",
    summary="new processes go on from there",
    prerequisite="optimizer_saved",
    resume=replace(SAVED.resume, resumes=True),
)


RELOADED = replace(
    PLAIN,
    name="optimizer_reloaded",
    summary="before step 5 model and optimizer are put back to where they were after step 1; then a schedule begins",
    steps=("crafted",) * 9,
    world_sizes=(2,),
    variant="reloaded",
)


DDP = replace(
    PLAIN,
    name="optimizer_ddp",
    summary="under DDP, which averages gradients; where there is an averager only in its warm-up",
    world_sizes=(3,),
    variant="ddp",
)


DDP_VIEWS = replace(
    DDP,
    name="optimizer_ddp_views",
    summary="the same, and gradients are views of DDP's buckets",
    world_sizes=(2,),
    ddp=replace(DDP.ddp, gradient_as_bucket_view=True),
)


UNEVEN = replace(
    PLAIN,
    name="optimizer_uneven",
    summary="under Join together with DDP ranks run out of inputs one after another, one has none at all",
    steps=("crafted",) * 5,
    world_sizes=(3,),
    uneven=True,
    variant="uneven",
)


@dataclass(frozen=True)
class Setting:
    """How the optimizer of a scenario is made; everything is a power of two, or 0, so that SGD is exact on crafted gradients.

    Attributes:
        warmup, period: of the averager.
        options: of the optimizer; momentum 1 adds up gradients, and needs no digit more at each step, as 0.5 would.
        groups: parameters and options of parameter groups; () is one group of all, with ``options``.
        added: the step before which the last of them is added.
        rates: the learning rate of each step, where one is written to param_groups.
        back: the step before which everything is put back, and the step that it is put back to the end of.
    """

    warmup: int = 1
    period: int = 2
    options: Mapping[str, float] = field(default_factory=lambda: {"lr": 2.0**-3, "momentum": 1.0})
    groups: tuple[tuple[tuple[int, ...], Mapping[str, float]], ...] = ()
    added: int = -1
    rates: tuple[float | None, ...] = ()
    back: tuple[int, int] = (-1, -1)


_SETTINGS = {
    "": Setting(10, 4),
    "ddp": Setting(10, 4),
    "adam": Setting(6, 2, {"lr": 2.0**-7}),
    "dtypes": Setting(0, 1, {"lr": 1.0}),
    "groups": Setting(
        groups=(
            ((0, 3), {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.5}),
            ((1, 2), {"lr": 2.0**-3, "momentum": 1.0, "weight_decay": 0.0}),
            ((4,), {"lr": 0.25, "momentum": 0.0, "weight_decay": 0.0}),
        ),
        added=2,
    ),
    "scheduled": Setting(rates=(2.0**-3, 2.0**-2, 2.0**-4, 2.0**-1, 0.0, 2.0**-3)),
    "reloaded": Setting(rates=(*(None,) * 6, 2.0**-2, 2.0**-4, 2.0**-1), back=(5, 1)),
}


def setting(scenario: Scenario) -> Setting:
    """Return how the optimizer of a scenario is made."""
    return _SETTINGS.get(scenario.variant, Setting())
