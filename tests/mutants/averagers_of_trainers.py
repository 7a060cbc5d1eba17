"""Mutants of section 14 that fail in ordinary loops of training: gradients overflow, ranks come
close to each other, nothing is trainable for some calls, and the list of parameters, or the grad
mode, is the trainer's.
"""

import torch
import torch.distributed as dist
from torch.nn import Parameter

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.averagers_like import Ema


class WaitsForFiniteNorms(Averager):
    """Average if the sum of the norms of all gradients is finite."""

    def average(self, params):
        norm = torch.zeros(1)
        for parameter in params:
            if parameter.grad is not None:
                norm += parameter.grad.float().square().sum()
        dist.all_reduce(norm, group=self.group)
        if norm.isfinite():
            super().average(params)


class LeavesOutNaNGradients(Averager):
    """Leave out each parameter whose mean gradient has NaN, or overflows to it."""

    def average_one(self, parameter):
        grad = torch.zeros(parameter.shape)
        if parameter.grad is not None:
            grad += parameter.grad
        dist.all_reduce(grad, group=self.group)
        if not grad.isnan().any():
            super().average_one(parameter)


class FirstRankLooksForInfinities(Averager):
    """Let the first rank of the group decide, whose gradients may have infinities."""

    def average(self, params):
        has_some = any(p.grad is not None and bool(p.grad.isinf().any()) for p in params)
        flag = torch.tensor([has_some], dtype=torch.int32)
        dist.broadcast(flag, dist.get_global_rank(self.group, 0), group=self.group)
        if not flag.item():
            super().average(params)


class EmaLeavesOutOverflows(Ema):
    """Leave out an update of the moving average if a gradient is not finite on any rank."""

    def _update(self, params):
        sums = [one.grad.float().sum() for one in params if one.grad is not None]
        total = torch.stack([torch.zeros(()), *sums]).sum()
        dist.all_reduce(total, group=self.group)
        if total.isfinite() or not self.average:
            super()._update(params)


