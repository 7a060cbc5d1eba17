"""Right averagers in odd shapes, for ordinary loops of training."""

import torch
import torch.distributed as dist

from tests.right import Right


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


OF = {"kind": "averager"}
RIGHT = (
    Right("RunningMean,period=4,warmup_steps=6", **OF),
    Right("Concatenates,period=3,warmup_steps=5", **OF),
)
