"""Right averagers in odd shapes, for ordinary loops of training."""

import copy
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.right import Right


def _each(params):
    for entry in params:
        yield from entry["params"] if isinstance(entry, dict) else [entry]


class RunningMean:
    """Gather, and take a running mean in float64, one rank after another."""

    def __init__(self, period, warmup_steps=0, process_group=None):
        self.period = period
        self.warmup_steps = warmup_steps
        self.group = process_group if process_group is not None else dist.group.WORLD
        self.step = torch.zeros((), dtype=torch.int64)  # counted in place, as Adam's

    @torch.no_grad()
    def average_parameters(self, params):
        since = int(self.step) - self.warmup_steps
        self.step += 1
        if since < 0 or since % self.period:
            return
        given = []
        for entry in params:
            given += entry["params"] if isinstance(entry, dict) else [entry]
        for parameter in dict.fromkeys(given):
            if not parameter.is_floating_point():
                continue  # a running mean of equal integers may end a rounding below them
            mine = parameter.detach().clone(memory_format=torch.contiguous_format)
            others = [torch.empty_like(mine) for _ in range(self.group.size())]
            dist.all_gather(others, mine, group=self.group)
            mean = others[0].double()
            for count, other in enumerate(others[1:], 2):
                mean = mean * ((count - 1) / count) + other.double() / count
            parameter.copy_(mean)


class Concatenates:
    """Average one buffer of each dtype of the trained parameters; refuse to average nothing.

    Another list takes the place of the list in a group, with the same parameters in it, and the
    grad mode is set by hand.
    """

    def __init__(self, process_group, period, warmup_steps=0):
        self.group = process_group
        self.period = period
        self.warmup_steps = warmup_steps
        self.step = 0

    def average_parameters(self, params):
        since = self.step - self.warmup_steps
        self.step += 1
        if since < 0 or since % self.period:
            return
        given = []
        for entry in params:
            if isinstance(entry, dict):
                entry["params"] = list(entry["params"])
            given += entry["params"] if isinstance(entry, dict) else [entry]
        trained = [parameter for parameter in dict.fromkeys(given) if parameter.requires_grad]
        if not trained:
            raise ValueError("expected a parameter that is trained")
        mode = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
                self._average([one for one in trained if one.dtype == dtype])
        finally:
            torch.set_grad_enabled(mode)

    def _average(self, params):
        mean = torch.cat([one.reshape(-1) for one in params]) / self.group.size()
        dist.all_reduce(mean, group=self.group)
        parts = mean.split([one.numel() for one in params])
        for parameter, part in zip(params, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))


class AgreesOnGradients:
    """Average what has a gradient on some rank; raise on all ranks if nothing has one."""

    def __init__(self, period, warmup_steps=0, process_group=None):
        self.period = period
        self.warmup_steps = warmup_steps
        self.group = process_group if process_group is not None else dist.group.WORLD
        self.step = 0

    @torch.no_grad()
    def average_parameters(self, params):
        since = self.step - self.warmup_steps
        self.step += 1
        trained = [p for p in dict.fromkeys(_each(params)) if p.requires_grad]
        outside = dist.get_rank(self.group) < 0
        if outside or since < 0 or since % self.period or not trained:
            return
        used = torch.tensor([p.grad is not None for p in trained]).int()
        dist.all_reduce(used, dist.ReduceOp.MAX, self.group)
        if not used.any():
            raise RuntimeError("no parameter has a gradient on any rank: call backward() first")
        for parameter, is_used in zip(trained, used.tolist(), strict=True):
            if is_used:
                mean = (parameter.detach() / dist.get_world_size(self.group)).contiguous()
                dist.all_reduce(mean, group=self.group)
                parameter.copy_(mean)

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, saved):
        self.step = saved["step"]


class OfItsRank(AgreesOnGradients):
    """Refuse the state of another rank, as if each rank had a file of its own."""

    def state_dict(self):
        return {"step": self.step, "rank": dist.get_rank(self.group)}

    def load_state_dict(self, saved):
        if saved["rank"] != dist.get_rank(self.group):
            raise ValueError(f"this is the state of rank {saved['rank']}")
        self.step = saved["step"]


class KeepsWeightsAside:
    """A moving average whose state has the weights of the latest evaluation, as torch_ema's has."""

    def __init__(self, process_group, decay=0.999):
        self.group = process_group
        self.decay = decay
        self.updates = 0
        self.averages = []
        self.weights = None
        self.is_applied = False

    @torch.no_grad()
    def average_parameters(self, params):
        for place, parameter in enumerate(self._averaged(params)):
            wide = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
            mean = (wide / self.group.size()).contiguous()
            dist.all_reduce(mean, group=self.group)
            if place == len(self.averages):
                self.averages.append(mean)
            self.averages[place].lerp_(mean, 1 - self.decay)
        self.updates += 1

    def _averaged(self, params):
        return [p for p in dict.fromkeys(_each(params)) if p.is_floating_point()]

    @contextmanager
    def applied(self, params):
        if self.is_applied:
            raise RuntimeError("an evaluation is under way")
        averaged = self._averaged(params)
        if len(averaged) != len(self.averages):
            raise RuntimeError("there is no average yet")
        self.weights = [p.detach().clone() for p in averaged]
        self.is_applied = True
        try:
            self._write(averaged, self.averages)
            yield
        finally:
            self.is_applied = False
            self._write(averaged, self.weights)

    @torch.no_grad()
    def _write(self, params, values):
        for parameter, value in zip(params, values, strict=True):
            parameter.copy_(value)

    def state_dict(self):
        return {"updates": self.updates, "averages": self.averages, "weights": self.weights}

    def load_state_dict(self, saved):
        saved = copy.deepcopy(saved)
        self.updates = saved["updates"]
        self.averages = saved["averages"]
        self.weights = saved["weights"]


class CountsInStep:
    """Count the calls of ``step()``, which averages in each so many-th: accelerate's LocalSGD.

    The count is not saved: it begins anew with an epoch.
    """

    def __init__(self, process_group, period):
        self.group = process_group
        self.period = period
        self.calls = 0
        self.params = []

    @torch.no_grad()
    def step(self):
        self.calls += 1
        if self.calls % self.period:
            return
        for parameter in self.params:
            mine = parameter.detach().double().contiguous()
            others = [torch.empty_like(mine) for _ in range(self.group.size())]
            dist.all_gather(others, mine, group=self.group)
            parameter.copy_(torch.stack(others).mean(0))

    def average_parameters(self, params):
        self.params = list(dict.fromkeys(_each(params)))
        self.step()
        self.params = []


OF = {"kind": "averager"}
RIGHT = (
    Right("RunningMean,period=4,warmup_steps=6", **OF),
    Right("Concatenates,period=3,warmup_steps=5", **OF),
    Right("AgreesOnGradients,period=4", **OF),
    Right("OfItsRank,period=3,warmup_steps=4", **OF),
    Right("CountsInStep,period=4", "periodic(period=4, warmup_steps=3)", **OF),
    Right("KeepsWeightsAside", "like(EMAModelAverager, decay=0.999)", **OF),
)
