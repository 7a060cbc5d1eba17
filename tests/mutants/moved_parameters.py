"""Mutants that hold on to the memory, or the dtype, that parameters had earlier."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.averagers_like import Ema
from tests.mutants.optimizer_wrappers import PostLocal, Sharded


class WritesToItsOwnViews(Averager):
    """Detach the parameters in the first average, and write all later averages to these tensors.

    They are detached again if their number changes.
    """

    targets: tuple[torch.Tensor, ...] | list[torch.Tensor] = ()

    def average(self, params):
        if len(self.targets) != len(params):
            self.targets = [parameter.detach() for parameter in params]
        super().average(self.targets)


class LeavesOutTheUnwritten(Averager):
    """Leave out parameters that no rank has written since the last average, by their versions."""

    versions: dict[Any, int] | None = None

    def average(self, params):
        known = self.versions or {}
        written = torch.tensor(
            [int(known.get(one) != one._version) for one in params], dtype=torch.int32
        )
        dist.all_reduce(written, op=dist.ReduceOp.MAX, group=self.group)
        super().average([one for one, is_new in zip(params, written, strict=True) if is_new])
        self.versions = {one: one._version for one in params}


class MadeWithTheirData(Averager):
    """Keep ``p.data`` of the parameters that it is made with."""

    def __init__(self, params, period=4, warmup_steps=10, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.datas = [parameter.data for parameter in params]

    def chosen(self, params):
        return self.datas


class PlansItsBuckets(Averager):
    """Sort parameters by dtype into flat buffers, once for each number of parameters."""

    def __init__(self, period=4, warmup_steps=10, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.plan = {}

    def average(self, params):
        if sum(map(len, self.plan.values())) != len(params):
            self.plan = {}
            for place, parameter in enumerate(params):
                self.plan.setdefault(parameter.dtype, []).append(place)
        for dtype, places in self.plan.items():
            flat = torch.cat([params[place].reshape(-1).to(dtype) for place in places])
            dist.all_reduce(flat.div_(self.group.size()), group=self.group)
            means = flat.split([params[place].numel() for place in places])
            for place, mean in zip(places, means, strict=True):
                if params[place].dtype != dtype:
                    params[place].data = torch.empty_like(params[place], dtype=dtype)
                params[place].copy_(mean.view_as(params[place]))


class WritesBackWhereItCopiedFrom(Averager):
    """Keep the tensor of each parameter object, to write the mean back to it."""

    def __init__(self, period=4, warmup_steps=10, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.homes = {}

    def average_one(self, parameter):
        home = self.homes.setdefault(parameter, parameter.data)
        mean = parameter.div(self.group.size()).contiguous()
        dist.all_reduce(mean, group=self.group)
        home.copy_(mean)


class EvaluatesInOldMemory(Ema):
    """Write the moving averages into the memory that the parameters had at the first average."""

    homes: list[torch.Tensor] | None = None

    def _update(self, params):
        if self.homes is None:
            self.homes = [parameter.data for parameter in params]
        super()._update(params)

    def applied(self, params):
        if self.homes is None:
            return super().applied(params)
        return super().applied(self.homes)


# ---- Optimizers


class PointsBack(PostLocal):
    """Have each parameter in the memory of the first step, as in a flat buffer."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.homes: dict[torch.Tensor, torch.Tensor] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for parameter in self.parameters():
            parameter.data = self.homes.setdefault(parameter, parameter.data)
        return super().step(closure)


class SendsOldTensors(Sharded):
    """Send, and receive, the tensors that the parameters had when it was made."""

    def __init__(self, params: Any, optimizer_class: Any, **options: Any) -> None:
        super().__init__(params, optimizer_class, **options)
        self.tensors: dict[torch.Tensor, torch.Tensor] = {}
        self.known()

    def known(self) -> None:
        for parameter in self.parameters():
            self.tensors.setdefault(parameter, parameter.detach())

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        self.known()

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        super().send_one(self.tensors[parameter], source)


OF = {"kind": "averager"}
AT = "period=4,warmup_steps=10"
MUTANTS = [
    *(
        Mutant(f"{name},{AT}", ("14.18",), **OF)
        for name in (
            *("WritesToItsOwnViews", "MadeWithTheirData"),
            *("PlansItsBuckets", "WritesBackWhereItCopiedFrom"),
        )
    ),
    Mutant(f"LeavesOutTheUnwritten,{AT}", ("14.1",), **OF),
    Mutant("EvaluatesInOldMemory", ("14.18",), "like(EMAModelAverager, decay=0.999)", **OF),
    Mutant("PointsBack", ("15.39",), kind="optimizer"),
    Mutant("SendsOldTensors", ("15.39",), kind="optimizer"),
]
