"""Section 3: replicas stay replicas."""

from collections.abc import Callable

import torch

from conformance.claims import LOCAL, Claims
from conformance.rulebook import rule
from conformance.run import Run
from conformance.scenario import TRAINING, VALUES, VALUES_AGAIN
from conformance.verdict import Found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _step_and_name(name: str) -> tuple[int, str]:
    step, _, what = name.partition("/")
    return (int(step), what) if step.isdigit() else (-1, name)


def _element(name: str, at: int) -> str:
    return f"element {at}"


def require_same(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], who: str, found: Found, element: Callable[[str, int], str] = _element
) -> None:
    """Require two sets of tensors to have the same names and bits; report the first that differs, an ``element`` as that says."""
    found.require(one.keys() == other.keys(), "the same gradients", f"{who}: only one has {sorted(one.keys() ^ other.keys())[:3]}")
    for name in sorted(one.keys() & other.keys(), key=_step_and_name):
        a, b = one[name], other[name]
        if not torch.equal(_bits(a), _bits(b)):
            at = int((a.reshape(-1) != b.reshape(-1)).nonzero()[:1].sum())
            step, _, what = name.partition("/")
            where = element(name, at)
            found.require(
                False,
                "the same bits",
                f"{who} differ at step {step}, {what}, {where}: {a.reshape(-1)[at].item():.9g} and {b.reshape(-1)[at].item():.9g}",
            )
            return
        found.checked(a.numel())


@rule(
    "3.1",
    "results are bit-identical on all ranks",
    on=(VALUES,),
    needs=("2.2",),
    source="DDP's contract: replicas start equal and receive equal gradients; b12x#44",
    remedy="sums in an order that depends on the rank; an owner that keeps what it has not sent over the wire",
)
def identical_results(run: Run, claims: Claims, found: Found) -> None:
    """On every step the gradients have the same bits on all ranks of a group."""
    if claims.lossy == LOCAL:
        found.does_not_apply("replicas drift apart under local: 13.5 says how, and 2.10 that they do")
        return
    for rank in range(1, run.world):
        require_same(run.ranks[0].tensors, run.ranks[rank].tensors, f"ranks 0 and {rank}", found, run.element)
    if run.world == 1:
        found.checked(1)


@rule(
    "3.2",
    "parameters and buffers are identical after training steps",
    on=(TRAINING,),
    owns=(TRAINING,),
    needs=("3.1", "1.8"),
    source="torch documentation, DistributedDataParallel: replicas",
    remedy="anything that a hook does to one rank alone: parameters, buffers, optimizer state, skipped buckets",
)
def identical_models(run: Run, claims: Claims, found: Found) -> None:
    """After each step of a real optimizer the parameters, and the buffers that DDP synchronises, are identical on all ranks."""
    if claims.lossy == LOCAL:
        found.does_not_apply("replicas drift apart under local, until their parameters are averaged")
        return
    for rank in range(1, run.world):
        require_same(run.ranks[0].tensors, run.ranks[rank].tensors, f"ranks 0 and {rank}", found, run.element)


@rule(
    "3.3",
    "the same seeds give the same bits again",
    on=(VALUES, VALUES_AGAIN),
    owns=(VALUES_AGAIN,),
    needs=("2.2",),
    across=True,
    worlds="primary",
    source="torch documentation, Reproducibility",
    remedy="time, process ids, addresses, unseeded generators, the order in which messages happen to arrive",
)
def reproducible(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A second run on the same inputs gives the same bits."""
    first, second = runs.values()
    for one, other in zip(first.ranks, second.ranks, strict=True):
        names = one.tensors.keys() & other.tensors.keys() if claims.lossy else one.tensors.keys()  # the second is shorter then
        require_same({name: one.tensors[name] for name in names}, other.tensors, f"two runs on rank {one.rank}", found)