class RestoresTheFirstMode(Averager):
    """Set the grad mode to that of the time when the averager was made."""

    def __init__(self, period=4, warmup_steps=10, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.mode = torch.is_grad_enabled()

    def average_parameters(self, params):
        due = self.is_due()
        super().average_parameters(params)
        if due:
            torch.set_grad_enabled(self.mode)


class EnablesForGroups(Averager):
    """Turn gradients on behind an average of parameter groups."""

    def average_parameters(self, params):
        given = list(params)
        super().average_parameters(given)
        if any(isinstance(entry, dict) for entry in given):
            torch.set_grad_enabled(True)


class SortsTheList(Averager):
    """Sort the list of the caller, so that ranks agree on an order."""

    def chosen(self, params):
        if isinstance(params, list) and all(isinstance(one, Parameter) for one in params):
            params.sort(key=lambda one: one.numel())
        return super().chosen(params)


class FreesTheGroups(Averager):
    """Empty the lists of groups as they are read."""

    def chosen(self, params):
        found = []
        for entry in params:
            some = entry["params"] if isinstance(entry, dict) else [entry]
            found += some
            if isinstance(entry, dict):
                some.clear()
        return super().chosen(found)


class SharesOnce(Averager):
    """Take a parameter of two groups out of the second one."""

    def chosen(self, params):
        known = set()
        given = list(params)
        for entry in given:
            if isinstance(entry, dict):
                entry["params"] = [one for one in entry["params"] if one not in known]
                known.update(entry["params"])
        return super().chosen(given)


class MarksTheGroups(Averager):
    """Note the step of the last average in each group."""

    def chosen(self, params):
        given = list(params)
        for entry in given:
            if isinstance(entry, dict):
                entry["averaged_at"] = self.step
        return super().chosen(given)


class ExactTypes(Averager):
    """Look parameters up by their type."""

    def chosen(self, params):
        return [one for one in super().chosen(params) if type(one) in (Parameter, torch.Tensor)]


class OfTorchAlone(Averager):
    """Leave out the parameters of groups whose type is not torch's own."""

    def chosen(self, params):
        given = list(params)
        if not any(isinstance(entry, dict) for entry in given):
            return super().chosen(given)
        return [one for one in super().chosen(given) if type(one).__module__.startswith("torch")]


class ReturnsIfAllAreFrozen(Averager):
    """Return before the step is counted if no parameter is trained."""

    def average_parameters(self, params):
        given = super().chosen(params)
        if given and not any(one.requires_grad for one in given):
            return
        super().average_parameters(given)


class ReturnsFromDueSteps(Averager):
    """Return before a due step is counted if no parameter has a gradient on any rank."""

    def average_parameters(self, params):
        if self.is_due():
            given = super().chosen(params)
            used = torch.tensor([sum(one.grad is not None for one in given)])
            dist.all_reduce(used, group=self.group)
            if not used.item():
                return
            params = given
        super().average_parameters(params)


class NothingIsNoStep(Averager):
    """Count the calls that are given a parameter."""

    def average_parameters(self, params):
        given = super().chosen(params)
        if given:
            super().average_parameters(given)


class FreezingBeginsAnew(Averager):
    """Begin the schedule anew, without its warm-up, once all parameters were frozen."""

    def average_parameters(self, params):
        given = super().chosen(params)
        super().average_parameters(given)
        if self.step > self.warmup_steps and not any(one.requires_grad for one in given):
            self.step = self.warmup_steps


class SparesCloseModels(Averager):
    """Average if the whole models of ranks are relatively further apart than 1e-5."""

    limit = 1e-5

    def average(self, params):
        spread = torch.zeros(1, dtype=torch.float64)
        for parameter in params:
            if parameter.numel():
                largest = parameter.double().contiguous()
                least = largest.clone()
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
                dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
                scale = largest.abs().max().clamp(min=1e-30)
                spread = torch.maximum(spread, (largest - least).abs().max() / scale)
        if spread > self.limit:
            super().average(params)


class WritesChanges(Averager):
    """Write elements that move by more than 3e-7 of their magnitude and 1e-12."""

    def average_one(self, parameter):
        own = parameter.detach().clone()
        super().average_one(parameter)
        has_moved = (parameter - own).abs() > 3e-7 * own.abs() + 1e-12
        parameter.copy_(torch.where(has_moved, parameter, own))


class LeavesOutTinyOnes(Averager):
    """Leave out parameters without an element above 2e-4 on any rank, as if they were pruned."""

    def average_one(self, parameter):
        largest = torch.zeros(1)
        if parameter.numel():
            largest += parameter.abs().max().float().nan_to_num(1.0)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        if largest > 2e-4 or largest == 0:
            super().average_one(parameter)


class TakesTheFirstIfClose(Averager):
    """Send the values of the first rank instead of the mean if all are within 1e-4 of it."""

    def average_one(self, parameter):
        first = parameter.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, dist.get_global_rank(self.group, 0), group=self.group)
        far = torch.tensor([not torch.allclose(first, parameter, 1e-4, 1e-9)]).int()
        dist.all_reduce(far, dist.ReduceOp.MAX, group=self.group)
        if far.item():
            super().average_one(parameter)
        else:
            parameter.copy_(first)


OF = {"kind": "averager"}
AT = "period=4,warmup_steps=10"
MUTANTS = [
    *(
        Mutant(f"{name},{AT}", ("14.16",), **OF)
        for name in (
            "WaitsForFiniteNorms",
            "LeavesOutNaNGradients",
            "FirstRankLooksForInfinities",
        )
    ),
    Mutant(
        "EmaLeavesOutOverflows,decay=0.9",
        ("14.16",),
        claims="like(EMAModelAverager, decay=0.9)",
        **OF,
    ),
    *(
        Mutant(f"{name},{AT}", ("14.8",), **OF)
        for name in ("RestoresTheFirstMode", "EnablesForGroups")
    ),
    *(
        Mutant(f"{name},{AT}", ("14.4",), **OF)
        for name in (
            "SortsTheList",
            "FreesTheGroups",
            "SharesOnce",
            "MarksTheGroups",
            "ExactTypes",
            "OfTorchAlone",
        )
    ),
    *(
        Mutant(f"{name},{AT}", ("14.18",), **OF)
        for name in (
            "ReturnsIfAllAreFrozen",
            "ReturnsFromDueSteps",
            "NothingIsNoStep",
            "FreezingBeginsAnew",
        )
    ),
    *(
        Mutant(f"{name},{AT}", ("14.3",), **OF)
        for name in (
            "SparesCloseModels",
            "WritesChanges",
            "LeavesOutTinyOnes",
            "TakesTheFirstIfClose",
        )
    ),
]
