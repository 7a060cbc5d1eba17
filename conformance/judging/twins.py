"""Requirements on a model and its twin: another model with the same subject, in one process."""

from collections.abc import Iterable

from conformance.judging.oracles.clusters import twins_of
from conformance.judging.requirements import require_optimizer, require_steps
from conformance.judging.verdict import Found
from conformance.records.run import Run
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

    So it is with the parameters of a fused hook; of a twin whose gradients are freed nothing is on
    record.
    """
    if is_shared(run, found):
        return
    steps = run.steps("crafted", "normal")
    if not require_steps(run, claims, found, steps):
        return
    if claims.fused:
        require_optimizer(run, claims, found)
    if claims.frees_gradients or found.failures:
        return
    for twins in twins_of(run):
        if require_steps(twins, claims, found, steps) and claims.fused:
            require_optimizer(twins, claims, found)
        if found.failures:
            found.failures[-1].actual += f" [of the model on {_listed(twins.members)}]"
            return


def _listed(members: Iterable[int]) -> str:
    return f"the group of ranks {', '.join(map(str, members))}"
