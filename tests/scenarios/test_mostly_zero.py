"""Gradients that are mostly zeros."""

import torch

from conformance.scenarios.gradients import gradient
from conformance.scenarios.mostly_zero import MORE
from conformance.scenarios.mostly_zero_values import SHARES, is_kept
from conformance.scenarios.values import LAYERS
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims

NUMEL = 1 << 16


def test_ranks_have_shares_of_their_own() -> None:
    kinds = [f"mostly_zero/{number}" for number in range(40)]
    shares = torch.stack(
        [
            torch.stack([is_kept(kind, NUMEL, rank, 0).double().mean() for rank in range(3)])
            for kind in kinds
        ]
    )
    assert float(shares.max()) < 1.5 * 2.0 ** SHARES[1]
    assert float(shares.max()) > 2.0**-4
    assert float(shares.min()) < 2.0**-10
    assert sum(len(set(row.tolist())) == 3 for row in shares) > 30


def test_for_any_threshold_one_rank_is_above_it_and_the_mean_below() -> None:
    for number in range(20):
        by_step = []
        for more in range(len(MORE)):
            kept = [is_kept(f"mostly_zero/{number}/{more}", NUMEL, rank, 0) for rank in range(2)]
            by_step.append([float(mask.double().mean()) for mask in kept])
        for percent in range(20, 86):
            threshold = percent / 100
            assert any(sum(one) / 2 < threshold < max(one) for one in by_step), threshold


def test_the_ends_may_be_kept_on_all_ranks() -> None:
    ends = [is_kept(f"mostly_zero/{number}", NUMEL, 1, 0)[[0, -1]].all() for number in range(40)]
    assert 5 < sum(map(bool, ends)) < 35


def test_values_are_zero_elsewhere() -> None:
    kind = "mostly_zero/7"
    values = gradient(kind, (NUMEL,), torch.float32, world=2, rank=1, step=3, param=0)
    assert torch.equal(values != 0, is_kept(kind, NUMEL, 1, 0))


def test_only_results_of_single_steps_are_judged_on_them() -> None:
    for claims, steps in (("exact", 6), ("rounded(float16)", 6), ("compressed", 0), ("local", 0)):
        kinds = adapt_scenario(LAYERS, parse_claims(claims), seed=5).steps
        assert sum(kind.startswith("mostly_zero") for kind in kinds) == steps


def test_rows_of_an_embedding_cancel_out() -> None:
    for number in range(10):
        kind = f"mostly_zero/{number}"
        fed = [
            gradient(kind, (2000, 24), torch.float32, world=2, rank=rank, step=3, param=0)
            for rank in range(2)
        ]
        used = [(table != 0).any(1) for table in fed]
        assert all(0 < int(rows.sum()) < 1000 for rows in used)
        zero_sums = [rows & (table.sum(1) == 0) for rows, table in zip(used, fed, strict=True)]
        share = float(sum(zero_sums).sum() / sum(used).sum())
        assert 0 < share < 0.75
        missed = (used[0] | used[1]) & ~(used[0] & ~zero_sums[0]) & ~(used[1] & ~zero_sums[1])
        assert missed.any()
