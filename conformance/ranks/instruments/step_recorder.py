"""Records the gradients, parameters, random generators and memory of a model, step by step."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from conformance.ranks.instruments import process_state
from conformance.ranks.instruments.digest import checksum
from conformance.ranks.instruments.folding import fold
from conformance.ranks.instruments.hook_observer import Observer
from conformance.ranks.instruments.moments import Moments
from conformance.ranks.models.ddp_model import DDPModel
from conformance.records.recorder import Recorder
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.model import Scenario

# Pauses after which memory is read again if it has grown by more than a small tensor.
_RETRIES = 5
_PAUSE = 0.01  # seconds
_TENSOR = 64 * 1024  # bytes


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
        self._allocated_before = 0
        self._parameters_before: dict[str, str] = {}
        self._addresses_before: dict[str, int] = {}
        self._buffer_addresses_before: dict[str, int] = {}
        self._buffers_before: dict[str, str] = {}
        self._moments = Moments(scenario) if scenario.folded == "moments" else None

    def before_step(self) -> None:
        """Remember the states of the generators, the bits of the parameters, and the addresses of
        parameters and buffers.
        """
        self._generators_before = process_state.rng()
        self._parameters_before = self._parameter_checksums()
        self._addresses_before = _addresses(self._parameters)
        self._buffer_addresses_before = _addresses(self._buffers())

    def before_backward(self) -> None:
        """Remember the bits of the buffers, which the forward may have changed."""
        self._buffers_before = self._buffer_checksums()

    def after_backward(self, step: int) -> None:
        """Record the gradients, the changes since :meth:`before_step`, and those of buffers since
        :meth:`before_backward`.
        """
        before = self._parameters_before
        after = self._parameter_checksums()
        buffers = self._buffer_checksums()
        generators = self._generators_before
        self._recorder.event(
            "stepped",
            parameters_changed=[name for name, bits in after.items() if before[name] != bits],
            parameters_moved=_moved(self._addresses_before, self._parameters),
            buffers_moved=_moved(self._buffer_addresses_before, self._buffers()),
            buffers_changed=[
                name for name, bits in self._buffers_before.items() if buffers[name] != bits
            ],
            rng_changed=[
                name
                for name, state in process_state.rng().items()
                if generators.get(name, state) != state
            ],
        )
        if self._scenario.folded:
            self._fold_step(step)
            return
        if not self._scenario.observe.gradients:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._keep(f"{step}/grad/{name}", parameter.grad)
            elif self._scenario.fused and (result := self._observer.result_of(name)) is not None:
                self._keep(f"{step}/result/{name}", result)
            elif (result := self._dropped_result(name)) is not None:
                self._keep(f"{step}/dropped/{name}", result)
        if self._scenario.fused:
            self.record_model(step)

    def _fold_step(self, step: int) -> None:
        """Record the results, and the parameters of a fused hook, folded."""
        results = {name: parameter.grad for name, parameter in self._parameters.items()}
        if self._scenario.fused:
            for name, grad in results.items():
                results[name] = self._observer.result_of(name) if grad is None else grad
        missing = [name for name, result in results.items() if result is None]
        self._recorder.event("folded", missing=missing)
        found = {name: result for name, result in results.items() if result is not None}
        if self._moments:
            self._keep_moments(self._moments, step, found)
        elif self._scenario.folded == "bucket":
            for number, names in self._observer.buckets().items():
                inside = {name: found[name] for name in names if name in found}
                self._keep_folded(f"{step}/fold/bucket{number}", inside)
        else:
            self._keep_folded(f"{step}/fold/grad", found)
        if self._scenario.fused and not self._moments:
            parameters = {name: one.detach() for name, one in self._parameters.items()}
            self._keep_folded(f"{step}/fold/parameter", parameters)

    def _keep_folded(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        if flats := self._flat(tensors):
            for part, values in fold(flats, self._scenario.period).items():
                self._recorder.tensor(f"{name}/{part}", values)

    def _keep_moments(self, moments: Moments, step: int, results: dict[str, torch.Tensor]) -> None:
        """Record the products of a step's results, and of the sum of all results so far."""
        made = moments.of(self._flat(results), torch.distributed.get_world_size(), step)
        for part, values in made.items():
            self._recorder.tensor(f"{step}/moments/{part}", values)

    def _flat(self, tensors: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return tensors by the number of their parameter, flat in C order."""
        numbers = {name: index for index, name in enumerate(self._parameters)}
        return {numbers[name]: one.detach().reshape(-1).cpu() for name, one in tensors.items()}

    def _dropped_result(self, name: str) -> torch.Tensor | None:
        """Return the result for a parameter that no rank has used: DDP drops it."""
        drops = self._scenario.ddp.find_unused_parameters
        return self._observer.result_of(name) if drops else None

    def record_model(self, step: int) -> None:
        """Record the parameters, and the scale of the next step's gradients."""
        self._recorder.event("model", scale=self._model.scale)
        for name, parameter in self._parameters.items():
            self._keep(f"{step}/parameter/{name}", parameter)

    def gradient_checksums(self) -> dict[str, str]:
        """Return a checksum of each gradient, by parameter name; '' if there is no gradient."""
        return {
            name: "" if parameter.grad is None else checksum(parameter.grad)
            for name, parameter in self._parameters.items()
        }

    def record_memory(self) -> None:
        """Record the memory in use, without the copies that the recorder itself keeps."""
        memory: dict[str, Any] = process_state.live_memory()
        # A thread of the backend's may be about to let go of a step's tensors. Memory that is kept
        # is there after the wait, too.
        for _ in range(_RETRIES):
            if memory["allocated"] - self._recorder.held <= self._allocated_before + _TENSOR:
                break
            time.sleep(_PAUSE)
            memory = process_state.live_memory()
        own = self._recorder.held
        self._allocated_before = memory["allocated"] - own
        on_host = {name: memory.pop(name) - own for name in ("tensors", "allocated")}
        self._recorder.event("memory", **on_host, **memory)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self._recorder.tensor(name, lay_out(tensor, "contiguous"))

    def _parameter_checksums(self) -> dict[str, str]:
        return {name: checksum(parameter) for name, parameter in self._parameters.items()}

    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._model.model.named_buffers())

    def _buffer_checksums(self) -> dict[str, str]:
        return {name: checksum(buffer) for name, buffer in self._buffers().items()}


def _addresses(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the address of each tensor that has elements."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}


def _moved(before: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that have another address than before."""
    after = _addresses(tensors)
    return [name for name, address in before.items() if after.get(name) != address]
