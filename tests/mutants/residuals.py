"""Mutants whose residuals are lost with DDP's unused parameters, or keep an old loss scale."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, finite, group_of, is_dense, sum_of

CLAIMS = "compressed(delta=0.25), keeps_unused, rescaled(call=rescale)"


class Residuals:
    """Half of the elements, the largest, with feedback by parameter; right but for its subclass.

    Args:
        process_group: the group to average over.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.group = group_of(process_group)
        self.kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def rescale(self, factor: float) -> None:
        """Multiply all residuals by the factor of the loss scale."""
        for residual in self.kept.values():
            residual.mul_(factor)

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        """Return for each part whether no rank has used its parameter."""
        used = torch.tensor([float(part.any()) for part in parts])
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.group)
        return [not flag for flag in used.tolist()]

    def keep(self, parameter: torch.nn.Parameter, residual: torch.Tensor) -> None:
        """Keep a parameter's residual for the next step."""
        self.kept[parameter] = finite(residual)


def halves_with_feedback(state: Residuals, bucket: Bucket) -> Result:
    """Send the larger half of the elements of each parameter, with feedback."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        return average(bucket, state.group)
    parts = list(bucket.buffer().split([p.numel() for p in bucket.parameters()]))
    unused = state.is_unused(parts)
    for parameter, part, is_unused in zip(bucket.parameters(), parts, unused, strict=True):
        value = part + state.kept[parameter] if parameter in state.kept else part.clone()
        if is_unused:
            part.zero_()
            continue
        sent = torch.zeros_like(value)
        largest = value.abs().topk((value.numel() + 1) // 2).indices
        sent[largest] = value[largest]
        state.keep(parameter, value - sent)
        part.copy_(sent)
    return sum_of(bucket.buffer().div_(state.group.size()), state.group)


# 11.5 Unused parameters


class NeverUnused(Residuals):
    """Takes every parameter for a used one, as most published hooks do."""

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        return [False] * len(parts)


def loses_unused(state: Any, bucket: Bucket) -> Result:
    """Send the residual of a parameter that no rank has used, which DDP drops."""
    return halves_with_feedback(state, bucket)


class UnusedBuckets(Residuals):
    """Looks at whole buckets only, which one bucket for all parameters hides."""

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        used = torch.tensor([float(any(bool(part.any()) for part in parts))])
        dist.all_reduce(used, op=dist.ReduceOp.MIN, group=self.group)
        return [not used.item()] * len(parts)


def keeps_if_one_rank_did_not(state: Any, bucket: Bucket) -> Result:
    """Drop the gradients of a bucket that a single rank has not used."""
    return halves_with_feedback(state, bucket)


class ForgetsUnused(Residuals):
    """Forgets the residual of a parameter that no rank has used: it is taken for stale."""

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        unused = super().is_unused(parts)
        self.stale = unused
        return unused


def forgets_unused(state: Any, bucket: Bucket) -> Result:
    """Drop the residual of an expert that rests for a step."""
    result = halves_with_feedback(state, bucket)
    if is_dense(bucket) and not bucket.parameters()[0].is_complex():
        for parameter, is_stale in zip(bucket.parameters(), state.stale, strict=True):
            if is_stale:
                state.kept.pop(parameter, None)
    return result


# 11.6 The loss scale


class IgnoresScale(Residuals):
    """Has the call, and does nothing in it."""

    def rescale(self, factor: float) -> None:
        self.factor = factor


def ignores_scale(state: Any, bucket: Bucket) -> Result:
    """Keep residuals in units of the old loss scale, as most published hooks do."""
    return halves_with_feedback(state, bucket)


class Divides(Residuals):
    """Divides by the factor."""

    def rescale(self, factor: float) -> None:
        super().rescale(1 / factor)


def rescales_the_wrong_way(state: Any, bucket: Bucket) -> Result:
    """Divide residuals by the factor of the loss scale."""
    return halves_with_feedback(state, bucket)


class SmallOnly(Residuals):
    """Rescales the residuals of up to so many elements; others are kept elsewhere, and forgotten.

    Args:
        limit: the number of elements.
    """

    def __init__(self, process_group: Any = None, limit: int = 1 << 16) -> None:
        super().__init__(process_group)
        self.limit = limit

    def rescale(self, factor: float) -> None:
        for kept in self.kept.values():
            if kept.numel() <= self.limit:
                kept.mul_(factor)


def rescales_small_ones(state: Any, bucket: Bucket) -> Result:
    """Leave the residuals of large parameters in units of the old loss scale."""
    return halves_with_feedback(state, bucket)


class OnlyGrows(Residuals):
    """Rescales when the loss scale grows only."""

    def rescale(self, factor: float) -> None:
        if factor > 1:
            super().rescale(factor)


def ignores_overflows(state: Any, bucket: Bucket) -> Result:
    """Rescale residuals when the loss scale grows, and not when an overflow lowers it."""
    return halves_with_feedback(state, bucket)


class FirstOnly(Residuals):
    """Rescales the residual that it has kept first."""

    def rescale(self, factor: float) -> None:
        for residual in list(self.kept.values())[:1]:
            residual.mul_(factor)


def rescales_one(state: Any, bucket: Bucket) -> Result:
    """Rescale the residual of one parameter."""
    return halves_with_feedback(state, bucket)


class _Later(Residuals):
    """Note factors, and multiply a residual by what was noted when it is needed; right."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        self.noted: dict[torch.nn.Parameter, float] = {}

    def rescale(self, factor: float) -> None:
        for parameter in self.kept:
            self.note(parameter, factor)

    def note(self, parameter: torch.nn.Parameter, factor: float) -> None:
        """Note a factor for a parameter."""
        self.noted[parameter] = self.noted.get(parameter, 1.0) * factor

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        """Multiply all residuals first."""
        for parameter, factor in self.noted.items():
            self.kept[parameter].mul_(factor)
        self.noted.clear()
        return super().is_unused(parts)


