"""What ranks do with an averager: set their parameters, have them averaged, and write down what they are then."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from conformance.errors import TargetError
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.hook_observer import digest
from conformance.ranks.models.probe import Probe
from conformance.scenarios.gradients import lay_out, uses

Parameters = list[torch.nn.Parameter]


def play(stage: RankDriver) -> None:
    """Run the scenario's steps."""
    scenario = stage.scenario
    params = Probe(scenario.params, 0.0, stage.rank).to(stage.device).tensors
    averager = stage.make(params=lambda: list(params), averager=lambda: None)
    if not callable(getattr(averager, "average_parameters", None)):
        raise TargetError(f"an averager has a method average_parameters(params); {type(averager).__name__} has none")
    if stage.saved:
        _load(averager, stage)
    for step, kind in enumerate(scenario.steps):
        if step < scenario.resume.saves_at and scenario.resume.resumes:
            continue
        stage.begin_step(step, kind)
        _set(stage, params, step, kind)
        grads = [None if p.grad is None else digest(p.grad) for p in params]
        strides, storages = [p.stride() for p in params], [p.data_ptr() for p in params]
        with stage.inside("average_parameters"):
            averager.average_parameters(_given(scenario.variant, step, params))
        for index, parameter in enumerate(params):
            stage.keep(f"parameter/p{index}", lay_out(parameter, "contiguous"))
        stage.recorder.event(
            "averaged",
            grads_changed=[i for i, p in enumerate(params) if (None if p.grad is None else digest(p.grad)) != grads[i]],
            strides_changed=[i for i, p in enumerate(params) if p.stride() != strides[i]],
            moved=[i for i, p in enumerate(params) if p.data_ptr() != storages[i]],
            asks_for_gradients=[i for i, p in enumerate(params) if p.requires_grad == scenario.params[i].frozen],
        )
        _keep_evaluated(stage, averager, params)
        if step == scenario.resume.saves_at - 1 and not scenario.resume.resumes:
            _save(averager, stage)


@torch.no_grad()
def _set(stage: RankDriver, params: Parameters, step: int, kind: str) -> None:
    """Give the parameters this step's values, and gradients where they have any. What has none anywhere is the same on all ranks,
    and what is frozen at all steps."""
    ranks = torch.distributed.get_process_group_ranks(stage.group)
    for index, parameter in enumerate(params):
        users = [place for place in range(stage.size) if has_gradient(stage.scenario, stage.size, place, step, index)]
        frozen = stage.scenario.params[index].frozen
        parameter.copy_(stage.values(kind, 0 if frozen else step, index, None if users else ranks[0]))
        parameter.grad = torch.ones_like(parameter) if stage.group_rank in users else None


def has_gradient(scenario: Any, size: int, place: int, step: int, index: int) -> bool:
    """Whether the rank in a place of its group has a gradient for a parameter."""
    if scenario.params[index].frozen:
        return False
    return scenario.variant != "unused" or uses(size, place, step, index)


def _given(case: str, step: int, params: Parameters) -> Iterable[Any]:
    """Return the parameters in the form that they are handed in."""
    if case != "forms":
        return params
    first, rest = params[:2], params[2:]
    forms: list[Callable[[], Iterable[Any]]] = [
        lambda: list(params),
        lambda: iter(params),
        lambda: [{"params": first, "lr": 0.1}, {"params": rest, "lr": 0.2}],
        lambda: [{"params": [*first, rest[0]], "lr": 0.1}, {"params": rest, "lr": 0.2}],
    ]
    return forms[(step // 4 + step) % len(forms)]()  # all four in turn at steps 10, 14, 18, ... too


def _keep_evaluated(stage: RankDriver, averager: Any, params: Parameters) -> None:
    """Put on record what an averager would have a model evaluated with, where it has such a thing."""
    applied = getattr(averager, "applied", None)
    if not callable(applied) or not getattr(averager, "average", None):
        return
    stage.where = "applied"
    with applied(params):
        for index, parameter in enumerate(params):
            stage.keep(f"applied/p{index}", lay_out(parameter, "contiguous"))
    stage.where = "kit"


def _save(averager: Any, stage: RankDriver) -> None:
    stage.where = "state_dict"
    if hasattr(averager, "state_dict"):
        stage.save(averager.state_dict())
    elif hasattr(averager, "step"):
        stage.save({"step": averager.step})
    else:
        stage.save(None)
    stage.where = "kit"
    stage.recorder.event("saved", nothing=not (hasattr(averager, "state_dict") or hasattr(averager, "step")))


def _load(averager: Any, stage: RankDriver) -> None:
    stage.where = "load_state_dict"
    saved = stage.load()
    stage.recorder.event("loaded", nothing=saved is None)
    if hasattr(averager, "load_state_dict"):
        averager.load_state_dict(saved)
    elif saved is not None:
        averager.step = saved["step"]
    stage.where = "kit"
