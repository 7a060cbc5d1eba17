"""Broken subjects for section 22: each is right at small sizes and wrong beyond a threshold."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    average_of,
    change_mean,
    completed,
    gather,
    group_of,
    is_dense,
    pieces_of,
    send_as,
    sum_of,
)

Hook = Callable[[Any, Bucket], Result]


# ---- Wrong beyond a number of elements of a bucket


def _as_bfloat16(state: Any, bucket: Bucket) -> Result:
    return send_as(torch.bfloat16, bucket, state)


def _undivided(state: Any, bucket: Bucket) -> Result:
    return sum_of(bucket.buffer(), state)


def _own(state: Any, bucket: Bucket) -> Result:
    return completed(bucket.buffer())


def _never_sent(state: Any, bucket: Bucket) -> Result:
    return completed(torch.zeros_like(bucket.buffer()))


def _without_tail(state: Any, bucket: Bucket) -> Result:
    buffer = bucket.buffer()
    whole = len(buffer) // 1024 * 1024
    return sum_of(buffer.div_(group_of(state).size())[:whole], state).then(lambda fut: buffer)


def _scaled_wrongly(state: Any, bucket: Bucket) -> Result:
    return change_mean(bucket, state, lambda mean: mean.mul_(1.0001))


def _gathered_at(indices: Callable[[torch.Tensor], torch.Tensor]) -> Hook:
    """Return a hook that takes every element of the mean from an index that a dtype has held."""

    def hook(state: Any, bucket: Bucket) -> Result:
        return change_mean(
            bucket, state, lambda mean: mean[indices(torch.arange(len(mean)))].contiguous()
        )

    return hook


_DEFECTS: dict[str, Hook] = {
    "bfloat16": _as_bfloat16,
    "undivided": _undivided,
    "own": _own,
    "never_sent": _never_sent,
    "without_tail": _without_tail,
    "scaled_wrongly": _scaled_wrongly,
    "indices_of_16_bits": _gathered_at(lambda at: at % 65536),
    "indices_of_24_bits": _gathered_at(lambda at: at.float().long().clamp(max=len(at) - 1)),
}


def above(numel: int, defect: str) -> Hook:
    """Average, but buckets of more than ``numel`` elements with a defect."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if is_dense(bucket) and bucket.buffer().numel() > numel:
            return _DEFECTS[defect](state, bucket)
        return average(bucket, state)

    return hook


def between(numel: int, defect: str) -> Hook:
    """Average, but buckets of ``numel`` to one and a half times as many elements with a defect."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if is_dense(bucket) and numel < bucket.buffer().numel() <= 1.5 * numel:
            return _DEFECTS[defect](state, bucket)
        return average(bucket, state)

    return hook


def parameters_above(numel: int, factor: float) -> Hook:
    """Average, and scale the parts of parameters with more than ``numel`` elements."""

    def scale(state: Any, bucket: Bucket) -> Result:
        def scaled(mean: torch.Tensor) -> torch.Tensor:
            for piece in pieces_of(bucket, mean):
                if len(piece) > numel:
                    piece.mul_(factor)
            return mean

        return change_mean(bucket, state, scaled)

    return scale


def launches(tensors: int) -> Hook:
    """Average ``tensors`` tensors of a bucket per launch; the first of the next launch is lost."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if not is_dense(bucket):
            return average(bucket, state)
        pieces = pieces_of(bucket)
        buffer = bucket.buffer()
        sums = []
        for begin in range(0, len(pieces), tensors + 1):
            part = torch.cat(pieces[begin : begin + tensors]).div_(group_of(state).size())
            sums.append((begin, part, dist.all_reduce(part, group=group_of(state), async_op=True)))
        for begin, part, work in sums:
            work.wait()
            sizes = [len(piece) for piece in pieces[begin : begin + tensors]]
            for piece, mean in zip(pieces[begin:], part.split(sizes), strict=False):
                piece.copy_(mean)
        return completed(buffer)

    return hook


def pool_of_results(count: int) -> Hook:
    """Average into one of ``count`` buffers, in turn: a step with more buckets overwrites some."""
    pool: dict[int, torch.Tensor] = {}

    def hook(state: Any, bucket: Bucket) -> Result:
        if not is_dense(bucket):
            return average(bucket, state)
        place = bucket.index() % count
        numel = bucket.buffer().numel()
        if (
            place not in pool
            or len(pool[place]) < numel
            or pool[place].dtype != (bucket.buffer().dtype)
        ):
            pool[place] = torch.empty(numel, dtype=bucket.buffer().dtype)
        result = pool[place][:numel]
        future = average_of(bucket.buffer().clone(), state)
        return future.then(lambda fut: result.copy_(fut.value()).view(-1))

    return hook


