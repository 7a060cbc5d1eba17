"""Section 6: models train under the hook as they do under vanilla DDP, whatever steps them."""

from conformance.judging.oracles import lossy
from conformance.judging.requirements import require_same
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import OPTIMIZERS
from conformance.subjects.claims import LOCAL, Claims


def _require_parity(runs: dict[str, Run], found: Found, steps: range) -> None:
    """Require the parameters of vanilla DDP after each of ``steps``, bit for bit, and its loss scale."""
    subject, vanilla = runs.values()
    for ours, theirs in zip(subject.ranks, vanilla.ranks, strict=True):
        for step in steps:
            (one, other), where = (rank.first("model", step=step) for rank in (ours, theirs)), f"rank {ours.rank}, step {step}"
            scales = [model and model["scale"] for model in (one, other)]
            if not found.require(scales[0] == scales[1], f"a loss scale of {scales[1]}, as under vanilla DDP", f"{where}: {scales[0]}"):
                return
            before = len(found.failures)
            mine, its = (
                {name: value for name, value in rank.tensors.items() if name.startswith(f"{step}/parameter/")} for rank in (ours, theirs)
            )
            require_same(mine, its, f"the hook's and vanilla DDP's on rank {ours.rank}", found)
            if len(found.failures) > before:
                return


@rule(
    "6.1",
    "models train as under vanilla DDP",
    on=(OPTIMIZERS,),
    owns=(OPTIMIZERS,),
    reads_all_runs=True,
    baseline="vanilla",
    needs=("2.1", "1.8", "1.10", "2.3", "3.2", "8.2", "9.2", "9.5"),
    since="1.3",
    source="torch documentation, torch.optim, torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler",
    remedy="what is registered on the optimizer or on torch.optim.Optimizer; a result that changes after backward; a step that "
    "finds gradients of zeros where others find none",
)
def parity(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under SGD, momentum, Nesterov, Adam, AdamW and Adagrad, with two groups each, weight decay, a schedule, scaled and
    clipped gradients, all parameters have the bits that vanilla DDP gives them, after every step.

    The gradients are crafted, so that no rounding can excuse a difference.
    """
    if why := _why_not(claims):
        found.does_not_apply(why)
        return
    _require_parity(runs, found, range(next(iter(runs.values())).steps("inf")[0]))


@rule(
    "6.2",
    "an overflow on one rank skips the step on all",
    on=(OPTIMIZERS,),
    reads_all_runs=True,
    baseline="vanilla",
    needs=("6.1",),
    since="1.3",
    source="torch documentation, torch.amp.GradScaler: every rank has to skip the same steps",
    remedy="values that are clamped or replaced from some step on; state that keeps an infinity",
)
def overflow(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Where a gradient overflows on one rank, GradScaler skips the step and halves the scale on every rank, and the steps after
    it are right.

    Where results are lossy: the steps after it are taken with finite gradients.
    """
    if claims.fused:
        found.does_not_apply("the hook has stepped before a scaler can skip the step")
        return
    if claims.lossy == LOCAL:
        found.does_not_apply("a rank need not hear of another's overflow: use no loss scale, or agree on it")
        return
    run = next(iter(runs.values()))
    first = run.steps("inf")[0]
    for rank in run.ranks:
        before, after = rank.first("model", step=first - 1), rank.first("model", step=first)
        skipped = bool(before and after and after["scale"] < before["scale"])
        if not found.require(skipped, "a step that is skipped", f"rank {rank.rank}, step {first}: the scaler found no overflow"):
            return
    if _why_not(claims):
        lossy.require_finite(run, found, list(range(first + 1, len(run.scenario.steps))))
    else:
        _require_parity(runs, found, range(first, len(run.scenario.steps)))


def _why_not(claims: Claims) -> str:
    """Why parameters cannot be those of vanilla DDP, or ''."""
    if claims.fused:
        return "the hook steps the parameters: 13.6 says how"
    if claims.sum:
        return "the trainer divides what the hook has summed"
    return f"under {claims} rules 13.1 to 13.5 say what is right" if claims.lossy else ""
