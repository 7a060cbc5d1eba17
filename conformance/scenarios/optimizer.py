"""The scenarios for optimizer wrappers (section 15).

``setting`` has the arguments of the wrapped optimizer and of the averager for each scenario. All of
them are powers of two or 0 unless Adam is wrapped, so that SGD is exact on crafted gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from conformance.scenarios.model import Param, Scenario

STEPS = 20

# The first parameters are made like the gradients of this step, which no scenario reaches.
START = 999
# Of a step that comes after the optimizer has loaded its own state, in names of what it did.
AFTER_LOAD = " (after load_state_dict())"

_PARAMS = (
    Param((5, 3)),
    Param((7,)),
    Param(()),
    Param((4, 3, 2, 5), layout="channels_last"),
    Param((6, 5), layout="transposed"),
)

PLAIN = Scenario(
    name="optimizer",
    summary=f"{STEPS} steps of SGD with momentum; an averager averages every 4 steps from step 10",
    params=_PARAMS,
    steps=("crafted",) * STEPS,
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
    summary="SGD on random gradients; in one step those of one rank are zeros",
    steps=(*("normal",) * 5, "zero_one", *("normal",) * 2),
    world_sizes=(3,),
    variant="random",
)

GROUPS = replace(
    PLAIN,
    name="optimizer_groups",
    summary="parameter groups with options of their own, and some of the construction; one is "
    "added before step 2",
    steps=("crafted",) * 4,
    world_sizes=(3,),
    variant="groups",
)

# Parameters, or groups, come as an iterator: ``model.parameters()`` can be read once.
READ_ONCE = (RANDOM.name, GROUPS.name)

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
    summary="steps are given a closure; before some steps one raises an exception, as if the batch "
    "were skipped: an error, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit and "
    "BaseException; in some steps the loss of one rank is unusual, and in one the gradients of a "
    "rank are zeros",
    steps=("crafted", "crafted", "zero_one", *("crafted",) * 7),
    world_sizes=(2,),
    variant="closure",
)

ZEROED = replace(
    PLAIN,
    name="optimizer_zeroed",
    summary="gradients add up unless zero_grad() drops them, or zero_grad(set_to_none=False) fills "
    "them with zeros",
    steps=("crafted",) * 6,
    world_sizes=(2,),
    variant="zeroed",
)

UNUSED = replace(
    PLAIN,
    name="optimizer_unused",
    summary="in each step some parameters have no gradient, on some ranks or on all; in two drawn "
    "steps the gradients of one parameter are zeros on all ranks",
    params=(*_PARAMS, Param((11,)), Param((2, 3))),
    steps=("crafted",) * 8,
    world_sizes=(3,),
    variant="unused",
)

# Parameters start at 0, and the learning rate is 1, so that one step is exact in half precision,
# too. Two such steps would not be: the second one has zeros as gradients.
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
    summary="two optimizers on two disjoint subgroups of WORLD; group ranks are not global ranks",
    groups=((1, 3), (0, 2)),
)

ORDERED = replace(
    PLAIN,
    name="optimizer_ordered",
    summary="peers enter each step after rank 0 has left it or waits for them",
    steps=("crafted",) * 6,
    world_sizes=(2,),
    order="rank0_first",
    variant="ordered",
)

# Steps 10 and 14 are due. The save comes between the two, so that a step count that is not restored
# shows.
SAVED = replace(
    PLAIN,
    name="optimizer_saved",
    summary="its state is saved after 13 steps; one or two parameters are trained later",
    params=(*_PARAMS, Param((7,)), Param((5, 3)), Param((3,))),
    world_sizes=(3,),
    resume=replace(PLAIN.resume, saves_at=13),
)

# A state that is collected is out of date after any step.
SAVED_CLOSED = replace(
    SAVED,
    name="optimizer_saved_after_closures",
    summary="its state is saved after 10 steps and after 13, on the last rank if it is "
    "consolidated; the last three have a closure",
    variant="saved_closed",
    resume=replace(SAVED.resume, also_taken_at=10),
)


def recipient(scenario: Scenario, size: int) -> int:
    """Return the place in the group of the rank on which a state is consolidated."""
    return size - 1 if scenario.variant == SAVED_CLOSED.variant else 0


RESUMED = replace(
    SAVED,
    name="optimizer_resumed",
    summary="new processes continue from the saved state",
    prerequisite="optimizer_saved",
    resume=replace(SAVED.resume, resumes=True),
)

RELOADED = replace(
    PLAIN,
    name="optimizer_reloaded",
    summary="before step 5, model and optimizer are restored to their state after step 1; then a "
    "schedule begins",
    steps=("crafted",) * 9,
    world_sizes=(2,),
    variant="reloaded",
)

# After the warm-up, ranks step with their own gradients: if DDP averaged these too, parameters
# would be equal on all ranks, and the averager would have nothing to do.
DDP = replace(
    PLAIN,
    name="optimizer_ddp",
    summary="under DDP, which averages gradients; if there is an averager, in its warm-up only",
    world_sizes=(3,),
    variant="ddp",
)

DDP_VIEWS = replace(
    DDP,
    name="optimizer_ddp_views",
    summary="the scenario `optimizer_ddp`, with gradients that are views of DDP's buckets, whose "
    "means arrive in the last moment of each backward",
    world_sizes=(2,),
    ddp=replace(DDP.ddp, gradient_as_bucket_view=True),
)

UNEVEN = replace(
    PLAIN,
    name="optimizer_uneven",
    summary="under Join together with DDP, ranks run out of inputs one after another, and one has "
    "none at all",
    steps=("crafted",) * 5,
    world_sizes=(3,),
    uneven=True,
    variant="uneven",
)


# The last step of a plan of a GradScaler whose gradients may overflow.
LAST_OVERFLOW = 8


@dataclass(frozen=True)
class Scaling:
    """The plan of a GradScaler around an optimizer.

    Attributes:
        first_scale: the scale of the first step.
        interval: the number of steps without an overflow after which the scale doubles.
        last_scale: the scale of the last steps, below 1, as after many overflows.
        everywhere: the steps in which the gradients of all ranks overflow.
        alone: the step in which the gradients of one rank overflow, if that is judged.
        alone_place: the place of that rank in its group, modulo the group's size.
        unscaled: the steps in which ``unscale_`` is called before the step.
        clip: the largest magnitude of gradients that are clipped after ``unscale_``.
        apart: every how many-th parameter has an infinity if gradients overflow, unless ``within``
            names others.
        within: by step, the parameters of one group that have an infinity then, and no others.
        lacking: by step, the parameter that has no gradient on any rank, if one has none.
    """

    first_scale: float
    interval: int
    last_scale: float
    everywhere: tuple[int, ...]
    alone: int
    alone_place: int
    unscaled: tuple[int, ...]
    clip: float
    apart: int
    within: dict[int, tuple[int, ...]]
    lacking: dict[int, int]

    def set_after(self, step: int) -> float | None:
        """Return the scale that is set after a step, if one is: no step overflows from there on."""
        return self.last_scale if step == LAST_OVERFLOW else None

    def infinite(self, step: int, params: int) -> tuple[int, ...]:
        """Return the parameters that have an infinity if gradients overflow at a step.

        Args:
            params: the number of all parameters.
        """
        return self.within.get(step) or tuple(range(0, params, self.apart))

    def overflows(self, step: int, place: int, size: int, has_alone: bool) -> bool:
        """Whether the gradients of the rank in a place of its group overflow at a step.

        Args:
            has_alone: whether an overflow of one rank alone is judged.
        """
        if step in self.everywhere:
            return True
        return has_alone and step == self.alone and place == self.alone_place % size


class Writing(Enum):
    """A way to give parameters other values between steps."""

    LOADED = "load_state_dict of the model"
    IN_DATA = "a copy to .data"
    NEW_MEMORY = "another tensor as .data"
    ONE_ELEMENT = "one element of a parameter, in place"
    NEW_ITEM = "another parameter in the list of its group"
    NEW_LIST = "a new list of parameters in its group"

    @property
    def renews(self) -> bool:
        """Whether parameters in the groups are replaced by others."""
        return self in (Writing.NEW_ITEM, Writing.NEW_LIST)


@dataclass(frozen=True)
class Write:
    """Parameters that are written before a step.

    Attributes:
        way: the way.
        indices: the numbers of the parameters; a loaded state has all of them.
        share: where in a parameter its one element is, from 0 to 1.
    """

    way: Writing
    indices: tuple[int, ...]
    share: float

    def element(self, numel: int) -> int:
        """Return the number of the element that is written, of a parameter of so many."""
        return int(self.share * numel)


@dataclass(frozen=True)
class Setting:
    """The arguments with which a scenario's optimizer and averager are made.

    Attributes:
        warmup: the averager's warm-up, in steps.
        period: the averager's period, in steps.
        options: the optimizer's options. Momentum 1 adds up gradients; it needs no more digits at
            each step, as 0.5 would.
        groups: parameters and options of the parameter groups; those that a group leaves out are
            in ``options``; () for one group of all parameters.
        added: the steps before which the last groups are added, in order, one in each.
        rates: the learning rate of each step, if rates are written to param_groups.
        changes: the options that are written to parameter groups before a step, by step and by
            group.
        saves_at: the number of steps after which the state is saved, if it is drawn.
        back: the step before which everything is restored, and the step whose end is restored, or
            -1 for the beginning.
        again: further steps before which the same state is restored.
        emptied: the one of these before which the state of the beginning is loaded first, so that
            parameters have no state then.
        remade: the one of these before which model and optimizer are made anew.
        regrouped: the groups of the processes that load the state, if they have other ones: the
            parameters of each come in another order, with the same shapes in each place.
        appended: how many of these groups are added before the state is loaded.
        scaling: the plan of a GradScaler, if there is one.
        has_tensor_rates: whether learning rates are tensors, which are filled in place.
        entries: the user's own entries in each parameter group (``own_entries.py``); () for none.
        new_entries: those in the groups of processes that load a state, before they load it.
        written_entries: those that are written to parameter groups before a step, by step and by
            group.
        writes: the parameters that are written before a step, by step.
        given_first: whether all groups are given at the construction, since the optimizer cannot
            add any. The parameters of later ones have no gradient until their step.
    """

    warmup: int = 1
    period: int = 2
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 2.0**-3, "momentum": 1.0})
    groups: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...] = ()
    added: tuple[int, ...] = ()
    rates: tuple[float | None, ...] = ()
    changes: Mapping[int, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)
    saves_at: int = 0
    back: tuple[int, int] = (-1, -1)
    again: tuple[int, ...] = ()
    emptied: int = -1
    remade: int = -1
    regrouped: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...] = ()
    appended: int = 0
    scaling: Scaling | None = None
    has_tensor_rates: bool = False
    entries: tuple[Mapping[str, Any], ...] = ()
    new_entries: tuple[Mapping[str, Any], ...] = ()
    written_entries: Mapping[int, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)
    writes: Mapping[int, Write] = field(default_factory=dict)
    given_first: bool = False

    def groups_at(self, step: int) -> int:
        """Return how many of the groups there are in a step; -1 for those at the construction."""
        return len(self.groups) - sum(added > step for added in self.added)

    def in_no_group(self, step: int) -> set[int]:
        """Return the parameters whose groups are added after a step."""
        later = self.groups[self.groups_at(step) :]
        return {index for indices, _ in later for index in indices}


_SETTINGS = {
    "": Setting(warmup=10, period=4),
    "ddp": Setting(warmup=10, period=4),
    "adam": Setting(warmup=6, period=2, options={"lr": 2.0**-7}),
    "dtypes": Setting(warmup=0, period=1, options={"lr": 1.0}),
    "scheduled": Setting(rates=(2.0**-3, 2.0**-2, 2.0**-4, 2.0**-1, 0.0, 2.0**-3)),
    "reloaded": Setting(
        # No rate is written before the state is restored: a rate that the kit writes would hide
        # that the optimizer lost its own.
        rates=(*(None,) * 6, 2.0**-2, 2.0**-4, 2.0**-1),
        back=(5, 1),
    ),
}


def setting(scenario: Scenario) -> Setting:
    """Return the arguments of a scenario's optimizer and averager."""
    return _SETTINGS.get(scenario.variant, Setting())
