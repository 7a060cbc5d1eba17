"""Requirements on an optimizer wrapper whose parameters are all of half precision."""

from conformance.judging.oracles.optimizer import require_right
from conformance.judging.oracles.optimizer_steps import result, right_steps, steps
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.optimizer_gradients import has_gradient
from conformance.scenarios.optimizer_training import is_closed


def require_kept_in_half(run: Run, found: Found) -> None:
    """Require that parameters without a gradient on any rank keep their bits in a step.

    Steps in which an averager averages them are left out.
    """
    right = right_steps(run)
    for rank, step in steps(run):
        if step == 0 or right[rank, step].averaged:
            continue
        for index, spec in enumerate(run.scenario.params):
            if _has_gradient(run, step, index):
                continue
            found.checked(1)
            before = result(run, rank, step - 1, index)
            moved = (result(run, rank, step, index) - before).abs()
            found.require(
                not moved.any(),
                "the bits from before the step: no rank has a gradient",
                f"rank {rank}, step {step}: p{index}, of {spec.dtype}, was moved by up to "
                f"{moved.max():.3g}",
            )


def require_right_in_half(run: Run, found: Found, *, closed: bool) -> None:
    """Require right steps of parameters with a gradient, with a closure or without one."""

    def is_judged(step: int, index: int) -> bool:
        is_of_kind = is_closed(run.scenario, step) is closed
        return is_of_kind and _has_gradient(run, step, index)

    require_right(run, found, is_judged)


def _has_gradient(run: Run, step: int, index: int) -> bool:
    return has_gradient(run.scenario, run.world, None, step, index)
