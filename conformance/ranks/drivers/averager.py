"""The driver of averagers: sets parameters, has them averaged, and records them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from conformance.errors import TargetError
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.digest import digest
from conformance.ranks.models.probe import Probe
from conformance.scenarios.gradients import lay_out, uses

Parameters = list[torch.nn.Parameter]


class AveragerDriver(RankDriver):
    """One rank that averages its parameters."""

    def run(self) -> None:
        """Make the averager and run the scenario's steps."""
        probe = Probe(self.scenario.params, 0.0, self.rank).to(self.device)
        self.params: Parameters = probe.tensors
        self.averager = self.make(params=lambda: list(self.params), averager=lambda: None)
        if not callable(getattr(self.averager, "average_parameters", None)):
            raise TargetError(
                "an averager has a method average_parameters(params); "
                f"{type(self.averager).__name__} has none"
            )
        resume = self.scenario.resume
        # Parameters are set in every step: only the averager has a state to go on from.
        if self.saved:
            self._load_averager()
        for step, kind in enumerate(self.scenario.steps):
            if step < resume.saves_at and resume.resumes:
                continue
            self._step(step, kind)
            if step == resume.saves_at - 1 and not resume.resumes:
                self._save_averager()

    def _step(self, step: int, kind: str) -> None:
        self.begin_step(step, kind)
        self._set_parameters(step, kind)
        grads = self._gradient_digests()
        strides = [p.stride() for p in self.params]
        storages = [p.data_ptr() for p in self.params]
        with self.inside("average_parameters"):
            self.averager.average_parameters(_in_form(self.scenario.variant, step, self.params))
        for index, parameter in enumerate(self.params):
            self.keep(f"parameter/p{index}", lay_out(parameter, "contiguous"))
        specs = self.scenario.params
        self.recorder.event(
            "averaged",
            grads_changed=[
                i for i, bits in enumerate(self._gradient_digests()) if bits != grads[i]
            ],
            strides_changed=[i for i, p in enumerate(self.params) if p.stride() != strides[i]],
            moved=[i for i, p in enumerate(self.params) if p.data_ptr() != storages[i]],
            asks_for_gradients=[
                i for i, p in enumerate(self.params) if p.requires_grad == specs[i].frozen
            ],
        )
        self._keep_evaluated()

    @torch.no_grad()
    def _set_parameters(self, step: int, kind: str) -> None:
        """Give the parameters this step's values, and those that have some, gradients.

        A parameter without a gradient on any rank is the same on all ranks, and a frozen one is
        the same at all steps.
        """
        ranks = torch.distributed.get_process_group_ranks(self.group)
        for index, parameter in enumerate(self.params):
            users = [
                rank
                for rank in range(self.size)
                if has_gradient(self.scenario, self.size, rank, step, index)
            ]
            number = 0 if self.scenario.params[index].frozen else step
            parameter.copy_(self.values(kind, number, index, None if users else ranks[0]))
            has_one = self.group_rank in users
            parameter.grad = torch.ones_like(parameter) if has_one else None

    def _gradient_digests(self) -> list[str | None]:
        return [None if p.grad is None else digest(p.grad) for p in self.params]

    def _keep_evaluated(self) -> None:
        """Record the parameters with which the averager would have a model evaluated."""
        applied = getattr(self.averager, "applied", None)
        if not callable(applied) or not getattr(self.averager, "average", None):
            return  # it evaluates with the parameters themselves
        with self.doing("applied"), applied(self.params):
            for index, parameter in enumerate(self.params):
                self.keep(f"applied/p{index}", lay_out(parameter, "contiguous"))

    def _save_averager(self) -> None:
        averager = self.averager
        with self.doing("state_dict"):
            if hasattr(averager, "state_dict"):
                self.save(averager.state_dict())
            elif hasattr(averager, "step"):
                # As torch's averagers, whose only state is their count of steps.
                self.save({"step": averager.step})
            else:
                self.save(None)
        has_state = hasattr(averager, "state_dict") or hasattr(averager, "step")
        self.recorder.event("saved", nothing=not has_state)

    def _load_averager(self) -> None:
        with self.doing("load_state_dict"):
            saved = self.load()
            self.recorder.event("loaded", nothing=saved is None)
            if hasattr(self.averager, "load_state_dict"):
                self.averager.load_state_dict(saved)
            elif saved is not None:
                self.averager.step = saved["step"]


def has_gradient(scenario: Any, size: int, place: int, step: int, index: int) -> bool:
    """Whether the rank in a place of its group has a gradient for a parameter."""
    if scenario.params[index].frozen:
        return False
    return scenario.variant != "unused" or uses(size, place, step, index)


def _in_form(variant: str, step: int, params: Parameters) -> Iterable[Any]:
    """Return the parameters in the form of this step: a list, an iterator, or groups."""
    if variant != "forms":
        return params
    first = params[:2]
    rest = params[2:]
    forms: list[Callable[[], Iterable[Any]]] = [
        lambda: list(params),
        lambda: iter(params),
        lambda: [{"params": first, "lr": 0.1}, {"params": rest, "lr": 0.2}],
        # A parameter may be in two groups.
        lambda: [{"params": [*first, rest[0]], "lr": 0.1}, {"params": rest, "lr": 0.2}],
    ]
    # Averages are often due every four steps: all forms come in turn at steps 10, 14, 18, ... too.
    return forms[(step // 4 + step) % len(forms)]()
