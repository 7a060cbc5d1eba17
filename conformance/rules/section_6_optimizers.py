"""Section 6: models train under the hook as under vanilla DDP, with any optimizer."""

import torch

from conformance.judging.oracles import lossy
from conformance.judging.requirements import require_same
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.hook import OPTIMIZERS
from conformance.subjects.claims import LOCAL, Claims


def _require_parity(runs: dict[str, Run], found: Found, steps: range) -> None:
    """Require the parameters and the loss scale of vanilla DDP after each of ``steps``."""
    subject, vanilla = runs.values()
    for ours, theirs in zip(subject.ranks, vanilla.ranks, strict=True):
        for step in steps:
            before = len(found.failures)
            _require_equal_step(ours, theirs, step, found)
            if len(found.failures) > before:
                return


def _require_equal_step(ours: RankRecord, theirs: RankRecord, step: int, found: Found) -> None:
    scale = _loss_scale(ours, step)
    wanted = _loss_scale(theirs, step)
    expected = f"a loss scale of {wanted}, as under vanilla DDP"
    actual = f"rank {ours.rank}, step {step}: {scale}"
    if found.require(scale == wanted, expected, actual):
        pair = f"the hook's and vanilla DDP's on rank {ours.rank}"
        require_same(_parameters(ours, step), _parameters(theirs, step), pair, found)


def _loss_scale(rank: RankRecord, step: int) -> float | None:
    model = rank.first("model", step=step)
    return model["scale"] if model else None


def _parameters(rank: RankRecord, step: int) -> dict[str, torch.Tensor]:
    prefix = f"{step}/parameter/"
    return {name: value for name, value in rank.tensors.items() if name.startswith(prefix)}


def _reason_without_parity(claims: Claims) -> str | None:
    """Return why the parameters cannot be those of vanilla DDP, or None if they can."""
    if claims.fused:
        return "the hook steps the parameters, which 13.6 judges"
    if claims.sum:
        return "the trainer divides the sums of the hook"
    if claims.scaled:
        return "gradients that are not exact give other parameters; 2.1 and 2.2 judge them"
    if claims.lossy:
        return f"replaced by rules 13.1 to 13.5, because the subject claims {claims}"
    return None


@rule(
    "6.1",
    "Trains models as vanilla DDP does",
    on=(OPTIMIZERS,),
    owns=(OPTIMIZERS,),
    reads_all_runs=True,
    baseline="vanilla",
    needs=("2.1", "1.8", "1.10", "2.3", "3.2", "8.2", "9.2", "9.5"),
    since="1.3",
    source="torch documentation, torch.optim, torch.nn.utils.clip_grad_norm_ and "
    "torch.amp.GradScaler",
    remedy="hooks registered on the optimizer or on torch.optim.Optimizer; a result that changes "
    "after backward; a step that finds gradients of zeros instead of none",
)
def parity(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under SGD, momentum, Nesterov, Adam, AdamW and Adagrad, with two groups each, weight decay, a
    schedule, scaled and clipped gradients, all parameters have the bits that vanilla DDP gives
    them, after every step.

    The gradients are crafted, so that no rounding can excuse a difference.
    """
    if reason := _reason_without_parity(claims):
        found.does_not_apply(reason)
        return
    overflow_step = next(iter(runs.values())).steps("inf")[0]
    _require_parity(runs, found, range(overflow_step))


@rule(
    "6.2",
    "Skips a step on all ranks if one overflows",
    on=(OPTIMIZERS,),
    reads_all_runs=True,
    baseline="vanilla",
    needs=("6.1",),
    since="1.3",
    source="torch documentation, torch.amp.GradScaler: every rank has to skip the same steps",
    remedy="values that are clamped or replaced from some step on; state that keeps an infinity",
)
def overflow(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """When a gradient overflows on one rank, GradScaler skips the step and halves the scale on
    every rank, and the later steps are right.

    Later steps of a lossy subject have finite gradients.
    """
    if claims.fused:
        found.does_not_apply("the hook has stepped before a scaler can skip the step")
        return
    if claims.lossy == LOCAL:
        found.does_not_apply(
            "a rank need not learn of an overflow on another: use no loss scale, or agree on one"
        )
        return
    run = next(iter(runs.values()))
    first = run.steps("inf")[0]
    for rank in run.ranks:
        before = _loss_scale(rank, first - 1)
        after = _loss_scale(rank, first)
        is_skipped = before is not None and after is not None and after < before
        actual = f"rank {rank.rank}, step {first}: the scaler found no overflow"
        if not found.require(is_skipped, "a skipped step", actual):
            return
    later = range(first + 1, len(run.scenario.steps))
    if _reason_without_parity(claims):
        lossy.require_finite(run, found, list(later))
    else:
        _require_parity(runs, found, range(first, later.stop))
