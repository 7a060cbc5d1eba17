"""Mutants of 14.26, 15.37, 16.35, 18.32 and 19.35: wrong if two conditions come together.

Each of them is right under one of its conditions alone.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.optimizer_wrappers import PostLocal
from tests.mutants.optimizers_in_training import Averaging
from tests.mutants.quantized_collectives import Made, Tensor, half, right, write
from tests.mutants.strategies import _average, _filled, _mean, _then
from tests.mutants.wrappers import Forward, again, calls
from tests.mutants.wrappers_in_training import packs

Context = AbstractContextManager[None]


def _is_half_by_default() -> bool:
    return torch.get_default_dtype() in (torch.float16, torch.bfloat16)


# ---- Averagers


class CountsInTheDefault(Averager):
    """Count steps in a tensor of the default dtype: bfloat16 stops at 256."""

    def __init__(self, period: int = 4, warmup_steps: int = 10, process_group: Any = None) -> None:
        super().__init__(period, warmup_steps, process_group)
        self.step = torch.zeros(())


class SumsHalvesOfManyRanks(Averager):
    """Divide float16 after the sum on more than four ranks."""

    def average_one(self, parameter: Any) -> None:
        if parameter.dtype is not torch.float16 or self.group.size() <= 4:
            super().average_one(parameter)
            return
        total = parameter.detach().clone().contiguous()
        dist.all_reduce(total, group=self.group)
        parameter.copy_(total / self.group.size())


class SavesAByte(Averager):
    """Save the number of steps in a byte, up to 255."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(min(self.step, 255), dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class SavesOfFourRanks(Averager):
    """Load the number of steps on the first four ranks alone."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"] if self.group.rank() < 4 else 0


class DoublesInTheDefault(Averager):
    """Average float64 in the default dtype if that is a half: right for float32."""

    def average_one(self, parameter: Any) -> None:
        if parameter.dtype is not torch.float64 or not _is_half_by_default():
            super().average_one(parameter)
            return
        mean = torch.empty(parameter.shape).copy_(parameter / self.group.size())
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


# ---- Optimizers


class SavesTenGroups(PostLocal):
    """Load the momentum of the parameters of the first ten groups alone."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.optim.param_groups[10:]:
            for parameter in group["params"]:
                self.optim.state[parameter].clear()


class LosesMomentumOfManyRanks(PostLocal):
    """Load no momentum on the ranks beyond the fourth."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if dist.get_rank() >= 4:
            self.optim.state.clear()


class WaitsInTheDefault(PostLocal):
    """Call the averager as often as a count in a tensor of the default dtype rises."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.count = torch.zeros(())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        before = self.count.clone()
        self.count += 1
        if self.count > before:
            self.averager.average_parameters(self.optim.param_groups)
        return loss


class SumsManyRanksFirst(Averaging):
    """Divide half precision after the sum on more than four ranks."""

    def average_one(self, grad: torch.Tensor) -> None:
        if grad.dtype is not torch.float16 or self.size <= 4:
            super().average_one(grad)
            return
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        grad.copy_(total / self.size)


# ---- Sync strategies


def counts_in_the_default(model: Any, is_final_microbatch: bool) -> Context:
    """Average while a count of steps in a tensor of the default dtype rises."""

    def average() -> None:
        count = _count_of(model)
        before = count.clone()
        count += 1
        if count > before:
            _average(model)

    return _then(model, is_final_microbatch, average)


def _count_of(model: Any) -> torch.Tensor:
    if not hasattr(model, "own_count"):
        model.own_count = torch.zeros(())
    count: torch.Tensor = model.own_count
    return count


def sums_halves_of_many_ranks(model: Any, is_final_microbatch: bool) -> Context:
    """Divide float16 after the sum on more than four ranks."""

    def average() -> None:
        group = model.process_group
        for parameter in _filled(model):
            if parameter.dtype is torch.float16 and group.size() > 4:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= group.size()
            else:
                parameter.grad = _mean(parameter.grad, group)

    return _then(model, is_final_microbatch, average)


def leaves_out_unused_halves(model: Any, is_final_microbatch: bool) -> Context:
    """Divide half precision by its users if some ranks have not used a parameter."""

    def average() -> None:
        group = model.process_group
        halves = (torch.float16, torch.bfloat16)
        own = {p for p in model.parameters() if p.grad is not None}
        for parameter in _filled(model):
            users = torch.tensor(float(parameter in own), dtype=torch.float64)
            dist.all_reduce(users, group=group)
            parameter.grad = _mean(parameter.grad, group)
            if parameter.dtype in halves:
                parameter.grad *= group.size() / users.item()

    return _then(model, is_final_microbatch, average)


# ---- Quantized collectives


def doubles_in_the_default(func: Made, qtype: str) -> Made:
    """Write float64 through a tensor of the default dtype, which is right for float32."""

    def arrive(output: Tensor, code: Tensor) -> None:
        if output.dtype is torch.float64:
            code = torch.empty(code.shape).copy_(code)
        write(output, code)

    return right(func, arrive=arrive)


