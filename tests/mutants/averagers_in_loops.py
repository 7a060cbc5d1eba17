"""Mutants of section 14 that are wrong for large float16, in memory or loops of another kind."""

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.averagers_like import DiLoCo, Ema

# ---- Large parameters of float16


class SumsLargeHalves(Averager):
    """Divide float16 after the sum from so many elements on."""

    def __init__(self, period=4, warmup_steps=10, process_group=None, least=60_000):
        super().__init__(period, warmup_steps, process_group)
        self.least = least

    def average_one(self, parameter):
        if parameter.dtype is not torch.float16 or parameter.numel() < self.least:
            super().average_one(parameter)
            return
        dist.all_reduce(parameter.data, group=self.group)
        parameter.div_(self.group.size())


class ScattersLargeHalves(Averager):
    """Let each rank sum and divide a share of a large parameter of float16, in this order."""

    def average_one(self, parameter):
        size = self.group.size()
        if parameter.dtype is not torch.float16 or parameter.numel() < 2**20:
            super().average_one(parameter)
            return
        flat = parameter.new_zeros(-(-parameter.numel() // size) * size)
        flat[: parameter.numel()] = parameter.detach().reshape(-1)
        mine = flat.new_empty(len(flat) // size)
        dist.reduce_scatter_tensor(mine, flat, group=self.group)
        dist.all_gather_into_tensor(flat, mine / size, group=self.group)
        parameter.copy_(flat[: parameter.numel()].view(parameter.shape))


class EmaSumsLargeHalves(Ema):
    """Sum large parameters in their own dtype, and divide in float32."""

    def _update(self, params):
        means = []
        for parameter in params:
            is_large = parameter.numel() >= 2**20
            dtype = parameter.dtype if is_large else self._dtype(parameter)
            total = parameter.detach().to(dtype, copy=True).contiguous()
            dist.all_reduce(total, group=self.group)
            means.append(total.to(self._dtype(parameter)) / self.group.size())
        self.keep(means)


class DiLoCoSumsHalves(DiLoCo):
    """Sum parameters of float16 in this dtype if they are large."""

    def mean(self, parameter):
        if parameter.dtype is not torch.float16 or parameter.numel() < 50_000:
            return super().mean(parameter)
        total = parameter.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total.double() / self.group.size()


# ---- Views of a flat buffer


class OncePerStorage(Averager):
    """Take parameters that share their storage for tied weights, and average the first of them."""

    def chosen(self, params):
        first = {}
        for parameter in super().chosen(params):
            first.setdefault(parameter.untyped_storage().data_ptr(), parameter)
        return list(first.values())


class OncePerShape(Averager):
    """Take parameters of one shape in one storage for tied weights."""

    def chosen(self, params):
        first = {}
        for parameter in super().chosen(params):
            storage = parameter.untyped_storage().data_ptr()
            first.setdefault((storage, parameter.shape, parameter.dtype), parameter)
        return list(first.values())


class OncePerPlace(Averager):
    """Take parameters that begin at one place of one storage for tied weights, also empty ones."""

    def chosen(self, params):
        found = []
        places = set()
        for parameter in super().chosen(params):
            place = parameter.untyped_storage().data_ptr(), parameter.storage_offset()
            if place not in places:
                found.append(parameter)
            places.add(place)
        return found


class LatestOfAPlace(Averager):
    """Average the last of the parameters that begin at one place of one storage."""

    def chosen(self, params):
        places = {
            (parameter.untyped_storage().data_ptr(), parameter.storage_offset()): parameter
            for parameter in super().chosen(params)
        }
        return list(places.values())


class WholeStorages(Averager):
    """Average the storage that a parameter lies in, once, with all that lies beside it."""

    def average(self, params):
        storages = {}
        for parameter in params:
            storage = parameter.untyped_storage()
            whole = torch.empty(0, dtype=parameter.dtype).set_(storage)
            storages.setdefault(storage.data_ptr(), whole)
        for whole in storages.values():
            super().average_one(whole)


class FromTheBeginning(Averager):
    """Write the mean to the beginning of the parameter's storage."""

    def average_one(self, parameter):
        if not parameter.is_contiguous():
            super().average_one(parameter)
            return
        mean = parameter.div(self.group.size())
        dist.all_reduce(mean, group=self.group)
        begin = torch.empty(0, dtype=parameter.dtype)
        begin.set_(parameter.untyped_storage(), 0, parameter.shape).copy_(mean)


# ---- A state that is loaded again


class CountsDown(Averager):
    """Count down to the next average, which a fresh object computes from the loaded count."""

    left: int | None = None

    def is_due(self):
        if self.left is None:
            later = self.step - self.warmup_steps
            self.left = -later if later < 0 else -later % self.period
        self.left -= 1
        if self.left >= 0:
            return False
        self.left = self.period - 1
        return True

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, saved):
        self.step = saved["step"]


class TakesTheLatest(Averager):
    """Never go back: take the larger of two counts of steps."""

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, saved):
        self.step = max(self.step, saved["step"])


class DiLoCoKeepsItsMomentum(DiLoCo):
    """Load momentum only if there is none."""

    def load_state_dict(self, saved):
        velocity = self.velocity
        super().load_state_dict(saved)
        self.velocity = velocity or self.velocity


class EmaLoadsOnce(Ema):
    """Keep the average if there is one, and load the count alone."""

    def load_state_dict(self, saved):
        average = self.average
        super().load_state_dict(saved)
        self.average = average or self.average


# ---- Autocast


class OnesTimesRanks(Averager):
    """Gather the parameters of all ranks, and sum the rows of float32 by a matrix product."""

    def average_one(self, parameter):
        if parameter.dtype is not torch.float32 or not parameter.numel():
            super().average_one(parameter)
            return
        size = self.group.size()
        mine = parameter.detach().reshape(-1)
        rows = mine.new_empty(size, len(mine))
        dist.all_gather(list(rows), mine.contiguous(), group=self.group)
        total = torch.ones(1, size) @ rows
        parameter.copy_((total / size).view(parameter.shape))


class LinearForLarge(Averager):
    """Scale large parameters of float32 by a linear layer of one weight."""

    def average_one(self, parameter):
        super().average_one(parameter)
        if parameter.dtype is torch.float32 and parameter.numel() > 900:
            column = parameter.reshape(-1, 1)
            scaled = torch.nn.functional.linear(column, torch.ones(1, 1))
            parameter.copy_(scaled.view(parameter.shape))


class ProductsOfLarge(Averager):
    """Average float32 of more than a number of elements by the product with a matrix of shares."""

    def __init__(self, period=4, warmup_steps=10, process_group=None, beyond=150_000):
        super().__init__(period, warmup_steps, process_group)
        self.beyond = beyond

    def average_one(self, parameter):
        if parameter.dtype is not torch.float32 or parameter.numel() <= self.beyond:
            super().average_one(parameter)
            return
        size = self.group.size()
        whole = parameter.detach().reshape(-1, 1)
        shares = torch.full((1, 1), 1 / size, dtype=torch.float32)
        mean = torch.mm(whole, shares).to(parameter.dtype)
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean.view(parameter.shape))


