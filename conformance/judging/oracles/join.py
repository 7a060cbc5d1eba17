"""TODO: conformance/judging/oracles/join.py."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from conformance.judging.collective_order import disagreement
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run, fed
from conformance.scenarios.joinable import JOINABLES, LEARNING_RATE, lengths, order

Event = dict[str, Any]


@dataclass(frozen=True)
class At:
    """One rank in one context.

    Attributes:
        rank: its record.
        number: of the context.
        inputs: how many each place of its group has.
        group: the global ranks of the group, by their place.
    """

    rank: RankRecord
    number: int
    inputs: tuple[int, ...]
    group: tuple[int, ...]

    @property
    def own(self) -> int:
        """How many inputs this rank has."""
        return self.inputs[self.group.index(self.rank.rank)]

    @property
    def most(self) -> int:
        return max(self.inputs)

    def all(self, *names: str) -> Iterator[Event]:
        """Yield the context's events of these names, in order."""
        return (event for event in self.rank.events if event["step"] == self.number and event["event"] in names)

    def trains(self, at: int) -> list[int]:
        """Return the ranks that have an input for a step."""
        return [rank for rank, length in zip(self.group, self.inputs, strict=True) if length > at]

    def __str__(self) -> str:
        return f"rank {self.rank.rank}, context {self.number} with inputs {self.inputs}"


def _is_context(run: Run) -> bool:
    """Whether the subject is a context; a run that is judged has come to its end, so that every rank says so."""
    said = {(rank.first("subject") or {}).get("is_context") for rank in run.ranks}
    if len(said) > 1 or None in said:
        raise ValueError(f"ranks do not say what the subject is: {said}")
    return bool(said.pop())


def _contexts(run: Run) -> Iterator[At]:
    """Yield every rank in every context, in the order of the contexts."""
    for number in sorted({event["step"] for rank in run.ranks for event in rank.all("step")}):
        for rank in run.ranks:
            group = run.group(rank.rank)
            planned = lengths(run.scenario, group)
            yield At(rank, number, planned[number], group)


def _steps(run: Run, at: At, found: Found) -> None:
    """Require that in each step of the kit's joinables all ranks of the group take part, each as what it should.

    Beside a joinable that is judged there is one of them, or none.
    """
    joinables = order(run.scenario, at.number) if _is_context(run) else (0,)
    if _is_context(run) or list(at.all("summed")):
        mains, wanted = [event["joinable"] for event in at.all("main")], [*joinables] * (at.most - at.own)
        cause = "main hooks are called in another order than the list's" if sorted(mains) == sorted(wanted) else ""
        found.require(mains == wanted, f"main hooks of joinables {wanted}", f"{at}: main hooks of joinables {mains}", cause)
        for joinable in joinables:
            sums = [event["sums"] for event in at.all("summed") if event["joinable"] == joinable]
            found.require(len(sums) == at.most, f"{at.most} collectives of joinable {joinable}", f"{at}: {len(sums)}")
            for step, got in enumerate(sums[: at.most]):
                trains = at.trains(step)
                rest = [rank for rank in at.group if rank not in trains]
                right = [0] * (2 * JOINABLES)
                right[joinable], right[JOINABLES + joinable] = (_bits(at, ranks) for ranks in (trains, rest))
                expected = f"joinable {joinable} stepped by ranks {trains}, shadowed by ranks {rest}"
                met = {slot % JOINABLES for slot, bits in enumerate(got) if bits}
                cause = (
                    "ranks meet in collectives of different joinables: main hooks in another order than the list's" if len(met) > 1 else ""
                )
                found.require(got == right, expected, f"{at}, step {step}: {_in_words(at, got)}", cause)


def _last(at: At, found: Found) -> None:
    """Require a right post hook of some joinable; 17.4 asks for those of all."""
    posts = list(at.all("post"))
    found.require(bool(posts), "post hooks", f"{at}: none")
    for event in posts:
        _is_last(at, event, found)


def _is_last(at: At, post: Event, found: Found, cause: str = "") -> None:
    right = at.own == at.most
    wrong = f"{at}: is_last_joiner={post['last']} for joinable {post['joinable']}"
    found.require(post["last"] == right, f"is_last_joiner={right}", wrong, cause)


def _bits(at: At, ranks: list[int]) -> int:
    return sum(1 << at.group.index(rank) for rank in ranks)


