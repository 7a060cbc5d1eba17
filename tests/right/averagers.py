"""Averagers of parameters that differ from the reference."""

import hashlib
import itertools
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.right import Right


def _each(params):
    for entry in params:
        yield from entry["params"] if isinstance(entry, dict) else [entry]


def _each_of_floats(params):
    """Leave out integers, which cannot require grad."""
    return (parameter for parameter in _each(params) if parameter.is_floating_point())


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


class RefusesNewMemory(GathersAndAverages):
    """Refuse a parameter that has other memory than in its first average, as a graph would."""

    def __init__(self, process_group, period):
        super().__init__(process_group, period)
        self.known = {}

    def average_parameters(self, params):
        params = list(dict.fromkeys(_each(params)))
        for parameter in params:
            address = parameter.data_ptr()
            if self.known.setdefault(parameter, address) != address:
                raise RuntimeError("a parameter has got new memory: make another averager")
        super().average_parameters(params)


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
            flat /= self.group.size()  # before the sum, which may overflow
            dist.all_reduce(flat, group=self.group)
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
            dist.reduce(mine, group=self.group, dst=dist.get_global_rank(self.group, 0))
            dist.broadcast(mine, group=self.group, src=dist.get_global_rank(self.group, 0))
            parameter.copy_(mine)


class Multiplies:
    """Multiply by a rounded 1 / W before the sum, which 7 ranks make inexact."""

    def __init__(self, process_group, period=4, warmup_steps=0):
        self.group = process_group
        self.period = period
        self.warmup_steps = warmup_steps
        self.step = 0

    @torch.no_grad()
    def average_parameters(self, params):
        due = self.step >= self.warmup_steps and not (self.step - self.warmup_steps) % self.period
        self.step += 1
        for parameter in dict.fromkeys(_each_of_floats(params)) if due else ():
            mean = (parameter * (1 / self.group.size())).contiguous()
            dist.all_reduce(mean, group=self.group)
            parameter.copy_(mean)


class SkipsUnchanged(Multiplies):
    """Leave out parameters that no rank has changed since the last average, by their checksums."""

    def __init__(self, process_group, period=4, warmup_steps=0):
        super().__init__(process_group, period, warmup_steps)
        self.sums = {}

    @torch.no_grad()
    def average_parameters(self, params):
        given = list(dict.fromkeys(_each_of_floats(params)))
        due = self.step >= self.warmup_steps and not (self.step - self.warmup_steps) % self.period
        if due and given:
            changed = torch.tensor([self.sums.get(p) != _checksum(p) for p in given]).int()
            dist.all_reduce(changed, dist.ReduceOp.MAX, self.group)
            given = [p for p, is_changed in zip(given, changed.tolist(), strict=True) if is_changed]
        super().average_parameters(given)
        if due:
            self.sums.update((parameter, _checksum(parameter)) for parameter in given)


def _checksum(parameter):
    flat = parameter.detach().contiguous().reshape(-1)
    return hashlib.sha1(flat.view(torch.uint8).numpy()).digest()


class MeetsInAStore(Multiplies):
    """Set a key in the store of the process group before each average, and delete it later."""

    def average_parameters(self, params):
        store = dist.distributed_c10d._get_default_store()
        key = f"{self.step} of {dist.get_rank()}"
        store.set(key, "here")
        super().average_parameters(params)
        store.delete_key(key)


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
        for parameter in dict.fromkeys(_each_of_floats(params)) if group else ():
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
        self.kept = {}

    @torch.no_grad()
    def average_parameters(self, params):
        due = self.step % 5 == 0
        self.step += 1
        if not due:
            return
        trained = {
            place: parameter
            for place, parameter in enumerate(dict.fromkeys(_each(params)))
            if parameter.requires_grad
        }
        means = {}
        for place, parameter in trained.items():
            mean = (parameter.detach().double() / self.group.size()).contiguous()
            dist.all_reduce(mean, group=self.group)
            means[place] = mean
        if self.kept:
            for place in self.kept.keys() & means:
                self.kept[place].grad = self.kept[place] - means[place]
            self.outer.step()
            self.outer.zero_grad()
        # The first round of a parameter begins with its mean.
        first = means.keys() - self.kept.keys()
        self._keep(self.kept | {place: torch.nn.Parameter(means[place]) for place in sorted(first)})
        for place, parameter in trained.items():
            parameter.copy_(self.kept[place])

    def _keep(self, kept):
        self.kept = kept
        if self.outer is None:
            self.outer = torch.optim.SGD(kept.values(), lr=0.7, momentum=0.9, nesterov=True)
        self.outer.param_groups[0]["params"] = list(kept.values())

    def state_dict(self):
        return {"step": self.step, "kept": self.kept, "outer": self.outer.state_dict()}

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self._keep(dict(saved["kept"]))
        self.outer.load_state_dict(saved["outer"])


