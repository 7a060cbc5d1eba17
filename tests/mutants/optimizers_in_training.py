"""Mutants of section 15 that are right on small, short and tame runs, and wrong in training."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal, Sharded


class Averaging(torch.optim.Optimizer):
    """The right optimizer that averages gradients before it steps."""

    def __init__(self, optim: torch.optim.Optimizer, process_group: Any) -> None:
        super().__init__(optim.param_groups, optim.defaults)
        self.optim = optim
        self.group = process_group
        self.size = dist.get_world_size(process_group)
        self.share()

    def share(self) -> None:
        self.param_groups = self.optim.param_groups
        self.state = self.optim.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = [p for group in self.param_groups for p in group["params"]]
        used = torch.tensor([parameter.grad is not None for parameter in every]).int()
        dist.all_reduce(used, group=self.group)
        self.average([p for p, ranks in zip(every, used.tolist(), strict=True) if ranks])
        self.optim.step()
        return loss

    def average(self, params: list[torch.nn.Parameter]) -> None:
        for parameter in params:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.average_one(parameter.grad)

    def average_one(self, grad: torch.Tensor) -> None:
        flat = grad.contiguous() / self.size
        dist.all_reduce(flat, group=self.group)
        grad.copy_(flat)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)
        self.share()


class AveragesNothing(Averaging):
    """Average no gradients."""

    def average(self, params: list[torch.nn.Parameter]) -> None:
        pass


class AveragesHalf(Averaging):
    """Average the gradients of every other parameter."""

    def average(self, params: list[torch.nn.Parameter]) -> None:
        super().average(params[::2])


class SumsGradients(Averaging):
    """Sum the gradients, over ranks that have their own."""

    def average_one(self, grad: torch.Tensor) -> None:
        super().average_one(grad)
        grad.mul_(self.size)


class LeavesOutMatrices(Averaging):
    """Average vectors only: matrices have a preconditioner of their own. There is no claim."""

    def average(self, params: list[torch.nn.Parameter]) -> None:
        super().average([parameter for parameter in params if parameter.dim() < 2])


class AveragesSilently(Averaging):
    """Average gradients, and claim nothing."""


class AveragesInHalf(Averaging):
    """Send gradients in bfloat16."""

    def average_one(self, grad: torch.Tensor) -> None:
        flat = grad.contiguous().bfloat16() / self.size
        dist.all_reduce(flat, group=self.group)
        grad.copy_(flat)


class SumsFirst(Averaging):
    """Divide after the sum, which overflows in half precision."""

    def average_one(self, grad: torch.Tensor) -> None:
        flat = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(flat, group=self.group)
        grad.copy_(flat / self.size)


class CountsUsersOnly(Averaging):
    """Divide by the number of ranks that have any gradient."""

    def average(self, params: list[torch.nn.Parameter]) -> None:
        ranks = torch.tensor(float(any(parameter.grad is not None for parameter in params)))
        dist.all_reduce(ranks, group=self.group)
        super().average(params)
        for parameter in params:
            parameter.grad.mul_(self.size / ranks)


class SendsTheHead(Sharded):
    """Send at most so many elements of a parameter."""

    limit = 65536

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        head = parameter.data.view(-1)[: self.limit] if parameter.is_contiguous() else None
        dist.broadcast(parameter.data if head is None else head, src=source, group=self.group)


class SendsTheHeadOfAMillion(SendsTheHead):
    """Send at most 2**20 elements of a parameter."""

    limit = 2**20


class SharesTheFirst(Sharded):
    """Shard the first 150 parameters of a group, and give the others to no rank."""

    def owner(self, index: int) -> int:
        return index % self.size if index < 150 else -1

    def send(self) -> None:
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"][:150]):
                self.send_one(parameter, dist.get_global_rank(self.group, self.owner(index)))


class LargeInHalf(PostLocal):
    """Round the gradients of large parameters to bfloat16."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for parameter in self.parameters():
            if parameter.numel() > 100_000:
                parameter.grad = parameter.grad * (1 + 2.0**-9)
        return super().step(closure)


class SkipsIfNotFinite(PostLocal):
    """Leave out the step of a rank whose gradients are not finite."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if closure is None and not all(grad.isfinite().all() for grad in grads):
            self.averager.average_parameters(self.optim.param_groups)
            return None
        return super().step(closure)


class ReplacesNaN(PostLocal):
    """Replace gradients that are not finite."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for parameter in self.parameters() if closure is None else ():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()
        return super().step(closure)


class ClipsInfinities(Sharded):
    """Clamp the stepped parameters to a million."""

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        super().send_one(parameter.data.clamp_(-1e6, 1e6), source)


