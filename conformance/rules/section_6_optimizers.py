"""Section 6: models train under the hook as they do under vanilla DDP, whatever steps them."""

import torch

from conformance import lossy, oracle
from conformance.claims import LOCAL, Claims
from conformance.probe import lay_out
from conformance.recipe import Recipe
from conformance.rulebook import rule
from conformance.run import Run
from conformance.scenario import OPTIMIZERS
from conformance.verdict import Found


class _Replay:
    """What one rank's parameters are, step by step, where the optimizers are given the gradients that are right."""

    def __init__(self, run: Run, rank: int, claims: Claims) -> None:
        self._run, self._rank, self._claims = run, rank, claims
        self.parameters = [torch.nn.Parameter(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in run.scenario.params]
        self._recipe = Recipe(self.parameters)

    @property
    def scale(self) -> int:
        return self._recipe.scale

    def step(self, step: int) -> bool:
        """Step with the mean, or where the result is lossy with what DDP left; returns whether there is one."""
        for index, parameter in enumerate(self.parameters):
            if self._claims.lossy:
                grad = self._run.got(self._rank, step, index)
            else:
                grad = oracle.expected(self._run, self._rank, step, index, self._claims)[0] * self.scale
            if grad is None:
                return False
            parameter.grad = lay_out(grad.to(parameter.dtype).reshape(parameter.shape), "contiguous")
        self._recipe.step()
        return True


def _require_steps(run: Run, claims: Claims, found: Found, overflow: bool) -> None:
    """Require parameters of the right bits before the step that overflows, or in it and after it."""
    first = run.steps("inf")[0]
    for rank in run.ranks:
        replay = _Replay(run, rank.rank, claims)
        for step in range(len(run.scenario.steps)):
            where = f"rank {rank.rank}, step {step}"
            if not found.require(replay.step(step), "gradients", f"{where}: a parameter has none"):
                return
            if (step >= first) is not overflow:
                continue
            model = rank.first("model", step=step)
            scale = model["scale"] if model else "none"
            if not found.require(scale == replay.scale, f"a loss scale of {replay.scale} after step {step}", f"{where}: {scale}"):
                return
            for index, right in enumerate(replay.parameters):
                name = run.parameter_name(index)
                now = rank.tensors[f"{step}/parameter/{name}"]
                wrong = ((now != right.detach()) & ~(now.isnan() & right.isnan())).reshape(-1).nonzero()
                at = int(wrong[0]) if len(wrong) else 0
                said = f"{now.reshape(-1)[at].item():.9g} instead of {right.detach().reshape(-1)[at].item():.9g}"
                what = f"{len(wrong)} of {now.numel()} elements are wrong; element {at} is {said}"
                if not found.require(not len(wrong), "parameters as vanilla DDP and the optimizer leave them", f"{where}, {name}: {what}"):
                    return
                found.checked(now.numel())


@rule(
    "6.1",
    "models train as under vanilla DDP",
    on=(OPTIMIZERS,),
    owns=(OPTIMIZERS,),
    needs=("2.1", "1.8", "8.2"),
    since="1.3",
    source="torch documentation, torch.optim, torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler",
    remedy="what is registered on the optimizer or on torch.optim.Optimizer; a result that changes after backward",
)
def parity(run: Run, claims: Claims, found: Found) -> None:
    """Under SGD, momentum, Nesterov, Adam, AdamW and Adagrad, with two groups each, weight decay, a schedule, scaled and
    clipped gradients, all parameters have the bits that vanilla DDP gives them, after every step.

    Where results are lossy: those that the optimizers make of what the hook returned.
    """
    if claims.fused:
        found.does_not_apply("the hook steps the parameters: 13.6 says how")
        return
    _require_steps(run, claims, found, overflow=False)


@rule(
    "6.2",
    "an overflow on one rank skips the step on all",
    on=(OPTIMIZERS,),
    needs=("6.1",),
    since="1.3",
    source="torch documentation, torch.amp.GradScaler: every rank has to skip the same steps",
    remedy="values that are clamped or replaced from some step on; state that keeps an infinity",
)
def overflow(run: Run, claims: Claims, found: Found) -> None:
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
    first = run.steps("inf")[0]
    for rank in run.ranks:
        before, after = rank.first("model", step=first - 1), rank.first("model", step=first)
        skipped = bool(before and after and after["scale"] < before["scale"])
        if not found.require(skipped, "a step that is skipped", f"rank {rank.rank}, step {first}: the scaler found no overflow"):
            return
    if claims.lossy:
        lossy.require_finite(run, found, list(range(first + 1, len(run.scenario.steps))))
    _require_steps(run, claims, found, overflow=True)
