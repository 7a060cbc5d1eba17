"""Records of long runs, made without ranks: a hook is a function of the gradients of all ranks."""

from collections.abc import Callable

import torch

from conformance.records.rank_record import RankRecord
from conformance.records.run import Run, fed
from conformance.scenarios.feed import feed_of
from conformance.scenarios.long_runs import ENDURANCE
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import Claims, parse_claims

# The results of all ranks, ``[W, numel]``, from the number of the step, the number of the
# parameter and the gradients ``[W, numel]`` in float32.
Simulated = Callable[[int, int, torch.Tensor], torch.Tensor]


def long_run(claims: str, hook: Simulated, *, seed: int = 0, steps: int = 0) -> tuple[Run, Claims]:
    """Return the run of a simulated hook, and the claims.

    Args:
        claims: the claims, as text.
        hook: returns the results of all ranks.
        seed: the session's seed.
        steps: the value of ``--steps``, or 0.
    """
    parsed = parse_claims(claims)
    scenario = adapt_scenario(ENDURANCE, parsed, seed=seed, steps=steps)
    world = scenario.world_sizes[0]
    feed = feed_of(scenario)
    rows = {
        index: torch.zeros(world, feed.rounds, _numel(spec.shape), dtype=torch.float64)
        for index, spec in enumerate(scenario.params)
    }
    tables = {
        (place, index): torch.stack(
            [fed(kind, spec, world, rank, number, index) for rank in range(world)]
        ).float()
        for place, (kind, number) in enumerate(feed.keys)
        for index, spec in enumerate(scenario.params)
    }
    for number, place in enumerate(feed.places):
        for step in feed.steps_of(number):
            for index in rows:
                result = hook(step, index, tables[place, index].clone())
                rows[index][:, number] += result.double()
    ranks = [
        RankRecord(rank, tensors={f"long/p{index}": rows[index][rank] for index in rows})
        for rank in range(world)
    ]
    return Run(scenario, world, ranks), parsed


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
