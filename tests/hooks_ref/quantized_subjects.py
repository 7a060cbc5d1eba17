"""Quantized collectives compared with the plain collective of quantized values, inside their
ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import hooks_ref
from conformance import Case
from hooks_ref.quantized_collectives import dequantize, quantize


def values(shape: tuple[int, ...], *words: int) -> torch.Tensor:
    """Normal values that all ranks can make."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash(words) % 2**31))


def round_trip(
    tensor: torch.Tensor, qtype: hooks_ref.DQuantType, loss: float | None
) -> torch.Tensor:
    return dequantize(quantize(tensor, qtype), qtype, tensor) / (loss or 1.0)


def equals(
    process_group: Any,
    rank: int,
    world_size: int,
    *,
    of: str,
    qtype: str,
    loss: float | None = None,
    waits: bool = False,
) -> Case:
    """In shapes of one to three dimensions, on blocks that are full and not, also of nothing."""
    kind = hooks_ref.DQuantType[qtype]
    collective = hooks_ref.auto_quantize(getattr(dist, of), kind, loss)

    def call(*args: Any, **kwargs: Any) -> None:
        work = collective(*args, group=process_group, async_op=waits, **kwargs)
        assert (work is not None) == waits
        if waits:
            work.wait()

    def check() -> None:
        for number, shape in enumerate([(5,), (128,), (3, 50), (2, 3, 129), (0,)]):
            fed = [
                [values(shape, number, r, s) for s in range(world_size)] for r in range(world_size)
            ]  # from r to s
            if of == "all_gather":
                got = [torch.empty(shape) for _ in range(world_size)]
                call(got, fed[rank][0])
                right = [round_trip(fed[r][0], kind, loss) for r in range(world_size)]
            elif of == "all_to_all":
                got = [torch.empty(shape) for _ in range(world_size)]
                call(got, fed[rank])
                right = [round_trip(fed[r][rank], kind, loss) for r in range(world_size)]
            elif of == "all_to_all_single":
                rows = [
                    [1 + (r + 2 * s) % 3 for s in range(world_size)] for r in range(world_size)
                ]  # that r sends to s
                sent = [
                    [values((rows[r][s], *shape[1:]), number, r, s) for s in range(world_size)]
                    for r in range(world_size)
                ]
                received = [rows[r][rank] for r in range(world_size)]
                whole = torch.empty((sum(received), *shape[1:]))
                call(whole, torch.cat(sent[rank]), received, rows[rank])
                got = list(whole.split(received))
                right = [round_trip(sent[r][rank], kind, loss) for r in range(world_size)]
            else:
                got = [torch.empty(shape)]
                call(got[0], fed[1] if rank == 1 else None, group_src=1)
                right = [round_trip(fed[1][rank], kind, loss)]
            for one, other in zip(got, right, strict=True):
                assert torch.equal(one, other), (shape, one, other)

        if of == "scatter":
            whole = [torch.ones(2, dtype=torch.int32) for _ in range(world_size)]
            with pytest.raises(
                TypeError, match="floating point"
            ):  # on ranks that only receive too, before anything is sent
                call(torch.empty(2, dtype=torch.int32), whole if rank == 1 else None, group_src=1)

    return Case(None, hooks_ref.noop_hook, after_backward=check)


def sums(
    process_group: Any, rank: int, world_size: int, *, of: str, qtype: str, waits: bool = False
) -> Case:
    """One tensor holds the messages of all ranks, or an output is the sum or the average."""
    kind = hooks_ref.DQuantType[qtype]
    collective = hooks_ref.auto_quantize(getattr(dist, of), kind)

    def call(*args: Any, **kwargs: Any) -> None:
        work = collective(*args, group=process_group, async_op=waits, **kwargs)
        if waits:
            work.wait()

    def check() -> None:
        ranks = range(world_size)
        for number, shape in enumerate([(6,), (129, 2), (3, 2, 64), (0, 2)]):
            # From r to s, and as they arrive.
            fed = [[values(shape, number, r, s) for s in ranks] for r in ranks]
            arrived = [[round_trip(tensor, kind, None) for tensor in row] for row in fed]
            sum_here = sum(arrived[r][rank] for r in ranks)
            got = torch.empty(shape)
            if of == "all_gather_into_tensor":
                for whole in (
                    torch.empty(world_size * shape[0], *shape[1:]),
                    torch.empty(3, *shape),
                ):
                    call(whole, fed[rank][0])
                    assert torch.equal(
                        whole.view(3, *shape), torch.stack([row[0] for row in arrived])
                    )
                continue
            if of == "all_reduce":
                got = fed[rank][0].clone()
                call(got, dist.ReduceOp.AVG)
                exact = sum(row[0] for row in fed) / world_size
                assert torch.allclose(got, exact, rtol=0.2, atol=0.2)
                continue
            for op, right in ((dist.ReduceOp.SUM, sum_here), (dist.ReduceOp.AVG, sum_here / 3)):
                given = fed[rank] if of == "reduce_scatter" else torch.cat(fed[rank])
                call(got, given, op=op)
                assert torch.allclose(got, right, atol=1e-5), (shape, got, right)

    return Case(None, hooks_ref.noop_hook, after_backward=check)