class OuterOptimizer:
    """An outer optimizer whose snapshot is taken when it is made, as torchft's and OpenDiLoCo's."""

    def __init__(self, params, process_group, every=4):
        self.group = process_group
        self.every = every
        self.local_steps = 0
        self.params = list(params)
        wide = [torch.promote_types(p.dtype, torch.float32) for p in self.params]
        self.snapshot = [
            torch.nn.Parameter(p.detach().to(dtype, copy=True))
            for p, dtype in zip(self.params, wide, strict=True)
        ]
        self.outer = torch.optim.SGD(self.snapshot, lr=0.5, momentum=0.75, nesterov=True)

    @torch.no_grad()
    def average_parameters(self, params):
        self.local_steps += 1
        if self.local_steps % self.every:
            return
        self.outer.zero_grad()
        # A frozen parameter has no outer step.
        pairs = [
            (parameter, kept)
            for parameter, kept in zip(self.params, self.snapshot, strict=True)
            if parameter.requires_grad
        ]
        for parameter, kept in pairs:
            difference = ((kept - parameter) / self.group.size()).contiguous()
            dist.all_reduce(difference, group=self.group)
            kept.grad = torch.empty_like(kept).copy_(difference)
        self.outer.step()
        for parameter, kept in pairs:
            parameter.copy_(kept)

    def state_dict(self):
        return {
            "local_steps": self.local_steps,
            "snapshot": [kept.detach().clone() for kept in self.snapshot],
            "outer": self.outer.state_dict(),
        }

    def load_state_dict(self, saved):
        self.local_steps = saved["local_steps"]
        with torch.no_grad():
            for kept, value in zip(self.snapshot, saved["snapshot"], strict=True):
                kept.copy_(value)
        self.outer.load_state_dict(saved["outer"])


class OverWorld:
    """An averager that knows no process group, as one of a script."""

    def __init__(self, every):
        self.every = every
        self.step = 0

    @torch.no_grad()
    def average_parameters(self, params):
        if self.step % self.every == 0:
            for parameter in dict.fromkeys(_each_of_floats(params)):
                mean = parameter.detach().contiguous() / dist.get_world_size()
                dist.all_reduce(mean)
                parameter.copy_(mean)
        self.step += 1