class KeepsTheLast(_Later):
    """Notes the factor of the last call alone."""

    def note(self, parameter: torch.nn.Parameter, factor: float) -> None:
        self.noted[parameter] = factor


class KeepsTheFirst(_Later):
    """Notes the factor of the first call alone, as one step has one factor."""

    def note(self, parameter: torch.nn.Parameter, factor: float) -> None:
        self.noted.setdefault(parameter, factor)


def keeps_one_factor(state: Any, bucket: Bucket) -> Result:
    """Multiply residuals by one of the factors since the last step."""
    return halves_with_feedback(state, bucket)


class _AtUse(_Later):
    """Notes factors for the parameters of each bucket."""

    in_bucket: list[torch.nn.Parameter]


class LosesAtRest(_AtUse):
    """Multiplies residuals when they are sent, and forgets factors after each step."""

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        unused = Residuals.is_unused(self, parts)
        for parameter, is_resting in zip(self.in_bucket, unused, strict=True):
            factor = self.noted.pop(parameter, 1.0)
            if parameter in self.kept and not is_resting:
                self.kept[parameter].mul_(factor)
        return unused


class RescalesTheLatest(_AtUse):
    """Rescales the residuals of the parameters that the last step used."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        self.latest: dict[torch.nn.Parameter, bool] = {}

    def rescale(self, factor: float) -> None:
        for parameter, residual in self.kept.items():
            if self.latest.get(parameter):
                residual.mul_(factor)

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        unused = Residuals.is_unused(self, parts)
        self.latest |= {p: not rests for p, rests in zip(self.in_bucket, unused, strict=True)}
        return unused


class ScaleOfTheBucket(_AtUse):
    """Keeps the scale of each residual, and takes that of the bucket's last step for it."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        self.scale = 1.0
        self.scales: dict[torch.nn.Parameter, float] = {}

    def rescale(self, factor: float) -> None:
        self.scale *= factor

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        unused = Residuals.is_unused(self, parts)
        for parameter, is_resting in zip(self.in_bucket, unused, strict=True):
            if parameter in self.kept and not is_resting:
                self.kept[parameter].mul_(self.scale / self.scales[parameter])
            self.scales[parameter] = self.scale
        return unused


def forgets_the_factor_of_an_expert(state: Any, bucket: Bucket) -> Result:
    """Leave the residual of a parameter that rests in units of the old loss scale."""
    state.in_bucket = bucket.parameters()
    return halves_with_feedback(state, bucket)


class RescalesSingles(_AtUse):
    """Rescales the residuals of buckets of one parameter; those of several are flat tensors, which
    are kept elsewhere."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        self.buckets: dict[torch.nn.Parameter, list[torch.nn.Parameter]] = {}

    def rescale(self, factor: float) -> None:
        for parameter, residual in self.kept.items():
            if self.is_rescaled(parameter):
                residual.mul_(factor)

    def is_rescaled(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a parameter is alone in its bucket."""
        return len(self.buckets[parameter]) == 1

    def is_unused(self, parts: list[torch.Tensor]) -> list[bool]:
        self.buckets |= dict.fromkeys(self.in_bucket, self.in_bucket)
        return Residuals.is_unused(self, parts)


class RescalesTheFirst(RescalesSingles):
    """Rescales the first part of each bucket's residual."""

    def is_rescaled(self, parameter: torch.nn.Parameter) -> bool:
        return self.buckets[parameter][0] is parameter


def rescales_a_part(state: Any, bucket: Bucket) -> Result:
    """Leave residuals of buckets of several parameters in units of the old loss scale."""
    state.in_bucket = bucket.parameters()
    return halves_with_feedback(state, bucket)


class Clamps(Residuals):
    """Clamps the factor to a quarter and four."""

    def rescale(self, factor: float) -> None:
        super().rescale(min(max(factor, 0.25), 4.0))


def clamps_factor(state: Any, bucket: Bucket) -> Result:
    """Take a factor beyond four for an error of the caller."""
    return halves_with_feedback(state, bucket)


class RescalesACopy(Residuals):
    """Rescales copies of the residuals."""

    def rescale(self, factor: float) -> None:
        for residual in self.kept.values():
            residual = residual * factor


