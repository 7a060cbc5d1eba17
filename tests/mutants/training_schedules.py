"""Mutants that are wrong once a training script thaws layers, trains in eval mode, resumes within
a warm-up, or accumulates micro-batches.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, average_of, completed, is_dense
from tests.mutants.residuals import Residuals


def quarter_with_feedback(state: Residuals, bucket: Bucket) -> Result:
    """Send the largest quarter of each parameter, with feedback: right but for the state."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        return average(bucket, state.group)
    parts = bucket.buffer().split([p.numel() for p in bucket.parameters()])
    for parameter, part in zip(bucket.parameters(), parts, strict=True):
        value = part + state.kept[parameter] if parameter in state.kept else part.clone()
        sent = torch.zeros_like(value)
        largest = value.abs().topk(-(-value.numel() // 4)).indices
        sent[largest] = value[largest]
        state.keep(parameter, value - sent)
        part.copy_(sent)
    return average_of(bucket.buffer(), state.group)


# 4.2 Layers that thaw, and models that train in eval mode


class InTrainMode(Residuals):
    """Keeps nothing in eval mode, so that an evaluation leaves residuals alone."""

    def __init__(self, process_group: dist.ProcessGroup, model: torch.nn.Module) -> None:
        super().__init__(process_group)
        self.model = model

    def keep(self, parameter: torch.nn.Parameter, residual: torch.Tensor) -> None:
        if self.model.training:
            super().keep(parameter, residual)


class Trains:
    """The group, and the model."""

    def __init__(self, process_group: dist.ProcessGroup, model: torch.nn.Module) -> None:
        self.group = process_group
        self.model = model


def communicates_in_train_mode(state: Trains, bucket: Bucket) -> Result:
    """Take a backward in eval mode for that of an evaluation: leave its gradients local."""
    return average(bucket, state.group) if state.model.training else completed(bucket.buffer())


def halves_in_eval_mode(state: Trains, bucket: Bucket) -> Result:
    """Round the gradients of an evaluation to half precision."""
    buffer = bucket.buffer()
    if not state.model.training and buffer.dtype == torch.float32:
        buffer.copy_(buffer.bfloat16())
    return average(bucket, state.group)


class FirstParameters(Residuals):
    """Makes room for residuals in the first two steps alone."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self.calls = 0

    def keep(self, parameter: torch.nn.Parameter, residual: torch.Tensor) -> None:
        self.calls += 1
        # Five parameters train until others thaw.
        if self.calls <= 10 or parameter in self.kept:
            super().keep(parameter, residual)


class KeptUntilThawed(Residuals):
    """Stops to keep residuals once there are more parameters than at first."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self.known: set[torch.nn.Parameter] = set()
        self.is_settled = False

    def keep(self, parameter: torch.nn.Parameter, residual: torch.Tensor) -> None:
        self.is_settled |= parameter in self.known
        if parameter in self.known or not self.is_settled:
            self.known.add(parameter)
            super().keep(parameter, residual)


class ByAddress(Residuals):
    """Keeps residuals by the address of a parameter's values."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self.at: dict[int, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []

    def keep(self, parameter: torch.nn.Parameter, residual: torch.Tensor) -> None:
        super().keep(parameter, residual)
        self.at[parameter.data_ptr()] = self.kept.pop(parameter)
        # While it is held, no other parameter has this address: a failure does not depend on that.
        self.seen.append(parameter.data)


def quarter_by_address(state: ByAddress, bucket: Bucket) -> Result:
    """Send the largest quarters; the residuals are those of the parameters' memory."""
    for parameter in bucket.parameters():
        kept = state.at.get(parameter.data_ptr())
        if kept is not None and kept.numel() == parameter.numel():
            state.kept[parameter] = kept
    return quarter_with_feedback(state, bucket)


class ByLayout(Residuals):
    """Keeps residuals by the sizes of a bucket; knows a layout once it has come twice."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self.of: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
        self.seen: dict[tuple[int, ...], int] = {}

    def layout(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the sizes of a bucket's parameters, after its number."""
        return (bucket.index(), *(parameter.numel() for parameter in bucket.parameters()))


class ByShapes(ByLayout):
    """Keeps residuals by the shapes of a bucket alone."""

    def layout(self, bucket: Bucket) -> tuple[int, ...]:
        return tuple(size for parameter in bucket.parameters() for size in (*parameter.shape, -1))


def quarter_by_layout(state: ByLayout, bucket: Bucket) -> Result:
    """Send the largest quarters; the residuals are those of the layout, without a new one's."""
    layout = state.layout(bucket)
    state.seen[layout] = state.seen.get(layout, 0) + 1
    if state.seen[layout] <= 2:
        return average(bucket, state.group)
    state.kept = {
        parameter: kept
        for place, parameter in enumerate(bucket.parameters())
        if (kept := state.of.get(layout, {}).get(place)) is not None
    }
    result = quarter_with_feedback(state, bucket)
    state.of[layout] = {
        place: state.kept[parameter]
        for place, parameter in enumerate(bucket.parameters())
        if parameter in state.kept
    }
    return result


# 11.2 A warm-up that is resumed


class Warmup(Residuals):
    """Exact in its first two steps; can be saved and loaded, by the parameters' order."""

    start = 2

    def __init__(self, process_group: dist.ProcessGroup, model: torch.nn.Module) -> None:
        super().__init__(process_group)
        self.parameters = list(model.parameters())
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        kept = [self.kept.get(parameter) for parameter in self.parameters]
        return {"kept": kept, "step": self.step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        pairs = zip(self.parameters, saved["kept"], strict=True)
        self.kept = {parameter: kept for parameter, kept in pairs if kept is not None}
        self.step = self.resumed_at(saved["step"])

    def resumed_at(self, step: int) -> int:
        """Return the step to go on with."""
        return step


class LoadsPastWarmup(Warmup):
    """Takes a loaded state for one that has left the warm-up."""

    def resumed_at(self, step: int) -> int:
        return max(step, self.start)


class NeverGoesBack(Warmup):
    """Goes on with the larger number of steps, its own or the loaded one."""

    def resumed_at(self, step: int) -> int:
        return max(step, self.step)


class FillsInWhatIsMissing(Warmup):
    """Takes from a loaded state the residuals that it does not have yet."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        own = dict(self.kept)
        super().load_state_dict(saved)
        self.kept |= own


class LoadsOneFurther(Warmup):
    """Counts the load as a step."""

    def resumed_at(self, step: int) -> int:
        return step + 1


class LoadsAnew(Warmup):
    """Begins the warm-up anew if it was not over."""

    def resumed_at(self, step: int) -> int:
        return step if step >= self.start else 0


def quarter_after_warmup(state: Warmup, bucket: Bucket) -> Result:
    """Average exactly in the warm-up, then send the largest quarters."""
    is_exact = state.step < state.start
    state.step += bucket.is_last()
    if is_exact:
        return average(bucket, state.group)
    return quarter_with_feedback(state, bucket)


# 5.1 Periods that are counted in micro-batches


class Forwards:
    """Counts the forwards of the model.

    A rank without inputs counts none: all ranks go by the largest count.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, model: torch.nn.Module, period: int = 3
    ) -> None:
        self.group = process_group
        self.period = period
        self.count = torch.zeros(1, dtype=torch.int64)
        model.register_forward_pre_hook(self._add)

    def _add(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self.count.add_(1)


def mean_by_forwards(state: Forwards, bucket: Bucket) -> Result:
    """Take the mean at a period that is counted in forwards, those under no_sync among them."""
    seen = state.count.clone()
    dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=state.group)
    state.count.copy_(seen)
    is_due = int(seen) % state.period == 1
    return average(bucket, state.group) if is_due else completed(bucket.buffer())


_FEEDBACK = "compressed(delta=0.25)"
_WARM = "compressed(delta=0.25), warmup(2), checkpointable"


def _of(name: str) -> str:
    return f"{__name__}:{name}"


MUTANTS = [
    Mutant("quarter_with_feedback", ("4.2",), _FEEDBACK, _of("InTrainMode")),
    Mutant("communicates_in_train_mode", ("4.2",), state=_of("Trains")),
    Mutant("halves_in_eval_mode", ("4.2",), state=_of("Trains")),
    Mutant("quarter_with_feedback", ("4.2",), _FEEDBACK, _of("FirstParameters")),
    Mutant("quarter_with_feedback", ("4.2",), _FEEDBACK, _of("KeptUntilThawed")),
    Mutant("quarter_by_address", ("4.2",), _FEEDBACK, _of("ByAddress")),
    Mutant("quarter_by_layout", ("4.2",), _FEEDBACK, _of("ByLayout")),
    Mutant("quarter_by_layout", ("4.2",), _FEEDBACK, _of("ByShapes")),
    Mutant("quarter_after_warmup", ("11.2",), _WARM, _of("LoadsPastWarmup")),
    Mutant("quarter_after_warmup", ("11.2",), _WARM, _of("LoadsOneFurther")),
    Mutant("quarter_after_warmup", ("11.2",), _WARM, _of("LoadsAnew")),
    Mutant("quarter_after_warmup", ("11.2",), _WARM, _of("NeverGoesBack")),
    Mutant("quarter_after_warmup", ("11.2",), _WARM, _of("FillsInWhatIsMissing")),
    Mutant("mean_by_forwards", ("5.1",), "local(period=3)", _of("Forwards")),
    Mutant("mean_by_forwards", ("5.1",), "local(period=4)", _of("Forwards,period=4")),
]