def averages_near_the_range(process_group: Any, rank: int, world_size: int) -> Case:
    """An average is within the range of FP16 though the sum is not."""
    collective = hooks_ref.auto_quantize(dist.all_reduce, hooks_ref.DQuantType.FP16)

    def check() -> None:
        got = torch.full((300,), 40_000.0)
        collective(got, dist.ReduceOp.AVG)
        assert got.eq(40_000).all()

    return Case(None, hooks_ref.noop_hook, after_backward=check)


def lists_used_again(process_group: Any, rank: int, world_size: int, *, of: str) -> Case:
    """A caller's list may hold other tensors, or other sizes, before the wait for its call."""
    collective = hooks_ref.auto_quantize(getattr(dist, of), hooks_ref.DQuantType.FP16)

    def check() -> None:
        outputs: list[Any] = []
        works = []
        layers = [[torch.full((2,), -1.0) for _ in range(world_size)] for _ in range(3)]
        for layer, rooms in enumerate(layers):
            outputs[:] = rooms
            mine = torch.full((2,), 10.0 * layer + rank)
            sizes = [2] * world_size
            if of == "all_gather":
                work = collective(outputs, mine, group=process_group, async_op=True)
            elif of == "all_to_all":
                work = collective(outputs, [mine] * world_size, process_group, async_op=True)
            else:
                whole = torch.full((2 * world_size,), -1.0)
                layers[layer] = list(whole.split(2))
                work = collective(
                    whole, mine.repeat(world_size), sizes, sizes, process_group, async_op=True
                )
            sizes.clear()
            works.append(work)
        outputs.clear()
        for work in works:
            work.wait()
        for layer, rooms in enumerate(layers):
            assert [room.tolist() for room in rooms] == [
                [10.0 * layer + r] * 2 for r in range(world_size)
            ]

    return Case(None, hooks_ref.noop_hook, after_backward=check)


def fed_back_by_group(process_group: Any, rank: int, world_size: int) -> Case:
    """What a call on one group has lost is made up for on that group."""
    collective = hooks_ref.auto_quantize(
        dist.all_gather, hooks_ref.DQuantType.INT8, error_feedback=True
    )
    groups = [dist.new_group(range(world_size)) for _ in range(2)]

    def check() -> None:
        for group, sign in zip(groups * 50, (1, -1) * 50, strict=True):
            # The second element is below half of a level of the first.
            mine = torch.tensor([1.0, 0.003 * sign])
            got = [torch.empty(2) for _ in range(world_size)]
            collective(got, mine, group=group)
            sums[group] = sums.get(group, 0.0) + float(got[0][1])
        # Off by one level at most.
        assert list(sums.values()) == pytest.approx([0.15, -0.15], abs=1 / 127)

    sums: dict[Any, float] = {}
    return Case(None, hooks_ref.noop_hook, after_backward=check)


def fed_back(process_group: Any, rank: int, world_size: int, *, qtype: str) -> Case:
    """The received values sum to the inputs, up to one step's rounding; inputs do not change."""
    collective = hooks_ref.auto_quantize(
        dist.all_gather, hooks_ref.DQuantType[qtype], error_feedback=True
    )

    def check() -> None:
        fed = torch.zeros(world_size, 300)
        arrived = torch.zeros(world_size, 300)
        for step in range(50):
            mine = values((300,), rank, step)
            before = mine.clone()
            got = [torch.empty(300) for _ in range(world_size)]
            collective(got, mine, group=process_group)
            assert torch.equal(mine, before)
            arrived += torch.stack(got)
            fed += torch.stack([values((300,), r, step) for r in range(world_size)])
        # 1/16 of the largest value, which is about 4.
        assert (arrived - fed).abs().max() < 0.3, (arrived - fed).abs().max()
        for beyond in (torch.tensor(torch.inf), torch.tensor(1e300, dtype=torch.float64)):
            got = [torch.empty(300, dtype=beyond.dtype) for _ in range(world_size)]
            collective(got, beyond.expand(300).clone(), group=process_group)
            got = [torch.empty(300) for _ in range(world_size)]
            collective(got, torch.ones(300), group=process_group)
            assert all(torch.allclose(part, torch.ones(300), atol=0.1) for part in got), (
                f"{beyond} stays in what is kept"
            )
        with pytest.raises(ValueError, match="differ from those of the call before"):
            collective(
                [torch.empty(3) for _ in range(world_size)], torch.ones(3), group=process_group
            )

    return Case(None, hooks_ref.noop_hook, after_backward=check)