def rescales_a_copy(state: Any, bucket: Bucket) -> Result:
    """Rescale copies of the residuals, and keep the old ones."""
    return halves_with_feedback(state, bucket)


class Estimates(Residuals):
    """EF21 that rescales its own estimate, and not that of the mean."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        self.mean: dict[torch.nn.Parameter, torch.Tensor] = {}


def estimate_of_mean_stays(state: Any, bucket: Bucket, *, rests: bool = False) -> Result:
    """Keep the estimate of the mean in units of the old loss scale.

    Args:
        rests: send no change of a parameter that this rank has not used.
    """
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        return average(bucket, state.group)
    parts = list(bucket.buffer().split([p.numel() for p in bucket.parameters()]))
    for parameter, part in zip(bucket.parameters(), parts, strict=True):
        estimate = state.kept.setdefault(parameter, torch.zeros_like(part))
        change = part - estimate
        if rests and not part.any():
            change.zero_()
        sent = torch.zeros_like(change)
        largest = change.abs().topk((change.numel() + 1) // 2).indices
        sent[largest] = change[largest]
        estimate.add_(sent).nan_to_num_(0, 0, 0)
        part.copy_(sent)
    result = sum_of(bucket.buffer().div_(state.group.size()), state.group)

    def add(future: torch.futures.Future) -> torch.Tensor:
        future.value()
        for parameter, part in zip(bucket.parameters(), parts, strict=True):
            mean = state.mean.setdefault(parameter, torch.zeros_like(part)).add_(part)
            part.copy_(mean)
            mean.nan_to_num_(0, 0, 0)
        return bucket.buffer()

    return result.then(add)


def _mutant(name: str, rule: str, state: str, claims: str = CLAIMS) -> Mutant:
    return Mutant(name, (rule,), claims, state=f"{__name__}:{state}")


class OfLastForward(Residuals):
    """Note the parameters of the last forward alone: one that only an earlier micro-batch of the
    step has used counts as unused, and its gradient is thrown away.

    Args:
        process_group: the group to average over.
        model: the model under DDP.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, model: torch.nn.Module) -> None:
        super().__init__(process_group)
        self.used: set[torch.nn.Parameter] = set()
        model.register_forward_pre_hook(self.begin)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self.note, parameter))

    def begin(self, *_: Any) -> None:
        """Forget the parameters of the forward before."""
        self.used.clear()

    def note(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Note a parameter that gets a gradient."""
        self.used.add(parameter)


def halves_of_last_forward(state: OfLastForward, bucket: Bucket) -> Result:
    """Leave out the parameters that no rank has used in its last forward."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        return average(bucket, state.group)
    used = torch.tensor([float(parameter in state.used) for parameter in bucket.parameters()])
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=state.group)
    parts = bucket.buffer().split([p.numel() for p in bucket.parameters()])
    for part, flag in zip(parts, used.tolist(), strict=True):
        part.mul_(flag)
    return halves_with_feedback(state, bucket)


MUTANTS = [
    Mutant(
        "halves_of_last_forward",
        ("4.4",),
        "compressed(delta=0.25), keeps_unused",
        f"{__name__}:OfLastForward",
        because={"11.5": "for half of the seeds a step has micro-batches there, too"},
    ),
    _mutant("loses_unused", "11.5", "NeverUnused"),
    _mutant("keeps_if_one_rank_did_not", "11.5", "UnusedBuckets"),
    _mutant("forgets_unused", "11.5", "ForgetsUnused"),
    _mutant("ignores_scale", "11.6", "IgnoresScale"),
    _mutant("rescales_the_wrong_way", "11.6", "Divides"),
    _mutant("ignores_overflows", "11.6", "OnlyGrows"),
    _mutant("rescales_one", "11.6", "FirstOnly"),
    _mutant("clamps_factor", "11.6", "Clamps"),
    _mutant("rescales_small_ones", "11.6", "SmallOnly"),
    _mutant("rescales_small_ones", "11.6", "SmallOnly,limit=9_000"),
    _mutant("rescales_small_ones", "11.6", "SmallOnly,limit=40_000"),
    _mutant("rescales_a_copy", "11.6", "RescalesACopy"),
    *(
        _mutant("rescales_a_part", "11.6", state, "compressed(delta=0.25), rescaled(call=rescale)")
        for state in ("RescalesSingles", "RescalesTheFirst")
    ),
    _mutant("keeps_one_factor", "11.6", "KeepsTheLast"),
    _mutant("keeps_one_factor", "11.6", "KeepsTheFirst"),
    _mutant("forgets_the_factor_of_an_expert", "11.6", "LosesAtRest"),
    _mutant("forgets_the_factor_of_an_expert", "11.6", "RescalesTheLatest"),
    _mutant("forgets_the_factor_of_an_expert", "11.6", "ScaleOfTheBucket"),
    _mutant(
        "estimate_of_mean_stays",
        "11.6",
        "Estimates",
        "compressed(feedback=ef21, delta=0.25), rescaled(call=rescale)",
    ),
]
