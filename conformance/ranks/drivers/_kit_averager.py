"""The kit's own averager, which optimizer wrappers are given."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from conformance.ranks.drivers.base import RankDriver


class Averager(ModelAverager):
    """The kit's own averager: the mean over the group, every ``period`` steps after ``warmup``.

    The first average is at step ``warmup``. Each call is recorded. Means are taken in float64, in
    the order of ranks, so that they are the same on all ranks.
    """

    def __init__(
        self, driver: RankDriver, params: list[torch.nn.Parameter], warmup: int, period: int
    ) -> None:
        super().__init__(driver.group)
        self._driver = driver
        self._params = params
        self._before = [parameter.detach().clone() for parameter in params]
        self.warmup_steps = warmup
        self.period = period

    def before_step(self) -> None:
        """Remember the values of the parameters before a step."""
        self._before = [parameter.detach().clone() for parameter in self._params]

    def average_parameters(self, params: Iterable[Any]) -> None:
        """Average the parameters if an average is due, and record the call."""
        given = list(dict.fromkeys(_flat(params)))
        later = self.step - self.warmup_steps
        averages = later >= 0 and later % self.period == 0
        indices = {parameter: index for index, parameter in enumerate(self._params)}
        known = {indices[parameter] for parameter in given if parameter in indices}
        values = zip(self._params, self._before, strict=True)
        self._driver.recorder.event(
            "asked",
            count=self.step,
            averages=averages,
            stepped=any(not torch.equal(now, before) for now, before in values),
            missing=sorted(set(indices.values()) - known),
            others=sum(parameter not in indices for parameter in given),
            without=[i for i, parameter in enumerate(self._params) if parameter.grad is None],
        )
        self.step += 1
        if averages:
            for parameter in given:
                self._average(parameter)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.step = saved["step"]

    @torch.no_grad()
    def _average(self, parameter: torch.Tensor) -> None:
        own = parameter.detach().double().contiguous()
        parts = [torch.empty_like(own) for _ in range(self._driver.size)]
        dist.all_gather(parts, own, group=self._driver.group)
        parameter.copy_(sum(parts[1:], parts[0]) / self._driver.size)


def _flat(params: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the parameters of parameters or parameter groups."""
    for entry in params:
        yield from entry["params"] if isinstance(entry, Mapping) else [entry]