def complete_above(numel: int) -> Hook:
    """Complete larger buckets at once, while their sum is still on its way."""

    def hook(state: Any, bucket: Bucket) -> Result:
        if is_dense(bucket) and bucket.buffer().numel() > numel:
            average(bucket, state)
            return completed(bucket.buffer())
        return average(bucket, state)

    return hook


def chunks_without_tail(numel: int) -> Hook:
    """Reduce whole chunks of ``numel`` elements, and leave out the rest of larger buckets."""

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = bucket.buffer()
        if not is_dense(bucket) or len(buffer) <= numel:
            return average(bucket, state)
        buffer.div_(group_of(state).size())
        whole = len(buffer) // numel * numel
        sums = [sum_of(chunk, state) for chunk in buffer[:whole].split(numel)]
        return torch.futures.collect_all(sums).then(lambda fut: buffer)

    return hook


def own_first_above(numel: int) -> Hook:
    """Sum larger buckets in an order that begins with the rank's own, so that replicas differ."""

    def hook(state: Any, bucket: Bucket) -> Result:
        buffer = bucket.buffer()
        if not is_dense(bucket) or len(buffer) <= numel:
            return average(bucket, state)
        group = group_of(state)
        gathered = gather(buffer, state)
        order = gathered[group.rank() :] + gathered[: group.rank()]
        total = order[0].clone()
        for other in order[1:]:
            total += other
        return completed(total.div_(group.size()))

    return hook


def strides_of_layers(state: Any, bucket: Bucket) -> Result:
    """Average by parameter, but take those of five dimensions in C order."""
    if not is_dense(bucket):
        return average(bucket, state)

    def reordered(mean: torch.Tensor) -> torch.Tensor:
        for parameter, piece in zip(bucket.parameters(), pieces_of(bucket, mean), strict=True):
            if parameter.dim() == 5 and not parameter.is_contiguous():
                piece.copy_(piece.view(parameter.shape).permute(0, 2, 3, 4, 1).reshape(-1))
        return mean

    return change_mean(bucket, state, reordered)


def fused_step_above(numel: int) -> Hook:
    """Step parameters by SGD, but larger ones with the gradient of this rank."""

    def hook(state: Any, bucket: Bucket) -> Result:
        own = bucket.buffer().clone()

        def step(fut: Result) -> torch.Tensor:
            mean = fut.value()
            with torch.no_grad():
                for parameter, piece, mine in zip(
                    bucket.parameters(),
                    pieces_of(bucket, mean),
                    pieces_of(bucket, own),
                    strict=True,
                ):
                    chosen = mine if parameter.numel() > numel else piece
                    gradient = chosen.as_strided(parameter.size(), parameter.stride())
                    parameter.sub_(gradient, alpha=0.1)
            return mean

        return average(bucket, state).then(step)

    return hook


def _above(numel: int, defect: str) -> Mutant:
    return Mutant(f"above,numel={numel},defect={defect}", ("22.1",), because=_ALSO)


_ALSO = {"22.2": "a bucket of the first step is as large", "2.5": "a parameter may be as large"}
MUTANTS = (
    _above(1_483_217, "bfloat16"),
    _above(9_871_003, "bfloat16"),
    _above(3_117_911, "undivided"),
    _above(1_200_007, "own"),
    _above(6_912_345, "never_sent"),
    _above(8_388_608, "without_tail"),
    _above(2_345_679, "scaled_wrongly"),
    _above(1_333_333, "indices_of_16_bits"),
    _above(16_777_216, "indices_of_24_bits"),
    Mutant("between,numel=71_234,defect=own", ("22.2",), because=_ALSO),
    Mutant("between,numel=311_111,defect=bfloat16", ("22.2",), because=_ALSO),
    Mutant("between,numel=2_357,defect=scaled_wrongly", ("22.2",), because=_ALSO),
    Mutant("parameters_above,numel=1_100_000,factor=2.0", ("22.1",)),
    Mutant("parameters_above,numel=12_345_678,factor=0.0", ("22.1",)),
    Mutant("launches,tensors=64", ("22.1",), because=_ALSO),
    Mutant("launches,tensors=127", ("22.1",), because=_ALSO),
    Mutant("pool_of_results,count=40", ("22.2",), because=_ALSO),
    Mutant("pool_of_results,count=63", ("22.2",), because=_ALSO),
    Mutant("pool_of_results,count=251", ("22.2",), because=_ALSO),
    Mutant("complete_above,numel=1_500_000", ("1.6",), because=_ALSO),
    Mutant("chunks_without_tail,numel=2_097_152", ("22.1",), because=_ALSO),
    Mutant("own_first_above,numel=100_003", ("22.3",), worlds=(3,)),
    Mutant("above,numel=1_007,defect=bfloat16", ("10.3",), worlds=(3,)),
    Mutant("strides_of_layers", ("22.1",)),
    Mutant("fused_step_above,numel=1_234_567", ("22.1",), "fused(SGD, lr=0.1)"),
)
