"""What ranks do with an optimizer wrapper: give their parameters gradients, have them stepped, and write down what they are then."""

import contextlib
import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from conformance.errors import TargetError
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.drivers.uneven_inputs import train_unevenly
from conformance.ranks.models.probe import Probe
from conformance.scenarios.gradients import lay_out, uses
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import PLAIN, START, setting

_GIVEN = ("lr", "momentum", "weight_decay")  # options that are the kit's to choose: what is right depends on them


def play(stage: RankDriver) -> None:
    """Run the scenario's steps."""
    scenario = stage.scenario
    training = _Training(stage)
    steps = list(enumerate(scenario.steps))[scenario.resume.saves_at if scenario.resume.resumes else 0 :]
    if scenario.uneven:
        training.train_unevenly(steps[: scenario.inputs_of(stage.rank, stage.world)])
        return
    for number, kind in steps:
        training.step(number, kind)
    if scenario.name == PLAIN.name:
        training.is_used_as_an_optimizer()


class _Training:
    """A model with an optimizer, which is the subject's."""

    def __init__(self, stage: RankDriver) -> None:
        self.stage, self.scenario, self.setting = stage, stage.scenario, setting(stage.scenario)
        self.ranks = dist.get_process_group_ranks(stage.group)
        self.model = Probe(stage.scenario.params, 0.0, stage.rank).to(stage.device)
        self.params = self.model.tensors
        self.saved = stage.load() if stage.saved else None
        self._fill(self.saved["parameters"] if self.saved else _start(stage))
        self.ddp = None
        if self.scenario.uneven or self.scenario.variant == "ddp":
            group = stage.group if self.scenario.groups else None
            self.ddp = stage.data_parallel(
                self.model, process_group=group, gradient_as_bucket_view=self.scenario.ddp.gradient_as_bucket_view
            )
        names = _names(stage)
        self.averager = Averager(stage, self.params, self.setting.warmup, self.setting.period) if "averager" in names else None
        self.optimizer = self._make(names)
        self.consolidates = hasattr(self.optimizer, "consolidate_state_dict")
        self._back: tuple[list[torch.Tensor], Any] | None = None
        if self.saved:
            self._load(stage.load(self.ranks[0])["state"] if self.consolidates else self.saved["state"])

    def step(self, number: int, kind: str) -> None:
        """Train one step."""
        stage, case = self.stage, self.scenario.variant
        stage.begin_step(number, kind)
        if number == self.setting.back[0]:
            self._put_back()
        if number == self.setting.added:
            stage.where = "add_param_group"
            self.optimizer.add_param_group(self._group(-1))
            stage.where = "kit"
        self._write_rate(number)
        if self.averager:
            self.averager.look()
        if case == "closure":
            self._step_with_closure(number, kind)
        else:
            self._backward(number, kind)
            with stage.inside("step"):
                self.optimizer.step()
        for index, parameter in enumerate(self.params):
            stage.keep(f"parameter/p{index}", parameter)
        stage.recorder.event("stepped")
        if case == "zeroed":
            self._zero_gradients(number)
        if number == self.setting.back[1]:
            self._back = [parameter.detach().clone() for parameter in self.params], self._state_of_all()
        if number == self.scenario.resume.saves_at - 1 and not self.scenario.resume.resumes:
            self._save()

    def train_unevenly(self, steps: list[tuple[int, str]]) -> None:
        """Train under ``Join``. The optimizer's documentation asks that ranks that have joined have the gradients that others have."""
        if not hasattr(self.optimizer, "join_hook"):
            self.stage.recorder.event("not_joinable")
            return
        assert self.ddp is not None

        def shadow(number: int) -> None:
            self.stage.where = "join"
            for index, parameter in enumerate(self.params):
                parameter.grad = self._laid_out(index, mean_of_inputs(self.stage, number, index))

        train_unevenly(self.ddp, self.stage.group, steps, self.step, shadow, more=[self.optimizer])
        self.stage.where = "kit"
        self.stage.begin_step(len(self.scenario.steps), "none")
        for index, parameter in enumerate(self.params):
            self.stage.keep(f"parameter/p{index}", parameter)
        self.stage.recorder.event("stepped")

    def is_used_as_an_optimizer(self) -> None:
        """Do with it what programs do with optimizers, and write down what they would be told."""
        self.stage.begin_step(len(self.scenario.steps), "none")
        said, calls = {"isinstance": "", "hook": "", "scheduler": ""}, []
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            said["isinstance"] = f"{type(self.optimizer).__name__} is no torch.optim.Optimizer"
        with _noting(said, "hook"):
            self.optimizer.register_step_post_hook(lambda *_: calls.append(self.averager.step if self.averager else 0))
        asked = self.averager.step if self.averager else 0
        with _noting(said, "scheduler"):
            scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 0.5)
        self.optimizer.step()
        if not said["scheduler"]:
            with _noting(said, "scheduler"):
                scheduler.step()
        if not said["hook"] and calls != [asked + bool(self.averager)]:
            said["hook"] = f"called {len(calls)} times in a step" if len(calls) != 1 else "called before the averager"
        self.stage.recorder.event("as_optimizer", **said)

    def _make(self, names: set[str]) -> Any:
        """Return the subject's optimizer, and put on record which of the options it has taken."""
        stage, options = self.stage, dict(self.setting.options)
        whole = torch.optim.Adam if self.scenario.variant == "adam" else torch.optim.SGD
        beside = options if "optimizer_class" in names and "**" in names else {}
        taken = options if beside or "optim" in names else {name: value for name, value in options.items() if name in names}
        grouped = bool(self.setting.groups)
        if "lr" not in taken and not grouped:
            raise TargetError("an optimizer wrapper takes optim, or optimizer_class and **options, or lr: its signature has none of them")
        stage.recorder.event("made", averager=bool(self.averager), options=taken, takes_any=bool({"optim", "optimizer_class"} & names))
        made = stage.make(
            lambda target: replace(target, kwargs={**beside, **target.kwargs}),
            params=lambda: self._groups() if grouped else list(self.params),
            optimizer_class=lambda: whole,
            optim=lambda: whole(self._groups() if grouped else self.params, **options),
            averager=lambda: self.averager,
            **{name: (lambda value=value: value) for name, value in options.items()},
        )
        if not callable(getattr(made, "step", None)):
            raise TargetError(f"an optimizer wrapper has a method step(); {type(made).__name__} has none")
        return made

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups that are there from the start."""
        return [self._group(place) for place in range(len(self.setting.groups) - (self.setting.added >= 0))]

    def _group(self, place: int) -> dict[str, Any]:
        indices, options = self.setting.groups[place]
        return {"params": [self.params[index] for index in indices], **options}

    def _write_rate(self, number: int) -> None:
        rate = self.setting.rates[number] if self.setting.rates else None
        if rate is not None:
            self.stage.where = "param_groups"
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.stage.where = "kit"

    def _backward(self, number: int, kind: str) -> None:
        """Leave this step's gradients on the parameters."""
        if self.scenario.variant != "zeroed":
            self._forget()
        if self.ddp is not None:
            local = self.averager is not None and number >= self.setting.warmup
            with self.ddp.no_sync() if local else contextlib.nullcontext():
                self.ddp([self._gradient(number, kind, index) for index in range(len(self.params))]).backward()
            return
        for index, parameter in enumerate(self.params):
            grad = self._gradient(number, kind, index)
            parameter.grad = grad if parameter.grad is None or grad is None else parameter.grad.add_(grad)

    def _gradient(self, number: int, kind: str, index: int) -> torch.Tensor | None:
        """Return what this rank has: its own, where ranks are averaged later, be it by DDP; else what all have."""
        own = self.averager is not None or self.ddp is not None
        if not has_gradient(self.scenario, self.stage.size, self.stage.group_rank if own else None, number, index):
            return None
        return self._laid_out(index, self.stage.values(kind, number, index, None if own else self.ranks[0]))

    def _step_with_closure(self, number: int, kind: str) -> None:
        calls: list[bool] = []

        def closure() -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            with torch.enable_grad():
                self._forget()
                loss = self.model([self._gradient(number, kind, index) for index in range(len(self.params))]) + (number + 1)
                loss.backward()
            return loss

        with self.stage.inside("step"):
            loss = self.optimizer.step(closure)
        value = float(loss) if isinstance(loss, (torch.Tensor, float, int)) else None
        self.stage.recorder.event("closure", calls=calls, loss=value)

    def _zero_gradients(self, number: int) -> None:
        self.stage.where = "zero_grad"
        keeps = bool(number % 2)
        self.optimizer.zero_grad(**({"set_to_none": False} if keeps else {}))
        self.stage.where = "kit"
        self.stage.recorder.event(
            "zeroed",
            keeps=keeps,
            left=[i for i, p in enumerate(self.params) if p.grad is not None and bool(p.grad.count_nonzero())],
            none=[i for i, p in enumerate(self.params) if p.grad is None],
        )

    def _save(self) -> None:
        state = self._state(0)
        if self.consolidates and self.stage.group_rank == 0:
            self._keep_consolidated(state)
        self.stage.save({"parameters": [parameter.detach() for parameter in self.params], "state": state})

    def _state(self, to: int) -> Any:
        """Return a copy of the state; of an optimizer that consolidates it, only in place ``to`` of the group."""
        self.stage.where = "state_dict"
        if self.consolidates:
            self.optimizer.consolidate_state_dict(to)
        has_it = not self.consolidates or self.stage.group_rank == to
        state = copy.deepcopy(self.optimizer.state_dict()) if has_it else None
        self.stage.where = "kit"
        return state

    def _state_of_all(self) -> Any:
        """Return a copy of the state, on every rank."""
        states = [self._state(to) for to in range(self.stage.size if self.consolidates else 1)]
        return next(state for state in states if state is not None)

    def _put_back(self) -> None:
        assert self._back is not None
        self._fill(self._back[0])
        self._load(self._back[1])

    def _load(self, state: Any) -> None:
        self.stage.where = "load_state_dict"
        self.optimizer.load_state_dict(state)
        self.stage.where = "kit"

    def _keep_consolidated(self, state: Any) -> None:
        """Put a state on record: what it has by parameter, and its parameter groups."""
        by_index, groups = (state.get("state"), state.get("param_groups")) if isinstance(state, Mapping) else (None, None)
        if not isinstance(by_index, Mapping) or not isinstance(groups, list):
            self.stage.recorder.event("consolidated", form=False)
            return
        for index, kept in by_index.items():
            for name, value in kept.items() if isinstance(kept, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    self.stage.keep(f"state/{index}/{name}", value)
        said = [{name: group.get(name) for name in ("lr", "momentum", "params")} for group in groups]
        self.stage.recorder.event("consolidated", form=True, groups=said)

    @torch.no_grad()
    def _fill(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.params, values, strict=True):
            parameter.copy_(value)

    def _forget(self) -> None:
        for parameter in self.params:
            parameter.grad = None

    def _laid_out(self, index: int, values: torch.Tensor) -> torch.Tensor:
        return lay_out(values, self.scenario.params[index].layout)


class Averager(ModelAverager):
    """The kit's own: the mean over the group of what it is given, at step ``warmup`` and every ``period`` steps from there.

    It puts on record each time that it is asked. Means are taken in float64, in the order of ranks, the same on all of them.
    """

    def __init__(self, stage: RankDriver, params: list[torch.nn.Parameter], warmup: int, period: int) -> None:
        super().__init__(stage.group)
        self._stage, self._params, self._before = stage, params, [parameter.detach().clone() for parameter in params]
        self.warmup_steps, self.period = warmup, period

    def look(self) -> None:
        """Take note of what parameters are before a step."""
        self._before = [parameter.detach().clone() for parameter in self._params]

    def average_parameters(self, params: Iterable[Any]) -> None:
        given = list(dict.fromkeys(_flat(params)))
        averages = self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0
        places = {parameter: index for index, parameter in enumerate(self._params)}
        self._stage.recorder.event(
            "asked",
            count=self.step,
            averages=averages,
            stepped=any(not torch.equal(now, before) for now, before in zip(self._params, self._before, strict=True)),
            missing=sorted(set(range(len(self._params))) - {places[parameter] for parameter in given if parameter in places}),
            others=sum(parameter not in places for parameter in given),
        )
        self.step += 1
        for parameter in given if averages else ():
            self._average(parameter)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.step = saved["step"]

    @torch.no_grad()
    def _average(self, parameter: torch.Tensor) -> None:
        mine = parameter.detach().double().contiguous()
        all_of_them = [torch.empty_like(mine) for _ in range(self._stage.size)]
        dist.all_gather(all_of_them, mine, group=self._stage.group)
        parameter.copy_(sum(all_of_them[1:], all_of_them[0]) / self._stage.size)


def has_gradient(scenario: Scenario, size: int, place: int | None, step: int, index: int) -> bool:
    """Whether the rank in a place of its group has a gradient for a parameter; ``None`` asks whether any has."""
    if scenario.variant != "unused":
        return True
    return any(uses(size, other, step, index) for other in (range(size) if place is None else (place,)))


def mean_of_inputs(stage: RankDriver, step: int, index: int) -> torch.Tensor:
    """Return the mean gradient of a step to which ranks that have run out of inputs contribute zeros."""
    ranks = [rank for rank in range(stage.world) if step < stage.scenario.inputs_of(rank, stage.world)]
    values = [stage.values(stage.scenario.steps[step], step, index, rank) for rank in ranks]
    return sum(values[1:], values[0]) / stage.world


def _start(stage: RankDriver) -> list[torch.Tensor]:
    """Return what parameters begin with, on all ranks: zeros where dtypes differ, so that steps are exact in all of them."""
    kind = "zero_all" if stage.scenario.variant == "dtypes" else "crafted"
    first = dist.get_process_group_ranks(stage.group)[0]
    return [stage.values(kind, START, index, first) for index in range(len(stage.scenario.params))]


def _names(stage: RankDriver) -> set[str]:
    """Return what the target's signature names and it has not been given: ``**`` where it takes any."""
    target = stage.target()
    if chosen := [name for name in (*_GIVEN, "params", "optim", "optimizer_class", "averager") if name in target.kwargs]:
        raise TargetError(f"{chosen[0]}= is for the kit to choose; leave it out of the target")
    try:
        parameters = inspect.signature(target.function).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {"**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters}


def _flat(params: Iterable[Any]) -> Iterator[torch.Tensor]:
    for entry in params:
        yield from entry["params"] if isinstance(entry, Mapping) else [entry]


@contextlib.contextmanager
def _noting(said: dict[str, str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        said[what] = f"{type(error).__name__}: {error}"[:300]
