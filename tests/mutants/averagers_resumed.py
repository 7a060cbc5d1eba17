"""Mutants of section 14: loaded states, and averages of parameters that are unfrozen."""

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.averagers_like import EMA, OF, Ema, _Applied


class EmaByPlaceOfTrained(Ema):
    """Keep averages by the place among the trained parameters, which another parameter takes."""

    trained = frozenset()

    def chosen(self, params):
        return [parameter for parameter in super().chosen(params) if parameter.requires_grad]

    def _update(self, params):
        super()._update(params)
        self.trained = frozenset(params)

    def averaged(self, params):
        """Return the parameters of the last average; they may be frozen for an evaluation."""
        if not self.trained:
            return self.chosen(params)
        return [parameter for parameter in super().chosen(params) if parameter in self.trained]

    def applied(self, params):
        return _Applied(self.averaged(params), self.average)


class EmaInOneBuffer(EmaByPlaceOfTrained):
    """Keep one flat average of the trained parameters while their number of elements stays."""

    flat = None

    def _update(self, params):
        flat = torch.cat([parameter.detach().double().reshape(-1) for parameter in params])
        dist.all_reduce(flat.div_(self.group.size()), group=self.group)
        if self.flat is None or len(self.flat) != len(flat):
            self.flat = flat
        else:
            self.flat = self.moved(self.flat, flat)
        self.trained = frozenset(params)

    def applied(self, params):
        if self.flat is None:
            raise RuntimeError("no average yet")
        chosen = self.averaged(params)
        parts = self.flat.split([parameter.numel() for parameter in chosen])
        pairs = zip(parts, chosen, strict=True)
        return _Applied(chosen, [part.view(parameter.shape) for part, parameter in pairs])

    def state_dict(self):
        return {"step": self.step, "flat": None if self.flat is None else self.flat.clone()}

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self.flat = None if saved["flat"] is None else saved["flat"].clone()


class EmaLoadsNarrow(Ema):
    """Load averages in the dtypes of the parameters, as torch's optimizers load their states."""

    dtypes = ()

    def _update(self, params):
        super()._update(params)
        self.dtypes = [parameter.dtype for parameter in params]

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        for place, dtype in enumerate(self.dtypes):
            self.average[place] = self.average[place].to(dtype)

    def moved(self, average, mean):
        return average.copy_(super().moved(average, mean))


class SavesTheLastCall(Averager):
    """Save the state as it was after the last call, which a load does not change."""

    def __init__(self, period=4, warmup_steps=10, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.snapshot = {"step": 0}

    def average_parameters(self, params):
        super().average_parameters(params)
        self.snapshot = {"step": self.step}

    def state_dict(self):
        return self.snapshot

    def load_state_dict(self, saved):
        self.step = saved["step"]


MUTANTS = [
    *(Mutant(name, ("14.18",), **EMA) for name in ("EmaByPlaceOfTrained", "EmaInOneBuffer")),
    Mutant("EmaLoadsNarrow", ("14.20",), **EMA),
    Mutant("SavesTheLastCall,period=4,warmup_steps=10", ("14.19",), **OF),
]