class Scattered:
    """Reduce-scatter one padded flat buffer per dtype, divide the share, and all-gather it."""

    def __init__(self, process_group, period, warmup_steps):
        self.group = process_group
        self.period = period
        self.warmup_steps = warmup_steps
        self.step = 0

    @torch.no_grad()
    def average_parameters(self, params):
        since = self.step - self.warmup_steps
        self.step += 1
        if since < 0 or since % self.period:
            return
        by_dtype = {}
        for parameter in dict.fromkeys(_each(params)):
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for some in by_dtype.values():
            self._average(some)

    def _average(self, params):
        size = self.group.size()
        numbers = [parameter.numel() for parameter in params]
        share = -(-sum(numbers) // size)
        flat = torch.zeros(share * size, dtype=params[0].dtype)
        torch.cat([parameter.reshape(-1) for parameter in params], out=flat[: sum(numbers)])
        flat.div_(size)
        mine = torch.empty(share, dtype=flat.dtype)
        dist.reduce_scatter_tensor(mine, flat, group=self.group)
        dist.all_gather_into_tensor(flat, mine, group=self.group)
        for parameter, part in zip(params, flat[: sum(numbers)].split(numbers), strict=True):
            parameter.copy_(part.view(parameter.shape))


class MovingAverage:
    """A moving average of the means, by torch's AveragedModel formula, kept in float64."""

    def __init__(self, process_group, decay=0.999):
        self.group = process_group
        self.decay = decay
        self.step = 0
        self.shadow = []

    @torch.no_grad()
    def average_parameters(self, params):
        for place, parameter in enumerate(dict.fromkeys(_each(params))):
            mean = (parameter.detach().double() / self.group.size()).contiguous()
            dist.all_reduce(mean, group=self.group)
            if place == len(self.shadow):
                self.shadow.append(mean)
            else:
                self.shadow[place] += (mean - self.shadow[place]) * (1 - self.decay)
        self.step += 1

    @contextmanager
    def applied(self, params):
        params = list(dict.fromkeys(_each(params)))
        before = [parameter.detach().clone() for parameter in params]
        with torch.no_grad():
            for parameter, value in zip(params, self.shadow, strict=True):
                parameter.copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(params, before, strict=True):
                    parameter.copy_(value)

    def state_dict(self):
        return {"step": self.step, "shadow": list(self.shadow)}

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self.shadow = [kept.clone() for kept in saved["shadow"]]


class TrainedAverage:
    """A moving average of the parameters of the constructor that are trained, in float64.

    The average of a parameter begins when it is trained first, and stays while it is frozen. An
    evaluation before the average of a trained parameter is an error. Parameters that were frozen in
    the latest call are evaluated as they are, and the others by their averages, whatever requires a
    gradient then.
    """

    def __init__(self, params, process_group, decay=0.999):
        self.params = list(params)
        self.group = process_group
        self.decay = decay
        self.step = 0
        self.shadow = {}
        self.places = {place for place, p in enumerate(self.params) if p.requires_grad}

    def _trained(self):
        return {place: p for place, p in enumerate(self.params) if place in self.places}

    @torch.no_grad()
    def average_parameters(self, params):
        self.places = {place for place, p in enumerate(self.params) if p.requires_grad}
        for place, parameter in self._trained().items():
            mean = (parameter.detach().double() / self.group.size()).contiguous()
            dist.all_reduce(mean, group=self.group)
            self.shadow.setdefault(place, mean).lerp_(mean, 1 - self.decay)
        self.step += 1

    @contextmanager
    def applied(self, params):
        trained = self._trained()
        if not trained.keys() <= self.shadow.keys():
            raise RuntimeError("a trained parameter has no average yet")
        before = {place: parameter.detach().clone() for place, parameter in trained.items()}
        try:
            self._write(self.shadow)
            yield
        finally:
            self._write(before)

    @torch.no_grad()
    def _write(self, values):
        for place, parameter in self._trained().items():
            parameter.copy_(values[place])

    def state_dict(self):
        return {"step": self.step, "shadow": dict(self.shadow)}

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self.shadow = {place: kept.clone() for place, kept in saved["shadow"].items()}


class CountsFirst:
    """Count a step before it asks whether an average is due, as accelerate's LocalSGD does.

    Frozen parameters are left out. The mean is written to ``p.data``.
    """

    def __init__(self, local_sgd_steps, process_group=None):
        self.num_steps = 0
        self.local_sgd_steps = local_sgd_steps
        self.group = process_group

    def average_parameters(self, params):
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps or dist.get_rank(self.group) < 0:
            return  # no average is due, or this rank is outside of the group
        for parameter in dict.fromkeys(_each(params)):
            if parameter.requires_grad:
                mean = (parameter.detach() / dist.get_world_size(self.group)).contiguous()
                dist.all_reduce(mean, group=self.group)
                parameter.data.copy_(mean)

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, saved):
        self.num_steps = saved["num_steps"]


OF = {"kind": "averager"}
RIGHT = (
    Right("GathersAndAverages,period=3,warmup_steps=2", **OF),
    Right("RefusesNewMemory,period=4", **OF),
    Right("FlatBuffers", "periodic(period=3)", **OF),
    Right("ServerAverages", "periodic(period=5, warmup_steps=4)", **OF),
    Right("Multiplies,period=4", **OF),
    Right("MeetsInAStore,period=3", **OF),
    Right("SkipsUnchanged,period=4", **OF),
    Right("Pairs", "hierarchical(period_group_size_dict={2: 2, 6: 4}), min_world_size(4)", **OF),
    Right("diloco()", "like(DiLoCoModelAverager, period=5)", **OF),
    Right(
        "OuterOptimizer",
        "like(OuterStepModelAverager, period=4, lr=0.5, momentum=0.75)",
        **OF,
    ),
    Right("OverWorld,every=7", "periodic(period=7), world_only", **OF),
    Right("CountsFirst,local_sgd_steps=4", "periodic(period=4, warmup_steps=3)", **OF),
    Right("Scattered,period=250,warmup_steps=100", **OF),
    Right("MovingAverage", "like(EMAModelAverager, decay=0.999)", **OF),
    Right("TrainedAverage", "like(EMAModelAverager, decay=0.999)", **OF),
)