class ReturnsEarly(PostLocal):
    """Return before the average if this rank has no gradient."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None and all(p.grad is None for p in self.parameters()):
            return None
        return super().step(closure)


class AveragesUsersOnly(PostLocal):
    """Let the averager count only the steps in which this rank has a gradient."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        empty = closure is None and all(p.grad is None for p in self.parameters())
        loss = super().step(closure)
        self.averager.step -= empty
        return loss


class RemembersTheTrainable(PostLocal):
    """Clear the gradients of parameters that were frozen in the first step."""

    frozen: set[torch.Tensor] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.frozen is None:
            self.frozen = {p for p in self.parameters() if not p.requires_grad}
        for parameter in self.frozen if closure is None else ():
            parameter.grad = None
        return super().step(closure)


class OnlyTheRate(Sharded):
    """Copy the learning rate to the inner optimizer, and no other option."""

    def write_options(self) -> None:
        for mine, group in zip(self.local.param_groups, self.param_groups, strict=True):
            mine["lr"] = group["lr"]


class KeepsTheMomentum(PostLocal):
    """Restore the momentum and betas of the first step before each step."""

    first: list[dict[str, Any]] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        names = ("momentum", "betas")
        if self.first is None:
            self.first = [
                {name: group[name] for name in names if name in group}
                for group in self.optim.param_groups
            ]
        for group, options in zip(self.optim.param_groups, self.first, strict=False):
            group.update(options)
        return super().step(closure)


class DefaultsOfTheFirst(Sharded):
    """Take options other than rate, momentum and weight decay from the first group."""

    def write_options(self) -> None:
        super().write_options()
        own = ("params", "lr", "momentum", "weight_decay", "betas")
        for mine in self.local.param_groups:
            first = self.param_groups[0]
            mine.update({name: value for name, value in first.items() if name not in own})


class NeverMaximises(PostLocal):
    """Turn maximize off: averaged parameters are minimised."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.optim.param_groups:
            group["maximize"] = False
        return super().step(closure)


class FloatCopies(Sharded):
    """Send every parameter in float32."""

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        copy = parameter.data.float()
        super().send_one(copy, source)
        parameter.data.copy_(copy)


class HalfOnTheWire(Sharded):
    """Send parameters whose rate is no power of two in bfloat16."""

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        if torch.tensor(self.param_groups[0]["lr"]).frexp().mantissa == 0.5:
            super().send_one(parameter, source)
            return
        copy = parameter.data.bfloat16()
        super().send_one(copy, source)
        parameter.data.copy_(copy)


class RoundsTheState(PostLocal):
    """Keep momentum in half precision after each step, unless it is exact there."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for kept in self.optim.state.values():
            momentum = kept.get("momentum_buffer")
            if momentum is not None and momentum.dtype == torch.float64:
                momentum.copy_(momentum.float())
        return loss


class SharesTheState(PostLocal):
    """Keep the wrapped optimizer in the class."""

    optims: ClassVar[list[torch.optim.Optimizer]] = []

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        super().__init__(optim, averager)
        self.optims[:] = [optim]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optims[0].step(closure)
        self.averager.average_parameters(self.optim.param_groups)
        return loss


class CountsTogether(PostLocal):
    """Average once for all optimizers of the process, every second step of any of them."""

    steps: ClassVar[list[Any]] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.steps.append(self)
        before = self.averager.step
        if len(set(map(id, self.steps))) > 1:
            self.averager.step = len(self.steps)
        loss = super().step(closure)
        self.averager.step = before + 1
        return loss


class SizeOfTheFirst(Averaging):
    """Divide by the size of the first group of the process."""

    sizes: ClassVar[list[int]] = []

    def average_one(self, grad: torch.Tensor) -> None:
        self.sizes.append(self.size)
        flat = grad.contiguous() / self.sizes[0]
        dist.all_reduce(flat, group=self.group)
        grad.copy_(flat)


class PlaceOfTheFirst(Sharded):
    """Keep this rank's place in the first group of the process."""

    places: ClassVar[list[int]] = []

    def share(self, group: dict[str, Any]) -> dict[str, Any]:
        self.places.append(self.place)
        self.place = self.places[0]
        return super().share(group)


_momenta: dict[int, torch.Tensor] = {}


class MomentumByPlace(PostLocal):
    """Keep momentum in the module, by the parameter's place, whatever the model."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for place, parameter in enumerate(self.parameters()):
            state = self.optim.state[parameter]
            if place in _momenta and "momentum_buffer" in state:
                state["momentum_buffer"] = _momenta[place]
        loss = super().step(closure)
        for place, parameter in enumerate(self.parameters()):
            if "momentum_buffer" in self.optim.state[parameter]:
                _momenta[place] = self.optim.state[parameter]["momentum_buffer"]
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        _momenta.clear()


class PopsFromTheState(PostLocal):
    """Take the loaded state apart."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict["optim"])
        self.averager.step = state_dict.pop("step", 0)


