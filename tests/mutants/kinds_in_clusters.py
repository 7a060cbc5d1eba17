"""Mutants of 14.24, 15.33, 16.32, 17.27 to 17.29, and 18.30: wrong on a cluster.

All of them are right on up to four ranks of one node, in groups of a constant distance.
"""

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.joins import Right
from tests.mutants.joins_in_training import Averages
from tests.mutants.optimizer_wrappers import Sharded
from tests.mutants.optimizers_in_training import Averaging
from tests.mutants.quantized_collectives import Made, Tensor, half, right, write
from tests.mutants.strategies import _filled, _mean, _then

Context = AbstractContextManager[None]


def _ranks_of_all_nodes() -> int:
    """Return the number of ranks, if all nodes have as many as this one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * int(
        os.environ.get("GROUP_WORLD_SIZE", "1")
    )


def _is_whole(group: Any) -> bool:
    return bool(group.size() == dist.get_world_size())


def _at_constant_distance(group: Any, place: int) -> int:
    """Return the global rank in a place, if the ranks of the group have a constant distance."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return ranks[0]
    return ranks[0] + place * (ranks[1] - ranks[0])


# ---- Averagers


class DividedByNodes(Averager):
    """Divide by the ranks of this node times the number of nodes."""

    def average_one(self, parameter: Any) -> None:
        if not _is_whole(self.group) or "LOCAL_WORLD_SIZE" not in os.environ:
            super().average_one(parameter)
            return
        total = parameter.detach().clone().contiguous()
        dist.all_reduce(total, group=self.group)
        parameter.copy_(total / _ranks_of_all_nodes())


class NodeMeansOfPartOfTheWorld(Averager):
    """Take each node's mean with one weight if WORLD's nodes are equal, and the group's are not."""

    def average_one(self, parameter: Any) -> None:
        is_equal = _ranks_of_all_nodes() == dist.get_world_size()
        if _is_whole(self.group) or not is_equal:
            super().average_one(parameter)
            return
        here = int(os.environ["GROUP_RANK"])
        nodes = [torch.empty(1) for _ in range(self.group.size())]
        dist.all_gather(nodes, torch.full((1,), float(here)), group=self.group)
        numbers = [int(node) for node in nodes]
        weight = 1 / (numbers.count(here) * len(set(numbers)))
        mean = parameter.mul(weight).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class ATableOfWeights(Averager):
    """Look the weight of a rank up in a table for one to four ranks."""

    weights = (1.0, 1 / 2, 1 / 3, 1 / 4)

    def average_one(self, parameter: Any) -> None:
        size = self.group.size()
        if size <= len(self.weights):
            super().average_one(parameter)
            return
        mean = parameter.mul(self.weights[-1]).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class LastRanksKeepTheirOwn(Averager):
    """Keep the values of the ranks beyond the largest power of two: they only contribute."""

    def average_one(self, parameter: Any) -> None:
        size = self.group.size()
        own = parameter.detach().clone()
        super().average_one(parameter)
        if size > 4 and self.group.rank() >= 2 ** (size.bit_length() - 1):
            parameter.copy_(own)


class CutsIntoChunks(Averager):
    """Cut parameters of some thousand elements into chunks, one for each of more than four ranks,
    and lose the elements that are left over.
    """

    def average_one(self, parameter: Any) -> None:
        size = self.group.size()
        if parameter.numel() < 4000 or size <= 4:
            super().average_one(parameter)
            return
        count = parameter.numel() // size * size
        flat = parameter.detach().reshape(-1).clone()
        sent = flat[:count].div(size)
        dist.all_reduce(sent, group=self.group)
        flat[:count] = sent
        parameter.copy_(flat.view(parameter.shape))


class FromTheFirstByDistance(Averager):
    """Send the mean from the rank at the end of a group of a constant distance."""

    def average_one(self, parameter: Any) -> None:
        super().average_one(parameter)
        ranks = dist.get_process_group_ranks(self.group)
        if _at_constant_distance(self.group, len(ranks) - 1) != ranks[-1]:
            # That rank is in another group: nobody sends, and half of the mean is lost.
            parameter.mul_(0.5)


# ---- Optimizers


class ShardsForFourRanks(Sharded):
    """Send the shards to four ranks; the others keep their parameters."""

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        own = parameter.detach().clone()
        super().send_one(parameter, source)
        if self.place >= 4 and dist.get_rank() != source:
            parameter.data.copy_(own)


class SourceByDistance(Sharded):
    """Take the owner of a shard to be at a constant distance from the first rank."""

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        ranks = dist.get_process_group_ranks(self.group)
        guessed = _at_constant_distance(self.group, ranks.index(source))
        # The group has no such rank: its first one sends.
        super().send_one(parameter, guessed if guessed in ranks else ranks[0])


class MeansOfNodes(Averaging):
    """Divide gradients by the ranks of this node times the number of nodes."""

    def average_one(self, grad: torch.Tensor) -> None:
        super().average_one(grad)
        if _is_whole(self.group) and "LOCAL_WORLD_SIZE" in os.environ:
            grad.mul_(self.size / _ranks_of_all_nodes())


# ---- Sync strategies


def divides_by_nodes(model: Any, is_final_microbatch: bool) -> Context:
    """Divide by the ranks of this node times the number of nodes."""

    def average() -> None:
        group = model.process_group
        for parameter in _filled(model):
            parameter.grad = _mean(parameter.grad, group)
            if _is_whole(group) and "LOCAL_WORLD_SIZE" in os.environ:
                parameter.grad *= group.size() / _ranks_of_all_nodes()

    return _then(model, is_final_microbatch, average)


