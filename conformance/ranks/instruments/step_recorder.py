"""Records the gradients, parameters, random generators and memory of a model, step by step."""

from typing import Any

import torch

from conformance.ranks.instruments import process_state
from conformance.ranks.instruments.digest import LARGEST, digest
from conformance.ranks.instruments.hook_observer import Observer
from conformance.ranks.models.ddp_model import DDPModel
from conformance.records.recorder import Recorder
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.model import Scenario


class StepRecorder:
    """Records the steps of one model.

    Args:
        scenario: decides which of these are recorded.
        recorder: receives the events and tensors.
        model: the model that trains.
        observer: has the results of the hook, for hooks that free the gradients.
    """

    def __init__(
        self, scenario: Scenario, recorder: Recorder, model: DDPModel, observer: Observer
    ) -> None:
        self._scenario = scenario
        self._recorder = recorder
        self._model = model
        self._parameters = model.parameters
        self._observer = observer
        self._generators_before: dict[str, str] = {}
        self._parameters_before: dict[str, str] = {}

    def before_step(self) -> None:
        """Remember the states of the generators and the bits of the parameters."""
        self._generators_before = self._generators()
        self._parameters_before = self._parameter_digests()

    def after_backward(self, step: int) -> None:
        """Record the gradients, and the changes since :meth:`before_step`."""
        before = self._parameters_before
        after = self._parameter_digests()
        changes = {
            "parameters_changed": [name for name, bits in after.items() if before[name] != bits]
        }
        if generators := self._generators_before:
            changes["rng_changed"] = [
                name
                for name, state in self._generators().items()
                if generators.get(name, state) != state
            ]
        self._recorder.event("stepped", **changes)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._keep(f"{step}/grad/{name}", parameter.grad)
            elif self._scenario.fused and (result := self._observer.result_of(name)) is not None:
                self._keep(f"{step}/result/{name}", result)
        if self._scenario.fused:
            self.record_model(step)

    def record_model(self, step: int) -> None:
        """Record the parameters, and the scale of the next step's gradients."""
        self._recorder.event("model", scale=self._model.scale)
        for name, parameter in self._parameters.items():
            self._keep(f"{step}/parameter/{name}", parameter)

    def gradient_digests(self) -> dict[str, str]:
        """Return a digest of each gradient, by parameter name; '' if there is no gradient."""
        return {
            name: "" if parameter.grad is None else digest(parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.numel() < LARGEST
        }

    def record_memory(self) -> None:
        """Record the memory in use, without the copies that the recorder itself keeps."""
        memory: dict[str, Any] = process_state.live_memory()
        own = self._recorder.held
        on_host = {name: memory.pop(name) - own for name in ("tensors", "allocated")}
        self._recorder.event("memory", **on_host, **memory)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self._recorder.tensor(name, lay_out(tensor, "contiguous"))

    def _generators(self) -> dict[str, str]:
        return process_state.rng() if self._scenario.watches_process else {}

    def _parameter_digests(self) -> dict[str, str]:
        return {
            name: digest(parameter)
            for name, parameter in self._parameters.items()
            if parameter.numel() < LARGEST
        }
