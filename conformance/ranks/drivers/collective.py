"""What ranks do with a quantized collective: they hand in messages that only they have, and write down what arrives."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from conformance.errors import TargetError
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.enum_arguments import with_members
from conformance.ranks.instruments.hook_observer import digest
from conformance.ranks.resolve import Factory
from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective import COLLECTIVES
from conformance.scenarios.gradients import lay_out
from conformance.subjects.spec import CONTEXT_NAMES


def play(stage: RankDriver) -> None:
    """Make the scenario's calls."""
    made: dict[tuple[int, int], Any] = {}
    again = "constant" in stage.scenario.steps
    for step, kind in enumerate(stage.scenario.steps):
        stage.begin_step(step, kind)
        calls = [_Call(stage, step, index) for index in messages.indices(stage.scenario)]
        for together in [calls] if stage.scenario.variant == "waited" else [[call] for call in calls]:
            for call in together:
                # What a call makes up for is known only where the same is sent again and again: elsewhere each has a new one.
                key = (0 if again else step, call.index) if "feedback" in stage.scenario.options else (0, 0)
                if key not in made:
                    made[key] = _make(stage)
                call.function = made[key]
            _play(stage, together)


class _Call:
    """One call: what is handed in, and what has arrived."""

    def __init__(self, stage: RankDriver, step: int, index: int) -> None:
        scenario, spec = stage.scenario, stage.scenario.params[index]
        self.stage, self.step, self.index, self.form = stage, step, index, messages.form_of(scenario, index)
        self.function: Callable[..., Any] = dist.all_gather
        place, size, dtype = stage.group_rank, stage.size, getattr(torch, spec.dtype)
        self.fill = math.nan if dtype.is_floating_point else -7  # so that it shows where nothing is written
        sent, received = (pairs(scenario, size, place, step, index) for pairs in (messages.sent, messages.received))
        self.inputs = [lay_out(messages.message(scenario, size, step, index, *pair).clone(), spec.layout).to(stage.device) for pair in sent]
        shapes = [messages.shape_of(scenario, size, index, *pair) for pair in received]
        self.rows = [[part[0] for part in parts] for parts in (shapes, [tensor.shape for tensor in self.inputs])]
        if scenario.options[0] == "all_to_all_single":
            self.inputs = [lay_out(torch.cat(self.inputs), spec.layout)]
            shapes = [(sum(self.rows[0]), *shapes[0][1:])]
        self.outputs = [lay_out(torch.full(shape, self.fill, dtype=dtype, device=stage.device), spec.layout) for shape in shapes]
        self.handed, self.before = list(self.outputs), [digest(tensor) for tensor in self.inputs]
        self.positional, self.named = self._arguments()
        self.returned: Any = None
        self.refused = ""

    def begin(self) -> None:
        """Call it, as users do."""
        asked = {"async_op": True} if self.stage.scenario.variant == "waited" else {}
        self.returned = self.function(*self.positional, **self.named, **asked)

    def wait(self) -> None:
        """Wait for it, where it was begun."""
        if self.stage.scenario.variant == "waited" and callable(getattr(self.returned, "wait", None)):
            self.returned.wait()

    def keep(self) -> None:
        """Write down what the outputs hold now: what else comes has come too late."""
        self.stage.recorder.event(
            "called",
            index=self.index,
            refused=self.refused,
            waits=callable(getattr(self.returned, "wait", None)),
            returned=type(self.returned).__name__,
            inputs_changed=[k for k, tensor in enumerate(self.inputs) if digest(tensor) != self.before[k]],
            replaced=[k for k, out in enumerate(self.outputs) if not _same(out, self.handed[k])],
            dtypes=[str(getattr(out, "dtype", type(out).__name__)).removeprefix("torch.") for out in self.outputs],
            sent=self.stage.collectives.take_sent(),
        )
        outputs = [out for out in self.outputs if isinstance(out, torch.Tensor)]
        if self.stage.scenario.options[0] == "all_to_all_single":
            outputs = list(outputs[0].split(self.rows[0]))
        for k, out in enumerate(outputs):
            self.stage.keep(f"arrived/p{self.index}/{k}", lay_out(out, "contiguous"))

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return what it is called with: all that torch.distributed's has, where it is by position or by keyword."""
        scenario, group = self.stage.scenario, self.stage.group
        ranks = dist.get_process_group_ranks(group)
        source = messages.source_of(scenario, self.stage.size, self.step, self.index)
        collective, tensors = scenario.options[0], (self.outputs, self.inputs)
        names = {
            "all_gather": ("tensor_list", "tensor"),
            "all_to_all": ("output_tensor_list", "input_tensor_list"),
            "all_to_all_single": ("output", "input"),
            "scatter": ("tensor", "scatter_list"),
        }[collective]
        lists: list[Any] = [self.outputs, self.inputs or None]
        every = {name: part if "list" in name else tensors[k][0] for k, (name, part) in enumerate(zip(names, lists, strict=True))}
        extra: dict[str, Any] = {"src": ranks[source]} if collective == "scatter" else {}
        if self.form.endswith("splits"):
            extra = {"output_split_sizes": self.rows[0], "input_split_sizes": self.rows[1]}
        elif self.form == "group_src":
            extra = {"group_src": source}
        of_group = {"group": group} if scenario.groups else {}
        if self.form == "keywords":
            return [], {**every, **extra, **of_group}
        if self.form.startswith("positional"):
            unsplit = [None, None] if collective == "all_to_all_single" and not extra else []
            return [*every.values(), *extra.values(), *unsplit, group], {}
        return [*every.values()], {**extra, **of_group}