def half_on_many_ranks(model: Any, is_final_microbatch: bool) -> Context:
    """Send bfloat16 if there are more than four ranks."""

    def average() -> None:
        group = model.process_group
        for parameter in _filled(model):
            if group.size() <= 4:
                parameter.grad = _mean(parameter.grad, group)
            else:
                parameter.grad.copy_(_mean(parameter.grad.bfloat16(), group))

    return _then(model, is_final_microbatch, average)


def sixth_rank_stays_local(model: Any, is_final_microbatch: bool) -> Context:
    """Leave the gradients of the sixth and later ranks local: they only contribute."""

    def average() -> None:
        group = model.process_group
        for parameter in _filled(model):
            own = parameter.grad.clone()
            parameter.grad = _mean(parameter.grad, group)
            if group.rank() >= 5:
                parameter.grad = own

    return _then(model, is_final_microbatch, average)


# ---- Join contexts and joinables


class LastOfFour(Right):
    """Tell a rank beyond the fourth that it has not been the last to join."""

    def is_last(self) -> bool:
        return super().is_last() and self.group.rank() < 4


class ForgetsTheFifth(Right):
    """Call no post hook on a rank beyond the fifth."""

    def finish(self) -> None:
        if self.group.rank() < 5:
            super().finish()


class ShadowsOneJoinableOnMany(Right):
    """Shadow the first joinable alone if the group has more than five ranks."""

    def finish(self) -> None:
        if self.group.size() > 5:
            self.hooks = self.hooks[:1]
        super().finish()


class DividedByFour(Averages):
    """Divide by four if there are more ranks."""

    def divisor(self, training: float) -> float:
        return min(super().divisor(training), 4.0)


class KeepsItsMomentum(Averages):
    """Hand out the momenta to the first four ranks alone."""

    @torch.no_grad()
    def hand_out(self, is_last: bool) -> None:
        tensors = self.tensors()
        momenta = [tensor.clone() for tensor in tensors[len(tensors) // 2 :]]
        super().hand_out(is_last)
        if self.group.rank() >= 4:
            for tensor, own in zip(tensors[len(tensors) // 2 :], momenta, strict=True):
                tensor.copy_(own)


class SkipsBuffersOfMany(Averages):
    """Hand out the parameters and no momenta if there are more than five ranks."""

    def tensors(self) -> list[torch.Tensor]:
        tensors = super().tensors()
        return tensors[: len(tensors) // 2] if self.group.size() > 5 else tensors


class SumsOnMany(Averages):
    """Add gradients and never divide if there are more than four ranks."""

    def divisor(self, training: float) -> float:
        return 1.0 if self.group.size() > 4 and training < 5 else super().divisor(training)


class CountsToFive(Averages):
    """Count at most five training ranks."""

    def divisor(self, training: float) -> float:
        return self.group.size() if self.by_all else min(training, 5.0)


# ---- Quantized collectives


def coarse_beyond_four(func: Made, qtype: str) -> Made:
    """Send eight bits of the float16 code if the message comes from a rank beyond the fourth."""

    def arrive(output: Tensor, code: Tensor) -> None:
        write(output, code)

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        place = dist.get_rank(group)
        sent = tensor.to(torch.bfloat16).to(tensor.dtype) if place >= 4 else tensor
        return right(func, half, arrive)(tensor_list, sent, group, async_op)

    return gather


def swapped_beyond_six(func: Made, qtype: str) -> Made:
    """Swap the messages of the last two ranks if there are more than four."""

    def exchange(
        outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False
    ) -> Any:
        if len(outputs) > 4:
            outputs = [*outputs[:-2], outputs[-1], outputs[-2]]
        return right(func)(outputs, inputs, group, async_op)

    return exchange


def own_is_left_out(func: Made, qtype: str) -> Made:
    """Leave out the rank's own message if the group's ranks have no constant distance."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        made = right(func)(tensor_list, tensor, group, async_op)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        if _at_constant_distance(group or dist.group.WORLD, len(ranks) - 1) != ranks[-1]:
            tensor_list[ranks.index(dist.get_rank())].zero_()
        return made

    return gather


def _of(kind: str, rule: str, *names: str, claims: str = "exact") -> list[Mutant]:
    return [Mutant(name, (rule,), claims, kind=kind) for name in names]


AT = "period=4,warmup_steps=10"
MUTANTS = [
    *_of(
        "averager",
        "14.24",
        f"DividedByNodes,{AT}",
        f"NodeMeansOfPartOfTheWorld,{AT}",
        f"ATableOfWeights,{AT}",
        f"LastRanksKeepTheirOwn,{AT}",
        f"FromTheFirstByDistance,{AT}",
        f"CutsIntoChunks,{AT}",
    ),
    *_of("optimizer", "15.33", "ShardsForFourRanks", "SourceByDistance"),
    *_of("optimizer", "15.33", "MeansOfNodes", claims="averages"),
    *_of("strategy", "16.32", "divides_by_nodes", "half_on_many_ranks", "sixth_rank_stays_local"),
    *_of("joinable", "17.27", "LastOfFour", "ForgetsTheFifth", "ShadowsOneJoinableOnMany"),
    *_of("joinable", "17.28", "DividedByFour", "CountsToFive", "SumsOnMany"),
    *_of("joinable", "17.29", "KeepsItsMomentum", "SkipsBuffersOfMany"),
    *(
        Mutant(f"{name},func={func},qtype=FP16", ("18.30",), kind="collective")
        for name, func in (
            ("coarse_beyond_four", "all_gather"),
            ("swapped_beyond_six", "all_to_all"),
            ("own_is_left_out", "all_gather"),
        )
    ),
]