def _in_words(at: At, sums: list[int]) -> str:
    said = []
    for slot, bits in enumerate(sums):
        ranks = [rank for place, rank in enumerate(at.group) if bits >> place & 1]
        if ranks:
            said.append(f"joinable {slot % JOINABLES} {'shadowed' if slot >= JOINABLES else 'stepped'} by ranks {ranks}")
    return ", ".join(said) or "by no rank"


def _agreed(run: Run, found: Found) -> None:
    differs = disagreement(run)
    found.require(not differs, "the same collectives on all ranks", differs)


def _said_alike(run: Run, number: int) -> bool:
    return len({event["last"] for rank in run.ranks for event in rank.all("post", step=number)}) == 1


def _came_out(at: At) -> str:
    event = next(at.all("came_out"), None)
    return event["error"] if event else "it never came out"


def _gradient(run: Run, at: At, step: int, index: int, by_all: bool) -> tuple[torch.Tensor, float]:
    """Return the right gradient of a step, and how far from it roundings may take one.

    Sums of crafted values are exact, and so are their quotients by 1, 2, and the number that they are multiples of. Any other
    quotient is a product with a rounded reciprocal, on each rank before the sum: two roundings each.
    """
    total, trains, size = _sum(run, at, step, index), at.trains(step), len(at.group)
    divisor = size if by_all else len(trains)
    exact = size <= 4 and (divisor == size or divisor <= 2)
    largest = max(_fed(run, at, rank, step, index).abs().max().item() for rank in trains)
    return total / divisor, 0.0 if exact else (size + 2) * torch.finfo(torch.float32).eps * largest


def _sum(run: Run, at: At, step: int, index: int) -> torch.Tensor:
    return torch.stack([_fed(run, at, rank, step, index) for rank in at.trains(step)]).sum(0)


def _fed(run: Run, at: At, rank: int, step: int, index: int) -> torch.Tensor:
    return fed("crafted", run.scenario.params[index], len(at.group), rank, step, index)


def _trained(run: Run, at: At, found: Found, by_all: bool) -> None:
    """Require that parameters are what all steps make of them, on a rank that has taken them all or joined before."""
    for index in range(len(run.scenario.params)):
        steps = [_gradient(run, at, step, index, by_all) for step in range(at.most)]
        right = -LEARNING_RATE * torch.stack([gradient for gradient, _ in steps]).sum(0)
        bound = sum(bound for _, bound in steps)
        bound += bound and len(steps) * torch.finfo(torch.float32).eps * right.abs().max().item()
        got, name = at.rank.tensors.get(f"{at.number}/parameter/p{index}"), f"{at}, parameter p{index} afterwards"
        joined = "this rank joined early: it holds what it had then" if at.own < at.most else ""
        _same(found, got, right, bound, name, {joined: _stale(run, at, index, by_all)} if joined else {})


def _stale(run: Run, at: At, index: int, by_all: bool) -> torch.Tensor:
    steps = [_gradient(run, at, step, index, by_all)[0] for step in range(at.own)]
    return -LEARNING_RATE * torch.stack(steps).sum(0) if steps else torch.zeros_like(_sum(run, at, 0, index))


def _divided(run: Run, at: At, step: int, index: int) -> dict[str, torch.Tensor]:
    total = _sum(run, at, step, index)
    return {
        f"divided by {len(at.group)}, the number of all ranks": total / len(at.group),
        f"divided by {len(at.trains(step))}, the number of ranks that train": total / len(at.trains(step)),
        "the sum, not divided": total,
    }


def _same(
    found: Found,
    got: torch.Tensor | None,
    right: torch.Tensor,
    bound: float,
    where: str,
    known: dict[str, torch.Tensor] | None = None,
    unknown: str = "",
) -> None:
    """Require values; ``known`` are those that known mistakes make, by their names; ``unknown`` is the cause of any others."""
    if not found.require(got is not None, "a record", f"{where}: none"):
        return
    assert got is not None
    values = got.reshape(-1).double()
    off = ((values - right).abs() > bound).nonzero()
    cause = next((name for name, value in (known or {}).items() if torch.allclose(values, value, rtol=1e-6, atol=0.0)), unknown)
    at = int(off[0]) if len(off) else 0
    found.require(not len(off), f"{right[at].item():.9g}", f"{where}, index {at}: {values[at].item():.9g}", cause)
