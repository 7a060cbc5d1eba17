"""The other model of a run (``Scenario.twin``): it trains with the same subject, in between."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from io import BytesIO

import torch
import torch.distributed as dist

from conformance.ranks.models.ddp_model import DDPModel
from conformance.ranks.models.probe import scripted_gradients
from conformance.ranks.resolve import Resolved
from conformance.records.recorder import Recorder
from conformance.scenarios.calls_for_twin import calls_for_twin
from conformance.scenarios.gradients import TWIN_FACTOR, TWIN_OFFSET, lay_out
from conformance.scenarios.model import Scenario


class Twin:
    """Trains another model on other inputs.

    Args:
        scenario: the scenario.
        model: the other model under DDP.
        group: the group that it trains on.
        rank: the global rank of this process.
        device: the device of gradients.
        recorder: receives the model's gradients, if it has groups of its own or a backward with
            the main model.
        doing: attributes errors to activities.

    Attributes:
        model: the other model under DDP.
    """

    def __init__(
        self,
        scenario: Scenario,
        model: DDPModel,
        group: dist.ProcessGroup,
        rank: int,
        device: torch.device,
        recorder: Recorder,
        doing: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.model = model
        self._scenario = scenario
        self._group = group
        self._rank = rank
        self._device = device
        self._recorder = recorder
        self._doing = doing
        self._calls = calls_for_twin(scenario)
        self._saved = BytesIO()

    def register(self, resolved: Resolved, option: str) -> None:
        """Register the subject on the model; ``option`` names it in messages."""
        self.model.register(resolved, option, self._doing)

    def train(self, step: int, kind: str) -> None:
        """Run a step in a backward of its own."""
        self._call_before(step)
        loss = self.loss(step, kind)
        with self._doing("twin"):
            loss.backward()
        self.end_step(step)

    def _call_before(self, step: int) -> None:
        """Make the trainer's calls before a step (``scenarios/calls_for_twin.py``)."""
        with self._doing("twin"):
            if self.model.rescale and step in self._calls.factors:
                self.model.rescale(self._calls.factors[step])
            if not self.model.can_be_loaded:
                return
            if step == self._calls.saves_at:
                self._saved = self.model.saved_state()
            if step == self._calls.loads_at:
                self.model.load_saved(self._saved)

    def loss(self, step: int, kind: str) -> torch.Tensor:
        """Begin a step, and return its loss."""
        grads = scripted_gradients(
            self._scenario.params,
            kind,
            dist.get_world_size(self._group),
            self._rank,
            step + TWIN_OFFSET,
            self._device,
        )
        with self._doing("twin"):
            if self.model.case.on_step:
                self.model.case.on_step(step + self._scenario.unrecorded_steps)
            loss: torch.Tensor = self.model.ddp(
                [grad * TWIN_FACTOR for grad in grads if grad is not None]
            )
        return loss

    def end_step(self, step: int) -> None:
        """End a step: make the trainer's call, and record the gradients if the twin is judged, and
        the parameters if the hook steps them.
        """
        with self._doing("twin"):
            if self.model.case.after_backward:
                self.model.case.after_backward()
        if self._scenario.twin_groups or self._scenario.joint:
            for name, parameter in self.model.parameters.items():
                if parameter.grad is not None:
                    gradient = lay_out(parameter.grad, "contiguous")
                    self._recorder.tensor(f"{step}/twin/{name}", gradient)
                if self._scenario.fused:
                    value = lay_out(parameter.detach(), "contiguous")
                    self._recorder.tensor(f"{step}/twin_parameter/{name}", value)
        self.model.end_step(step, self._doing)