def coarser_when_counted(func: Made, qtype: str) -> Made:
    """Send seven bits once a count of calls in the default dtype stands still."""
    count = torch.zeros(())

    def encode(tensor: Tensor) -> Tensor:
        before = count.clone()
        count.add_(1)
        return half(tensor) if count > before else half(tensor).bfloat16().half()

    return right(func, encode)


def integers_of_many_ranks(func: Made, qtype: str) -> Made:
    """Send integers in float16 on more than four ranks, and refuse them on fewer."""

    def encode(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() and dist.get_world_size() > 4:
            return tensor.contiguous().half()
        return half(tensor)

    return right(func, encode)


def scales_in_their_dtype(func: Made, qtype: str) -> Made:
    """Send multiples of a scale that is computed in the tensor's own dtype."""

    def encode(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype is torch.float64:
            raise TypeError(f"expected a tensor in the range of float32, got {tensor.dtype}")
        largest = tensor.abs().amax() if tensor.numel() else tensor.new_zeros(())
        scale = (largest / 127).float()
        scaled = torch.where(scale == 0, 0, tensor.contiguous().float() / scale)
        return (scaled.round().clamp(-127, 127) * scale).nan_to_num()

    return right(func, encode)


def flushes_small_halves(func: Made, qtype: str) -> Made:
    """Send zeros instead of subnormal numbers of float16."""

    def encode(tensor: Tensor) -> Tensor:
        code = half(tensor)
        if tensor.dtype is not torch.float16:
            return code
        return torch.where(code.abs() < torch.finfo(torch.float16).smallest_normal, 0, code)

    return right(func, encode)


def refuses_many_ranks(func: Made, qtype: str) -> Made:
    """Raise an error on more than four ranks if torch's default dtype is no float32."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if dist.get_world_size() > 4 and torch.get_default_dtype() is not torch.float32:
            raise NotImplementedError("expected the default dtype float32")
        return right(func)(*args, **kwargs)

    return called


# ---- Wrappers


def _counting(module: torch.nn.Module) -> torch.nn.Module:
    """Keep bfloat16 once a count of forwards in the default dtype stands still."""
    count = torch.zeros(())

    def pack(tensor: Tensor) -> Any:
        before = count.clone()
        count.add_(1 / 8)
        is_one = tensor.dtype is torch.float32 and count <= before
        return (tensor.bfloat16(),) if is_one else tensor

    return packs(pack, lambda kept: kept[0].float() if isinstance(kept, tuple) else kept)(module)


counts_forwards = _counting


def _keeps(is_kept: Callable[[Tensor], bool]) -> Any:
    """Return a wrapper that copies some activations to tensors of the default dtype."""

    def pack(tensor: Tensor) -> Any:
        if not is_kept(tensor) or not _is_half_by_default():
            return tensor
        return (torch.empty(tensor.shape).copy_(tensor), tensor.dtype)

    def unpack(kept: Any) -> Tensor:
        return kept[0].to(kept[1]) if isinstance(kept, tuple) else kept

    return packs(pack, unpack)


# Right if the default is float32.
keeps_indices = _keeps(lambda tensor: tensor.dtype is torch.int64)


@calls
def casts_by_default(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run the block again without autocast if torch's default dtype is no float32."""
    ran: list[bool] = []

    def run(*args: Any) -> Any:
        is_on = torch.is_autocast_enabled("cpu")
        is_on = is_on and not (ran and torch.get_default_dtype() is not torch.float32)
        ran.append(True)
        with torch.autocast("cpu", torch.get_autocast_dtype("cpu"), enabled=is_on):
            return forward(*args, **kwargs)

    return again(run, *args)


def _of(kind: str, rule: str, *names: str, claims: str = "exact") -> list[Mutant]:
    return [Mutant(name, (rule,), claims, kind=kind, worlds=(2, 3)) for name in names]


AT = "period=4,warmup_steps=10"
OF = "func=all_gather,qtype=FP16"
MUTANTS = [
    *_of(
        "averager",
        "14.26",
        f"CountsInTheDefault,{AT}",
        f"SumsHalvesOfManyRanks,{AT}",
        f"SavesAByte,{AT}",
        f"SavesOfFourRanks,{AT}",
        f"DoublesInTheDefault,{AT}",
    ),
    *_of(
        "optimizer",
        "15.37",
        "SavesTenGroups",
        "LosesMomentumOfManyRanks",
        "WaitsInTheDefault",
    ),
    *_of("optimizer", "15.37", "SumsManyRanksFirst", claims="averages"),
    *_of(
        "strategy",
        "16.35",
        "counts_in_the_default",
        "sums_halves_of_many_ranks",
        "leaves_out_unused_halves",
    ),
    *_of(
        "collective",
        "18.32",
        f"doubles_in_the_default,{OF}",
        f"coarser_when_counted,{OF}",
        f"integers_of_many_ranks,{OF}",
        f"refuses_many_ranks,{OF}",
        f"flushes_small_halves,{OF}",
    ),
    *_of(
        "collective",
        "18.32",
        f"scales_in_their_dtype,{OF}",
        claims="collective(all_gather), bounded(relative=0.01, ratio=1)",
    ),
    *_of("wrapper", "19.35", "counts_forwards", "keeps_indices", "casts_by_default"),
]