def _same(out: Any, handed: torch.Tensor) -> bool:
    """Whether a tensor that was handed in holds what its place in the list holds now."""
    return out is handed or (isinstance(out, torch.Tensor) and out.dtype == handed.dtype and digest(out) == digest(handed))


def _play(stage: RankDriver, calls: list[_Call]) -> None:
    """Make some calls, and then wait for them in the opposite order, where they are to be waited for.

    Where rank 0 goes first, an error is an answer too; its peers would wait for it in vain, and are not asked.
    """
    collective, first = stage.scenario.options[0], stage.scenario.order == "rank0_first"
    key = f"refused/{stage.recorder.step}/{calls[0].index}"
    with stage.inside(collective):
        try:
            if first and stage.rank and stage.signals.check([key]):
                raise _NotAsked("rank 0 has refused it")
            for call in calls:
                call.begin()
            for call in reversed(calls):
                call.wait()
        except Exception as error:
            if not first:
                raise
            for call in calls:
                call.refused = "not asked" if isinstance(error, _NotAsked) else f"{type(error).__name__}: {error}"[:300]
            if stage.rank == 0:
                stage.signals.set(key, "1")
        for call in calls:
            call.keep()


class _NotAsked(Exception):
    """A rank has not made a call."""


def _make(stage: RankDriver) -> Callable[..., Any]:
    """Return the collective: what the target makes, or the target itself."""
    made = stage.make(_understood)
    if not callable(made):
        raise TargetError(f"a quantized collective is called as torch.distributed's is; the target gives a {type(made).__name__}")
    return made  # type: ignore[no-any-return]


def _understood(target: Factory) -> Factory:
    """Return a target with the words in its arguments replaced by what they name; one that is the collective gives itself."""
    if not target.kwargs and _takes_tensors(target.function):
        return Factory(lambda: target.function, {})
    return Factory(target.function, with_members(target.function, _with_function(target.kwargs), enums=("qtype",)))


def _takes_tensors(function: Any) -> bool:
    """Whether it has the arguments of a collective, rather than of what makes one: tensors without a default, or any."""
    if inspect.isclass(function):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return any(p.name not in (*CONTEXT_NAMES, "group") for p in needed) or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _with_function(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with torch.distributed's function for its name: ``func=all_gather``."""
    name = arguments.get("func")
    if not isinstance(name, str):
        return arguments
    if name not in COLLECTIVES:
        raise TargetError(f"func={name}: one of {', '.join(COLLECTIVES)}")
    return {**arguments, "func": getattr(dist, name)}
