"""Right results of section 24: twins on groups of their own, and mistakes that nodes reveal.

A twin is judged as a model alone (:func:`twins_of`): by the claims of the subject, on the ranks of
its group. Its inputs are those of other steps, times a factor (``scenarios/gradients.py``), so that
no mixture of the two models is right for either. Each element has the bound of a sum
(``oracles/mean.py``), also in crafted steps.

Simulated ranks. The values of an element have one sign on all ranks, so that the sum loses nothing
by cancellation. By the bound in ``oracles/mean.py``, gamma_k mean_r |x_r| with k = n + 1, or n + 2
if values are rounded, a wrong divisor is off by mean_r |x_r| times at least 1 / (n + 1), for the
divisor n + 1, and by all of it or more for twice the mean. A bound of more than half of
mean_r |x_r| decides nothing: that happens from 84 ranks on if values are rounded to bfloat16, and
from 681 on if they are rounded to float16. In full precision all sizes are decided.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from conformance.judging.oracles.mean import mean, precision
from conformance.records.rank_record import RankRecord, Tensors
from conformance.records.run import Run, fed
from conformance.scenarios.gradients import TWIN_FACTOR, TWIN_OFFSET
from conformance.subjects.claims import Claims

# The largest bound of a simulated result, as a share of the mean of the magnitudes, that decides.
DECIDES = 1 / 2

_OF_MODEL = re.compile(r"/(grad|result|dropped|parameter)/")
_OF_TWIN = {"/twin/": "/grad/", "/twin_parameter/": "/parameter/"}


@dataclass
class TwinRun(Run):
    """The twins of one group as a run of their own, with ranks numbered within the group.

    Attributes:
        members: the global rank of each.
    """

    members: tuple[int, ...] = ()

    def fed(self, rank: int, step: int, index: int) -> torch.Tensor:
        """Return the gradient that the kit fed to the twin."""
        kind = self.scenario.steps[step]
        spec = self.scenario.params[index]
        size = len(self.members)
        values = fed(kind, spec, size, self.members[rank], step + TWIN_OFFSET, index)
        return values * TWIN_FACTOR

    def recorded(self, group: tuple[int, ...], step: int, index: int) -> torch.Tensor | None:
        """Return the inputs of the twins, which have a factor that the other oracles do not
        know.
        """
        return torch.stack([self.fed(rank, step, index) for rank in group])


def twins_of(run: Run) -> Iterator[TwinRun]:
    """Yield the twins of a run, group by group; those without groups of their own are on WORLD."""
    for group in run.scenario.twin_groups or (tuple(range(run.world)),):
        alone = replace(run.scenario, groups=(), twin_groups=(), size=0)
        ranks = [
            RankRecord(place, run.ranks[rank].events, _of_twin(run.ranks[rank]))
            for place, rank in enumerate(group)
        ]
        yield TwinRun(alone, len(group), ranks, members=group)


def _of_twin(record: RankRecord) -> Tensors:
    """Return a rank's tensors with the twin's gradients and parameters in place of the model's."""
    kept = {name: one for name, one in record.tensors.items() if not _OF_MODEL.search(name)}
    for twins, models in _OF_TWIN.items():
        kept = {name.replace(twins, models): tensor for name, tensor in kept.items()}
    return Tensors(record.rank, kept)


def cause_in_nodes(run: Run, step: int) -> str:
    """Return the mistake of a hierarchical hook that explains every result of a step.

    The text is empty if no such mistake does, or if a result is missing.
    """
    nodes = _ranks_of_nodes(run)
    leaders = [node[0] for node in nodes]
    power = 1 << (run.world.bit_length() - 1)
    first = list(range(power))
    left_out = "those beyond a power of two are left out"

    def over_nodes(rank: int, index: int) -> torch.Tensor:
        return torch.stack([_mean(run, node, step, index) for node in nodes]).mean(0)

    def over_own_node(rank: int, index: int) -> torch.Tensor:
        return _mean(run, _node_of(nodes, rank), step, index)

    patterns: dict[str, Callable[[int, int], torch.Tensor]] = {
        "equal to the mean of the nodes' means: a node with fewer ranks counts as much as one "
        "with more": over_nodes,
        "equal to the mean over the rank's own node: nodes exchange nothing": over_own_node,
        "equal to the mean over the first rank of each node: the others take no part": (
            lambda rank, index: _mean(run, leaders, step, index)
        ),
        f"equal to the mean over the first {power} ranks: {left_out}": (
            lambda rank, index: _mean(run, first, step, index)
        ),
        f"equal to the sum over the first {power} ranks, divided by all: {left_out}": (
            lambda rank, index: _mean(run, first, step, index) * power / run.world
        ),
    }
    for cause, pattern in patterns.items():
        if all(
            _is_near(run, rank, step, index, pattern(rank, index))
            for rank in range(run.world)
            for index in range(len(run.scenario.params))
        ):
            return cause
    right = {
        rank
        for rank in range(run.world)
        if all(
            _is_near(run, rank, step, index, mean(run, rank, step, index))
            for index in range(len(run.scenario.params))
        )
    }
    if right == set(leaders) and len(right) < run.world:
        return "right on the first rank of each node alone: it hands nothing to the others"
    return ""


def _ranks_of_nodes(run: Run) -> list[list[int]]:
    """Return the ranks of each node; all ranks if the scenario has one node."""
    sizes = run.scenario.nodes if sum(run.scenario.nodes) == run.world else (run.world,)
    ends = accumulate(sizes)
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def _node_of(nodes: list[list[int]], rank: int) -> list[int]:
    return next(node for node in nodes if rank in node)


def _mean(run: Run, ranks: list[int], step: int, index: int) -> torch.Tensor:
    return torch.stack([run.fed(rank, step, index) for rank in ranks]).mean(0)


def _is_near(run: Run, rank: int, step: int, index: int, predicted: torch.Tensor) -> bool:
    """Whether a result has the predicted values, up to rounding."""
    got = run.got(rank, step, index)
    if got is None:
        return False
    unit, _, _ = precision(run.scenario.params[index].dtype, Claims())
    return bool(((got - predicted).abs() <= 8 * run.world * unit * predicted.abs()).all())


def share_of_bound(size: int, claims: Claims) -> float | None:
    """Return the bound of a simulated result as a share of the mean of the magnitudes.

    None means that the bound decides nothing; see the module.

    Args:
        size: the number of simulated ranks.
        claims: the subject's claims.
    """
    unit, _, _ = precision("float32", claims)
    products = (size + (2 if claims.rounded else 1)) * unit
    gamma = products / (1 - products) if products < 1 else float("inf")
    return gamma if gamma <= DECIDES else None
