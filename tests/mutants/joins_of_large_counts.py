"""Mutants of 17.19: joinables with counts; and of 17.18 and 17.26: joinables that clip."""

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages

# ---- Integers that are handed out in other dtypes


class Counts(Averages):
    """Count the inputs of all ranks; the right part of the mutants."""

    dtype = torch.int64

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.net.register_buffer("inputs", torch.zeros(2, dtype=self.dtype))

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        added = torch.tensor([5 * count, count]).to(self.dtype)
        dist.all_reduce(added, group=self.group)
        self.net.inputs += added
        return super().mean(own, count)

    @torch.no_grad()
    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        self.hand_out_counts(self.source(is_last))

    def hand_out_counts(self, place: int) -> None:
        raise NotImplementedError


class PacksItsCounts(Counts):
    """Pack counts into one vector with the last bias, which is float32."""

    def hand_out_counts(self, place: int) -> None:
        bias = self.net[1].bias.detach()
        packed = torch.cat([bias, self.net.inputs.to(bias.dtype)])
        dist.broadcast(packed, dist.get_global_rank(self.group, place), group=self.group)
        if self.group.rank() != place:
            bias.copy_(packed[: bias.numel()])
            self.net.inputs.copy_(packed[bias.numel() :])


class SendsDigits(Counts):
    """Send counts as text, with the nine digits of a number in float32."""

    dtype = torch.int32

    def hand_out_counts(self, place: int) -> None:
        sent = [f"{count:.7e}" for count in self.net.inputs.tolist()]
        dist.broadcast_object_list(sent, dist.get_global_rank(self.group, place), group=self.group)
        if self.group.rank() != place:
            self.net.inputs.copy_(torch.tensor([float(text) for text in sent]))


class TakesTheLargestCount(Counts):
    """Receivers take the largest count of all ranks, by a maximum in float32."""

    def hand_out_counts(self, place: int) -> None:
        largest = self.net.inputs.float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        if self.group.rank() != place:
            self.net.inputs.copy_(largest)


class SendsCountsInInt32(Counts):
    """Send counts in one message of int32, half the size."""

    def hand_out_counts(self, place: int) -> None:
        sent = self.net.inputs.int()
        dist.broadcast(sent, dist.get_global_rank(self.group, place), group=self.group)
        if self.group.rank() != place:
            self.net.inputs.copy_(sent)


class SendsCountsInWords(Counts):
    """Send each count as two words of 16 bits, in float32; four would be right."""

    def hand_out_counts(self, place: int) -> None:
        words = torch.stack([self.net.inputs % 2**16, self.net.inputs // 2**16 % 2**16]).float()
        dist.broadcast(words, dist.get_global_rank(self.group, place), group=self.group)
        if self.group.rank() != place:
            low, high = words.long()
            self.net.inputs.copy_(low + high * 2**16)


class KeepsCountsWithinInt32(Counts):
    """Receivers hold counts within the range of int32, for a table of metrics."""

    def hand_out_counts(self, place: int) -> None:
        sent = self.net.inputs.clone()
        dist.broadcast(sent, dist.get_global_rank(self.group, place), group=self.group)
        if self.group.rank() != place:
            self.net.inputs.copy_(sent.clamp(max=2**31 - 1))


# ---- Counts in float64 that are handed out in other dtypes


class SendsTokensAsAList(Counts):
    """Make a tensor of the list of the counts: it has the default dtype, float32."""

    dtype = torch.float64

    def hand_out_counts(self, place: int) -> None:
        sent = torch.tensor(self.net.inputs.tolist())
        dist.broadcast(sent, dist.get_global_rank(self.group, place), group=self.group)
        if self.group.rank() != place:
            self.net.inputs.copy_(sent)


class SendsTokensAsIntegers(Counts):
    """Send counts as whole numbers, in int32."""

    dtype = torch.float64

    def hand_out_counts(self, place: int) -> None:
        sent = self.net.inputs.int()
        dist.broadcast(sent, dist.get_global_rank(self.group, place), group=self.group)
        if self.group.rank() != place:
            self.net.inputs.copy_(sent)


class TalliesInANumber(Averages):
    """Count the inputs of all ranks in a number; the join hands it out in a tensor of float32."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.tally = 0.0

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        added = torch.tensor(count)
        dist.all_reduce(added, group=self.group)
        self.tally += 5 * float(added) * bool(count)
        return super().mean(own, count)

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        sent = torch.tensor([self.tally if is_last else 0.0])
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.group)
        if not is_last:
            self.tally = float(sent)


# ---- Gradients with a factor below 1


class ClipsBesideJoinedRanks(Averages):
    """Clip the mean at a norm of 0.1 when a rank has joined, whose batches have been large."""

    def divisor(self, training: float) -> float:
        self.has_joined = training < self.group.size()
        return super().divisor(training)

    def put(self, mean: torch.Tensor) -> None:
        scale = min(1.0, 0.1 / float(mean.norm())) if self.has_joined else 1.0
        super().put(mean * scale)


class WeakensFromTheTwentiethStep(Averages):
    """Multiply each mean by 0.97 from the twentieth step on."""

    def put(self, mean: torch.Tensor) -> None:
        super().put(mean * 0.97 if self.seen > 20 else mean)


class ClipsAndRepeats(Averages):
    """Clip the mean from the tenth step on; a joined rank goes on adding its last gradient."""

    last: torch.Tensor | None = None

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        if count:
            self.last = own.clone()
        return super().mean(own, count)

    def shadow(self) -> None:
        if self.last is None or self.seen < 10:
            super().shadow()
        else:
            super().mean(self.last, 0.0)

    def put(self, mean: torch.Tensor) -> None:
        clips = self.seen > 10
        super().put(mean * min(1.0, 0.3 / float(mean.norm())) if clips else mean)


class ClipsEachParameter(Averages):
    """Clip each parameter's gradient at a norm of its own when a rank has joined."""

    def divisor(self, training: float) -> float:
        self.has_joined = training < self.group.size()
        return super().divisor(training)

    def put(self, mean: torch.Tensor) -> None:
        super().put(mean)
        for parameter in self.net.parameters():
            if self.has_joined:
                torch.nn.utils.clip_grad_norm_([parameter], 0.05)


MUTANTS = [
    *(
        Mutant(name, ("17.19",), kind="joinable")
        for name in (
            "PacksItsCounts",
            "SendsDigits",
            "TakesTheLargestCount",
            "SendsCountsInInt32",
            "SendsCountsInWords",
            "KeepsCountsWithinInt32",
            "SendsTokensAsAList",
            "SendsTokensAsIntegers",
            "TalliesInANumber",
        )
    ),
    *(Mutant(name, ("17.18",), kind="joinable") for name in ("ClipsEachParameter",)),
    *(
        Mutant(name, ("17.26",), kind="joinable")
        for name in ("ClipsBesideJoinedRanks", "WeakensFromTheTwentiethStep", "ClipsAndRepeats")
    ),
]