class EmaByEinsum(Ema):
    """Weigh the average and the mean by an inner product."""

    def moved(self, average, mean):
        weights = torch.tensor([self.decay, 1 - self.decay], dtype=mean.dtype)
        both = torch.stack([average.reshape(-1), mean.reshape(-1)])
        return torch.einsum("w,wn->n", weights, both).to(mean.dtype).view(mean.shape)


OF = {"kind": "averager"}
AT = "period=4,warmup_steps=10"
EMA = {"claims": "like(EMAModelAverager, decay=0.999)", **OF}
DILOCO = {"claims": "like(DiLoCoModelAverager, period=4)", **OF}
MUTANTS = [
    *(
        Mutant(f"{name},{AT}", ("14.16",), **OF)
        for name in ("SumsLargeHalves", f"SumsLargeHalves,least={10**6}", "ScattersLargeHalves")
    ),
    Mutant("EmaSumsLargeHalves", ("14.16",), **EMA),
    Mutant("DiLoCoSumsHalves", ("14.16",), **DILOCO),
    *(
        Mutant(f"{name},{AT}", ("14.7",), **OF)
        for name in ("OncePerStorage", "OncePerShape", "WholeStorages", "FromTheBeginning")
    ),
    *(Mutant(f"{name},{AT}", ("14.7",), **OF) for name in ("OncePerPlace", "LatestOfAPlace")),
    Mutant(f"CountsDown,{AT}", ("14.19",), **OF),
    Mutant(f"TakesTheLatest,{AT}", ("14.19",), **OF),
    Mutant("DiLoCoKeepsItsMomentum", ("14.19",), **DILOCO),
    Mutant("EmaLoadsOnce", ("14.19",), **EMA),
    *(Mutant(f"{name},{AT}", ("14.25",), **OF) for name in ("OnesTimesRanks", "LinearForLarge")),
    Mutant("EmaByEinsum", ("14.25",), **EMA),
    *(
        Mutant(f"ProductsOfLarge,{AT},beyond={beyond}", ("14.25",), **OF)
        for beyond in (150_000, 2**20)
    ),
]
