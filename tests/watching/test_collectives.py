"""Recordings of collectives, in a group of one rank; afterwards all methods are restored."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from conformance.torch_versions.private import ALLGATHER_BASE, REDUCE_SCATTER_BASE
from conformance.watching.collectives import Counted, Recording, Tally, kit_groups

# Before torch 2.13 both functions and both methods have other names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_NAMES = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist.ProcessGroup, "all_gather_single")
    else (ALLGATHER_BASE, REDUCE_SCATTER_BASE)
)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def descriptions(recording: Recording) -> list[str]:
    return [
        collective.description for _, collective in recording.collectives if collective.ranks == [0]
    ]


def test_recorded_collectives(group: dist.ProcessGroup) -> None:
    recording = Recording()
    one = torch.ones(3)
    dist.all_reduce(one)
    recording.open()
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    dist.broadcast(one.half(), src=0)
    dist.all_gather([torch.zeros(3)], one)
    _all_gather_single(torch.zeros(3), one)
    _reduce_scatter_single(torch.zeros(3), one)
    group.allreduce([one, one]).wait()
    dist.barrier()
    recording.close()
    dist.all_reduce(one)
    assert descriptions(recording) == [
        "allreduce MAX 3 float32",
        "broadcast 3 float16 root 0",
        "allgather 3 float32",
        f"{_NAMES[0]} 3 float32",
        f"{_NAMES[1]} SUM 3 float32",
        "allreduce 6 float32",
        "barrier",
    ]


def test_the_last_of_several_recordings_restores_the_methods(group: dist.ProcessGroup) -> None:
    before = dict(dist.ProcessGroup.__dict__)
    first = Recording()
    second = Recording()
    first.open()
    second.open()
    first.close()
    first.close()
    dist.all_reduce(torch.ones(1))
    assert (descriptions(first), descriptions(second)) == ([], ["allreduce SUM 1 float32"])
    second.close()
    assert dict(dist.ProcessGroup.__dict__) == before


def test_a_tally_counts_by_group(group: dist.ProcessGroup) -> None:
    before = dict(dist.ProcessGroup.__dict__)
    other = dist.new_group([0], use_local_synchronization=True)
    tally = Tally()
    tally.open()
    assert tally.latest is None
    dist.barrier()
    dist.all_reduce(torch.ones(1), group=other)
    dist.all_reduce(torch.ones(1))
    tally.close()
    dist.barrier()
    assert tally.counts == {group.group_name: 2, other.group_name: 1}
    assert tally.latest == Counted("allreduce", 2, group.group_name)
    assert dict(dist.ProcessGroup.__dict__) == before


def test_groups_of_the_kit_are_not_recorded_and_errors_reach_the_caller(
    group: dist.ProcessGroup,
) -> None:
    recording = Recording()
    recording.open()
    own = dist.new_group([0], use_local_synchronization=True)
    kit_groups.add(own.group_name)
    dist.all_reduce(torch.ones(1), group=own)
    with pytest.raises(TypeError):
        group.allreduce("no tensor")
    recording.close()
    kit_groups.remove(own.group_name)
    assert all(
        "allreduce 1" not in what and "SUM 1" not in what for what in descriptions(recording)
    )
