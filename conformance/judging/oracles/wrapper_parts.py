"""Right modes, buffers and gradients of the parts of wrapped blocks.

Networks compute in float64, and are no deeper than those of ``judging/oracles/wrapper.py``, whose
bound of 2**-30 holds for them. Buffers of a norm in evaluation mode are only read: they are the
same numbers.
"""

from collections.abc import Mapping

from conformance.judging.oracles.wrapper import (
    Runs,
    pairs,
    require_same_results,
    subject_runs,
)
from conformance.judging.oracles.wrapper_training import without_steps
from conformance.judging.verdict import Found
from conformance.scenarios.wrapper_parts import share_in_parts
from conformance.subjects.claims import Claims


def require_same_parts(runs: Runs, claims: Claims, found: Found) -> None:
    """Require the results without the wrapper in the steps of ``wrapper_parts``.

    With the claim ``draws_anew`` this holds for the steps without dropout, and for outputs in all
    steps: parameters stay as they are.
    """
    if not claims.has("draws_anew"):
        require_same_results(runs, found)
        return
    require_same_results(runs, found, ("output",))
    for name, run, plain in pairs(runs):
        steps = range(len(run.scenario.steps))
        draws = {step for step in steps if share_in_parts(run.scenario, step)}
        both = {name: without_steps(run, draws), f"vanilla-{name}": without_steps(plain, draws)}
        require_same_results(both, found)


def require_kept_modes(runs: Runs, found: Found) -> None:
    """Require that each part of a network is in the mode after a step that it had before it."""
    for name in subject_runs(runs):
        for rank in runs[name].ranks:
            for event in rank.all("parts"):
                before = event["before"]
                after = event["after"]
                changed = [part for part, trains in before.items() if after[part] != trains]
                found.require(
                    not changed,
                    f"training={before[changed[0]]}, as before the step" if changed else "",
                    f"rank {rank.rank}, step {event['step']} of {name}: {_mode(changed, after)}",
                    "train() and eval() set the mode of all parts of a module",
                )


def _mode(changed: list[str], after: Mapping[str, bool]) -> str:
    """Return the mode of the first part, and the number of parts."""
    if not changed:
        return ""
    return f"{changed[0]}.training={after[changed[0]]} ({len(changed)} of {len(after)} parts)"


def require_frozen_buffers(runs: Runs, found: Found) -> None:
    """Require that buffers of norms in evaluation mode are those without the wrapper."""
    for name, run, plain in pairs(runs):
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            for key, right in other.tensors.items():
                step, quantity, buffer = key.split("/", 2)
                if quantity != "buffer":
                    continue
                got = rank.tensors.get(key)
                found.require(
                    got is not None and got.shape == right.shape and bool((got == right).all()),
                    "buffers that stay as they are, of a norm in evaluation mode",
                    f"rank {rank.rank}, step {step} of {name}: buffer {buffer} is another",
                    "the norm ran again in training mode, or the wrapper writes to buffers",
                )
