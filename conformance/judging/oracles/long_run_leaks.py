"""Judge whether a long run has delivered all of its residuals; ``long_runs.py`` has the derivation
under "Leaks".
"""

import math

import torch

from conformance.judging.oracles.long_runs import LongRecord, residual_bounds
from conformance.judging.verdict import Found

SLOWER = 4  # times slower than signs with one scale, see "Slow compressors" in ``oracles/lossy``


def require_all_delivered(record: LongRecord, found: Found) -> bool:
    """Require the results of the whole run to sum to the means, but for what still comes out."""
    limit = float(residual_bounds(record, after_ebb=True)[-1])
    after = slice(record.warm_up, None)
    for index in record.indices:
        right = record.wanted(index)
        for rank, rows in record.different_ranks(index):
            missing = (right - rows)[after].sum(0)
            off = float(missing.norm())
            if off > limit and _still_comes_out(record, missing, rows):
                found.checked(len(missing))
                continue
            wanted = right[after].sum(0)
            ratio = 1 - float(missing @ wanted) / max(float(wanted.square().sum()), 1e-300)
            name = record.run.parameter_name(index)
            holds = found.require(
                off <= limit,
                f"results of the whole run that sum to the means, within {limit:.3g}",
                f"rank {rank}, parameter {name}: off by {off:.3g}, and nothing comes out any more",
                f"over the whole run results are {ratio:.5g} times the means: in each step a part "
                "of the residual is lost"
                if off > limit
                else "",
            )
            if not holds:
                return False
            found.checked(len(missing), off / limit)
    return True


def _still_comes_out(record: LongRecord, missing: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether the largest missing elements come out at the pace of signs with one scale."""
    last = slice(record.drain + (record.feed.rounds - record.drain) // 2, None)
    large = missing.abs() >= missing.abs().max() / 2
    came_out = rows[last, large].sum(0) * missing[large].sign()
    numel = sum(math.prod(spec.shape) for spec in record.run.scenario.params)
    slowest = float(record.counts[last].sum()) * missing[large].abs() / (SLOWER * numel)
    return bool((came_out >= slowest).all())
