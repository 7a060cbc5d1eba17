"""The first steps of a long warm-up, of which no results are recorded."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from conformance.ranks.instruments.collective_recorder import CollectiveRecorder
from conformance.ranks.models.ddp_model import DDPModel
from conformance.ranks.models.probe import training_loss
from conformance.records.recorder import Recorder
from conformance.scenarios.model import Scenario

_INPUTS = 5
_STEPS_BETWEEN_EVENTS = 20  # the events show that the warm-up makes progress


class WarmUp:
    """Trains models for steps that are not recorded.

    Args:
        scenario: the scenario.
        rank: the global rank of this process.
        device: the device of the inputs.
        recorder: receives an event now and then.
        doing: attributes errors to activities.
        scripted: returns the gradients of a step, by its number and kind.

    Attributes:
        sent: the bytes that each step has given to collectives, if they are counted.
    """

    def __init__(
        self,
        scenario: Scenario,
        rank: int,
        device: torch.device,
        recorder: Recorder,
        doing: Callable[[str], AbstractContextManager[None]],
        scripted: Callable[[int, str], list[torch.Tensor | None]],
    ) -> None:
        self._scenario = scenario
        self._rank = rank
        self._device = device
        self._recorder = recorder
        self._doing = doing
        self._scripted = scripted
        self._inputs: dict[int, list[torch.Tensor | None]] = {}
        self.sent: list[int] = []

    def train(self, models: list[DDPModel], step: int) -> None:
        """Run a step of each model."""
        if step % _STEPS_BETWEEN_EVENTS == 0:
            self._recorder.event("warms_up", unrecorded=step)
        for model in models:
            self._train_one(model, step)

    def count_sent(self, collectives: CollectiveRecorder) -> None:
        """Count the bytes of the step that was made last, whose collectives end here."""
        collectives.drain()
        self.sent.append(sum(size for _, size in collectives.take_sent()))

    def _train_one(self, model: DDPModel, step: int) -> None:
        case = model.case
        if case.on_step:
            with self._doing("on_step"):
                case.on_step(step)
        with self._doing("forward"):
            # The same few inputs again and again, which are computed once.
            number = step % _INPUTS
            if self._scenario.params:
                loss = model.ddp(self._gradients(number))
            else:
                loss = training_loss(model.ddp, self._rank, number, self._device)
        with self._doing("backward"):
            loss.backward()
        if case.after_backward:
            with self._doing("after_backward"):
                case.after_backward()
        model.end_step(step, self._doing)

    def _gradients(self, number: int) -> list[torch.Tensor | None]:
        if number not in self._inputs:
            self._inputs[number] = self._scripted(number, self._scenario.unrecorded_kind)
        return self._inputs[number]