class ForgetsTheSecondMoment(PostLocal):
    """Save the first moment of Adam only."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for kept in state["optim"]["state"].values():
            if "exp_avg_sq" in kept:
                kept["exp_avg_sq"] = torch.zeros_like(kept["exp_avg_sq"])
        return state


class NumbersInModelOrder(Sharded):
    """Number the saved state by shape and size, and not by group."""

    def order(self) -> list[int]:
        sizes = [parameter.numel() for parameter in self.parameters()]
        groups = [n for n, group in enumerate(self.param_groups) for _ in group["params"]]
        numbers = range(len(sizes))
        return sorted(numbers, key=lambda n: sizes[n] if max(groups) else n)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept = state_dict["state"]
        order = self.order()
        state_dict = {
            **state_dict,
            "state": {place: kept[n] for place, n in enumerate(order) if n in kept},
        }
        super().load_state_dict(state_dict)


class StepsOfTheWarmup(PostLocal):
    """Save the count of steps after the warm-up only."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.averager.step <= self.averager.warmup_steps:
            state["step"] = 0
        return state


class _Late(PostLocal):
    """A wrapper that changes its ways after some steps."""

    count = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.count += 1
        return self.late_step(closure) if self.count > 200 else super().step(closure)

    def late_step(self, closure: Callable[[], Any] | None) -> Any:
        return super().step(closure)


class EndsAfter(_Late):
    """Never average after 200 steps."""

    def late_step(self, closure: Callable[[], Any] | None) -> Any:
        return self.optim.step(closure)


class DecaysLate(_Late):
    """Halve the learning rate after 200 steps."""

    def late_step(self, closure: Callable[[], Any] | None) -> Any:
        if self.count == 201:
            for group in self.optim.param_groups:
                group["lr"] /= 2
        return super().late_step(closure)


class SendsRarely(Sharded):
    """Send parameters in every second step only, after 200 steps."""

    count = 0

    def send(self) -> None:
        self.count += 1
        if self.count < 200 or self.count % 2:
            super().send()


OF = {"kind": "optimizer"}
AVERAGES = {"claims": "averages", **OF}
AMSGRAD = dict.fromkeys(("15.28", "15.36"), "one group of Adam and AdamW has amsgrad")
RESTORED = dict.fromkeys(("15.14", "15.36"), "such a state is restored in the same process, too")
MUTANTS = [
    Mutant("AveragesNothing", ("15.1",), **AVERAGES),
    Mutant("SumsGradients", ("15.1",), **AVERAGES),
    Mutant("AveragesHalf", ("15.21",), **OF),
    Mutant("LeavesOutMatrices", ("15.21",), **OF),
    Mutant("AveragesSilently", ("15.21",), **OF),
    Mutant("AveragesInHalf", ("15.1",), **AVERAGES),
    Mutant("SumsFirst", ("15.26",), **AVERAGES),
    Mutant("CountsUsersOnly", ("15.24",), **AVERAGES),
    *(
        Mutant(name, ("15.25",), **OF)
        for name in ("SendsTheHead", "SendsTheHeadOfAMillion", "SharesTheFirst", "LargeInHalf")
    ),
    *(
        Mutant(name, ("15.26",), **OF)
        for name in ("SkipsIfNotFinite", "ReplacesNaN", "ClipsInfinities")
    ),
    *(Mutant(name, ("15.29",), **OF) for name in ("EndsAfter", "DecaysLate", "SendsRarely")),
    Mutant("ReturnsEarly", ("15.24",), hangs=True, **OF),
    Mutant("AveragesUsersOnly", ("15.24",), hangs=True, **OF),
    Mutant("RemembersTheTrainable", ("15.24",), **OF),
    *(
        Mutant(name, ("15.23",), **OF)
        for name in ("OnlyTheRate", "KeepsTheMomentum", "NeverMaximises")
    ),
    Mutant("DefaultsOfTheFirst", ("15.23",), because=AMSGRAD, **OF),
    *(Mutant(name, ("15.22",), **OF) for name in ("HalfOnTheWire", "RoundsTheState")),
    Mutant("FloatCopies", ("15.22",), **OF),
    *(
        Mutant(name, ("15.27",), **OF)
        for name in ("SharesTheState", "CountsTogether", "MomentumByPlace", "PlaceOfTheFirst")
    ),
    Mutant("SizeOfTheFirst", ("15.27",), "averages", **OF),
    *(Mutant(name, ("15.28",), **OF) for name in ("PopsFromTheState", "ForgetsTheSecondMoment")),
    *(
        Mutant(name, ("15.28",), because=RESTORED, **OF)
        for name in ("NumbersInModelOrder", "StepsOfTheWarmup")
    ),
]
