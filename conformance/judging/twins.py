"""Requirements on a model and its twin: another model with the same subject, in one process."""

from collections.abc import Iterable
from dataclasses import replace

from conformance.judging.oracles.clusters import twins_of
from conformance.judging.oracles.optimizer_claim import at_rate
from conformance.judging.requirements import require_optimizer, require_steps
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.learning_rates import rate_of_fused
from conformance.subjects.claims import Claims


def is_shared(run: Run, found: Found) -> bool:
    """Declare a rule not applicable if the twins share the subject on purpose; return whether."""
    if not any(rank.first("twin", one_object=True) for rank in run.ranks):
        return False
    found.does_not_apply(
        "the subject is one object, which both models would share; pass its class, or a function "
        "that makes it"
    )
    return True


def require_models_and_twins(run: Run, claims: Claims, found: Found) -> None:
    """Require the mean over the model's group in the model, and over the twins' in the twins.

    So it is with the parameters of a fused hook, at the rate that it claims or at that of the
    model's own optimizer; of a twin whose gradients are freed nothing is on record.
    """
    if is_shared(run, found):
        return
    steps = run.steps("crafted", "normal")
    if not require_steps(run, claims, found, steps):
        return
    if claims.fused:
        _require_optimizer(run, claims, found, of_twin=False)
    if claims.frees_gradients or found.failures:
        return
    for twins in twins_of(run):
        if require_steps(twins, claims, found, steps) and claims.fused:
            _require_optimizer(twins, claims, found, of_twin=True)
        if found.failures:
            found.failures[-1].actual += f" [of the model on {_listed(twins.members)}]"
            return


def _require_optimizer(run: Run, claims: Claims, found: Found, *, of_twin: bool) -> None:
    """Require the steps of the claimed optimizer, or the same at the rate of the trainer's
    optimizer for this model.
    """
    tries = {}
    rates = {is_twin: rate_of_fused(run.scenario, of_twin=is_twin) for is_twin in (True, False)}
    for rate in dict.fromkeys((run.scenario.fused_rate, rates[of_twin], rates[not of_twin])):
        tried = Found()
        require_optimizer(run, replace(claims, fused=at_rate(claims.fused, rate)), tried)
        tries[rate] = tried
        if not tried.failures:
            break
    holds = not tried.failures
    if holds and rate in (run.scenario.fused_rate, rates[of_twin]):
        found.checked(tried.checks)
        return
    # The rate of this model's optimizer shows the mistake best.
    found.failures += tries[rates[of_twin]].failures
    if holds:
        found.failures[-1].cause = "it was stepped at the rate of the other model's optimizer"


def _listed(members: Iterable[int]) -> str:
    return f"the group of ranks {', '.join(map(str, members))}"
