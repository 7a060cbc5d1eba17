"""Averagers of parameters that differ from the reference."""

import itertools

import torch
import torch.distributed as dist

from tests.right import Right


def _each(params):
    for entry in params:
        yield from entry["params"] if isinstance(entry, dict) else [entry]


class GathersAndAverages:
    """Gather, average in float64, and write all parameters, frozen ones too.

    ``step`` is the only state.
    """

    def __init__(self, process_group, period, warmup_steps=0):
        self.group = process_group
        self.period = period
        self.warmup_steps = warmup_steps
        self.step = 0

    @torch.no_grad()
    def average_parameters(self, params):
        due = self.step >= self.warmup_steps and not (self.step - self.warmup_steps) % self.period
        self.step += 1
        for parameter in dict.fromkeys(_each(params)) if due else ():
            mine = parameter.detach().double().contiguous()
            parts = [torch.empty_like(mine) for _ in range(self.group.size())]
            dist.all_gather(parts, mine, group=self.group)
            parameter.copy_(torch.stack(parts).mean(0))


class FlatBuffers:
    """Average one flat buffer per dtype, of the parameters of the constructor.

    The schedule is an iterator, and cannot be saved.
    """

    def __init__(self, params, process_group):
        self.params = list(params)
        self.group = process_group
        self.steps = itertools.count()

    @torch.no_grad()
    def average_parameters(self, params):
        if next(self.steps) % 3:
            return
        by_dtype = {}
        for parameter in self.params:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for some in by_dtype.values():
            flat = torch.cat([parameter.reshape(-1) for parameter in some])
            dist.all_reduce(flat, group=self.group)
            flat /= self.group.size()
            for parameter, part in zip(
                some, flat.split([parameter.numel() for parameter in some]), strict=True
            ):
                parameter.copy_(part.view_as(parameter))


class ServerAverages:
    """Average on the group's first rank, and broadcast from there."""

    def __init__(self, process_group, every=5):
        self.group = process_group
        self.every = every
        self.calls = 0

    def state_dict(self):
        return {"calls": torch.tensor(self.calls)}

    def load_state_dict(self, saved):
        self.calls = int(saved["calls"])

    @torch.no_grad()
    def average_parameters(self, params):
        self.calls += 1
        for parameter in dict.fromkeys(_each(params)) if self.calls % self.every == 0 else ():
            mine = (
                parameter.detach()
                .clone(memory_format=torch.contiguous_format)
                .div_(self.group.size())
            )
            dist.reduce(mine, group=self.group, group_dst=0)
            dist.broadcast(mine, group=self.group, group_src=0)
            parameter.copy_(mine)


class Pairs:
    """Average pairs of neighbours every two steps, and all ranks every six, in groups of four."""

    def __init__(self, process_group):
        if process_group.size() != 4:
            raise ValueError("expected a group of four ranks")
        ranks = dist.get_process_group_ranks(process_group)
        self.all = process_group
        self.step = 0
        pairs = [dist.new_group(ranks[:2]), dist.new_group(ranks[2:])]
        self.pair = pairs[process_group.rank() // 2]

    @torch.no_grad()
    def average_parameters(self, params):
        group = None
        if self.step % 6 == 0:
            group = self.all
        elif self.step % 2 == 0:
            group = self.pair
        self.step += 1
        for parameter in dict.fromkeys(_each(params)) if group else ():
            mean = (parameter.detach() / group.size()).contiguous()
            dist.all_reduce(mean, group=group)
            parameter.copy_(mean)


def diloco(process_group):
    """Return DiLoCo with torch's SGD as outer optimizer, as its authors have it."""
    return _DiLoCo(process_group)


class _DiLoCo:
    def __init__(self, process_group):
        self.group = process_group
        self.step = 0
        self.outer = None
        self.kept = None

    @torch.no_grad()
    def average_parameters(self, params):
        due = self.step % 5 == 0
        first = self.step == 0
        self.step += 1
        if not due:
            return
        params = list(dict.fromkeys(_each(params)))
        means = []
        for parameter in params:
            mean = (parameter.detach().double() / self.group.size()).contiguous()
            dist.all_reduce(mean, group=self.group)
            means.append(mean)
        if first:
            self.kept = [torch.nn.Parameter(mean) for mean in means]
            self.outer = torch.optim.SGD(self.kept, lr=0.7, momentum=0.9, nesterov=True)
        else:
            for kept, mean in zip(self.kept, means, strict=True):
                kept.grad = kept - mean
            self.outer.step()
        for parameter, kept in zip(params, self.kept, strict=True):
            parameter.copy_(kept)

    def state_dict(self):
        return {"step": self.step, "kept": self.kept, "outer": self.outer.state_dict()}

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self.kept = saved["kept"]
        self.outer = torch.optim.SGD(self.kept, lr=0.7, momentum=0.9, nesterov=True)
        self.outer.load_state_dict(saved["outer"])


OF = {"kind": "averager"}
RIGHT = (
    Right("GathersAndAverages,period=3,warmup_steps=2", **OF),
    Right("FlatBuffers", "periodic(period=3)", **OF),
    Right("ServerAverages", "periodic(period=5, warmup_steps=4)", **OF),
    Right("Pairs", "hierarchical(period_group_size_dict={2: 2, 6: 4}), min_world_size(4)", **OF),
    Right("diloco()", "like(DiLoCoModelAverager, period=5)", **OF),
)
