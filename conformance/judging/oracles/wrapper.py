"""Right results of wrapped modules: those of the same network without the wrapper, in another run.

Each run of the subject has a vanilla run beside it, with the same inputs, parameters and seeds.
Both compute in float64. A tensor of the subject's run may differ from the vanilla one by a share
of the vanilla tensor's largest magnitude:

    2**-30    The networks are at most two hundred operations deep, with sums of at most 48 terms.
              In three steps another order of summation, for example after saved tensors come back
              with other strides, loses less than 2**-35, while float32 anywhere costs more than
              2**-25.
    2**-4     With autocast the first operation already rounds to 2**-9, and a few more follow.
    0         In 19.22, which compares bits.

If a wrapper breaks the graph, a step fails or lacks gradients, and the record of that rank ends
there. Every tensor is then compared up to that step. In the last step outputs and losses are still
comparable, but no gradients if some are missing: DDP has not averaged the others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from conformance.judging.verdict import Failure, Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.wrapper import AUTOCAST
from conformance.scenarios.wrapper_training import (
    BACKWARD_UNDER,
    FORWARD_UNDER,
    LONG,
    OTHER_FORWARD,
)
from conformance.subjects.claims import Claims

Runs = dict[str, Run]
Event = dict[str, Any]

# The order in which a step computes its tensors: the first difference explains the rest.
ORDER = ("output", "loss", "gradient", "input", "parameter")
# By the scenario's variant; the empty one stands for all others.
TOLERANCES = {"": 2.0**-30, AUTOCAST.variant: 2.0**-4}

_DESCRIPTIONS = {
    "output": "output ",
    "loss": "loss ",
    "gradient": "the gradient of ",
    "input": "the gradient of input ",
    "parameter": "",
}
_VANILLA = "vanilla-"


def subject_runs(runs: Runs) -> list[str]:
    """Return the names of the runs with the wrapper."""
    return [name for name in runs if not name.startswith(_VANILLA)]


def pairs(runs: Runs) -> Iterator[tuple[str, Run, Run]]:
    """Yield (name, the run with the wrapper, the same run without it).

    The run with the wrapper may have fewer steps; :func:`require_same_results` reports that.
    """
    for name in subject_runs(runs):
        yield name, runs[name], runs[f"{_VANILLA}{name}"]


def paired_events(runs: Runs, event: str) -> Iterator[tuple[str, Event, Event]]:
    """Yield (place, the event with the wrapper, the same event without it)."""
    for name, run, plain in pairs(runs):
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            for one, right in zip(rank.all(event), other.all(event), strict=False):
                yield f"rank {rank.rank}, step {one['step']} of {name}", one, right


def require_same_results(
    runs: Runs,
    found: Found,
    only: Sequence[str] = (),
    steps: int | None = None,
    tolerance: float | None = None,
    cause: str = "",
) -> None:
    """Require the results of the network without the wrapper, up to the tolerance.

    Of each rank the first difference is reported. ``only`` selects some of ``ORDER``, and ``steps``
    limits the steps that are compared. The values tell the cause of a difference, if none is given.
    """
    for name, run, plain in pairs(runs):
        default = TOLERANCES.get(run.scenario.variant, TOLERANCES[""])
        limit = default if tolerance is None else tolerance
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            place = f"rank {rank.rank} of {name}"
            refused = rank.first("refused")
            last = refused["step"] if refused else len(run.scenario.steps)
            keys = _comparable_keys(rank, other, last, only or ORDER, steps)
            failure = _first_difference(found, rank.tensors, other.tensors, keys, place, limit)
            if failure is not None:
                found.require(False, failure.expected, failure.actual, cause or failure.cause)
            elif refused:
                found.require(
                    False,
                    "a step like those without the wrapper",
                    f"{place}, step {last}: {refused['error']}",
                    "the graph ends at the wrapper" if refused["lacks"] else "",
                )


def require_same_bits(runs: Runs, found: Found) -> None:
    """Require the bits of results that 19.1 has found right up to the order of operations."""
    cause = "saved tensors come back with other strides, or are added up in another order"
    require_same_results(runs, found, tolerance=0.0, cause=cause)


def require_same_unless_reentrant(runs: Runs, claims: Claims, found: Found) -> None:
    """Require the same results; with the claim ``reentrant`` note the difference instead."""
    if not claims.has("reentrant"):
        require_same_results(runs, found)
        return
    trial = Found()
    require_same_results(runs, trial)
    found.does_not_apply("it claims to be reentrant, and 19.18 judges that claim")
    if trial.failures:
        found.note(f"it claims reentrant: {trial.failures[0].actual}")


def require_same_forms(runs: Runs, found: Found) -> None:
    """Require results of blocks of the type and the length that they have without the wrapper."""
    for place, event, right in paired_events(runs, "ran"):
        for block, form in right["results"].items():
            got = event["results"].get(block)
            found.require(
                got == form,
                f"{form} from {block}, as without the wrapper",
                f"{place}: {got}",
                "a result with one entry comes back as the entry" if got == "a Tensor" else "",
            )


def require_same_modes(runs: Runs, found: Found) -> None:
    """Require the same requires_grad of outputs in evaluation, and one autocast in both passes."""
    for name, run, plain in pairs(runs):
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            for event, right in zip(rank.all("evaluated"), other.all("evaluated"), strict=False):
                found.require(
                    event["asks"] == right["asks"],
                    f"requires_grad={right['asks']} of a block's output",
                    f"rank {rank.rank}, {event['what']} of {name}: requires_grad={event['asks']}",
                )
        for number, event in forwards(run):
            for phase, dtypes in event["autocast"].items():
                forward = phase.replace(BACKWARD_UNDER, FORWARD_UNDER)
                if forward == phase:
                    forward = "forward"
                wanted = event["autocast"].get(forward)
                if phase == OTHER_FORWARD or wanted is None:
                    continue
                found.require(
                    dtypes == wanted,
                    f"autocast to {', '.join(wanted)}, as in the forward",
                    f"rank {number}, step {event['step']} of {name}: "
                    f"autocast to {', '.join(dtypes)} in the {phase}",
                )


def require_new_states(runs: Runs, found: Found) -> None:
    """Require that no block runs again from a state of the generators from which it has run again
    in another step: it would draw the same numbers.
    """
    for name in subject_runs(runs):
        for rank in runs[name].ranks:
            seen: dict[tuple[str, str], int] = {}
            for event in rank.all("ran"):
                step = event["step"]
                for block, state in event.get("begins_at", {}).items():
                    earlier = seen.setdefault((block, state), step)
                    found.require(
                        earlier == step,
                        "other random numbers in the backward of each step",
                        f"rank {rank.rank}, step {step} of {name}: the recomputation of {block} "
                        f"begins with the same generator state as in step {earlier}",
                        "the generator is seeded before the forward runs again",
                    )


def require_same_hooks(runs: Runs, found: Found) -> None:
    """Require that every module hook fires as often as without the wrapper."""
    for place, event, right in paired_events(runs, "fired"):
        for hook in sorted({*right["hooks"], *event["hooks"]}):
            count = event["hooks"].get(hook, 0)
            wanted = right["hooks"].get(hook, 0)
            found.require(count == wanted, f"{wanted} times", f"{place}: {hook}: {count} times")


def require_no_saved_tensor_hooks(run: Run, found: Found, of_run: str, cause: str) -> None:
    """Require that no hook on saved tensors is in force after a step."""
    for rank in run.ranks:
        for event in rank.all("stepped"):
            found.require(
                not event["packs"],
                "no hook on saved tensors outside of the forward",
                f"rank {rank.rank}, step {event['step']}{of_run}: hooks on saved tensors are in "
                "force",
                cause,
            )


def require_recomputation(run: Run, found: Found, exactly: bool = True) -> None:
    """Require one forward of each block per pass, and no activation kept between the passes.

    Args:
        exactly: otherwise a forward may come without a backward, or a block run more than once; one
            forward of each block in the backward is required then, unless the batch has no rows.
    """
    if not exactly:
        _require_another_forward(run, found)
        return
    for rank, event in forwards(run):
        place = f"rank {rank}, step {event['step']}"
        for block in sorted(event["forward"]):
            for phase in ("forward", "backward"):
                count = event.get(phase, {}).get(block, 0)
                actual = f"{place}: {count} forwards of {block} in the {phase}"
                found.require(count == 1, f"one forward of {block} in the {phase}", actual)
        sizes = sorted(event["kept"].items())
        kept = ", ".join(f"{size} bytes of {block}" for block, size in sizes)
        found.require(
            not kept,
            "no activation of a block between forward and backward",
            f"{place}: {kept}",
            "the first graph is kept",
        )
    for record in run.ranks:
        for event in record.all("evaluated"):
            repeated = {block: count for block, count in event["runs"].items() if count != 1}
            counts = ", ".join(f"{count} of {block}" for block, count in repeated.items())
            actual = f"rank {record.rank}, step {event['step']}: {counts}"
            found.require(not repeated, f"one forward in {event['what']}", actual)


def _require_another_forward(run: Run, found: Found) -> None:
    """Require a forward of each block in the backward, and in that of each setting of autocast that
    has a backward of its own.
    """
    is_long = run.scenario.variant == LONG.variant
    for rank, event in forwards(run):
        if is_long and not run.scenario.params[0].shape[event["step"]]:
            continue
        backward_of = {"forward": "backward"}
        for phase in event:
            if phase.startswith(FORWARD_UNDER):
                own = phase.replace(FORWARD_UNDER, BACKWARD_UNDER)
                backward_of[phase] = own if own in event["autocast"] else "backward"
        for forward, backward in backward_of.items():
            lacking = [
                block for block in event.get(forward, {}) if not event.get(backward, {}).get(block)
            ]
            found.require(
                not lacking,
                f"another forward of each block in the {backward}",
                f"rank {rank}, step {event['step']}: no forward of {', '.join(lacking)} in the "
                f"{backward}",
                "a checkpoint is left out in some calls",
            )


def require_less_memory(runs: Runs, found: Found) -> None:
    """Require less kept memory than without the wrapper if blocks recompute, and none
    afterwards."""
    for name, run, plain in pairs(runs):
        for (rank, event), (_, right) in zip(forwards(run), forwards(plain), strict=False):
            place = f"rank {rank}, step {event['step']} of {name}"
            if event.get("backward"):
                kept = sum(event["kept"].values())
                without = sum(right["kept"].values())
                expected = f"less than the {without} bytes that are kept without the wrapper"
                found.require(kept < without, expected, f"{place}: {kept} bytes")
            left = sum(event["left"].values())
            found.require(
                not left,
                "no activation of a block after the backward",
                f"{place}: {left} bytes",
                "activations are never freed",
            )


def require_same_buffers(runs: Runs, found: Found, in_first_step: bool = False) -> None:
    """Require the buffers of the network without the wrapper, of the first step or of all."""
    for name, run, plain in pairs(runs):
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            wrong = []
            for key, right in other.tensors.items():
                got = rank.tensors.get(key)
                is_buffer = "/buffer/" in key and (not in_first_step or key.startswith("0/"))
                if is_buffer and (got is None or _differ(got, right)):
                    wrong.append(key)
            updated_again = any(key.endswith("num_batches_tracked") for key in wrong)
            found.require(
                not wrong,
                "buffers as without the wrapper",
                f"rank {rank.rank}, {wrong[0] if wrong else ''} of {name}: "
                f"{len(wrong)} buffers and steps differ",
                "they are updated again when the forward runs again" if updated_again else "",
            )


def require_compared(run: Run, found: Found, *prefixes: str) -> None:
    """Require equality of the values that ranks compared under names with one of these prefixes."""
    for rank in run.ranks:
        for event in rank.all("compared"):
            if event["what"].startswith(prefixes):
                got = event["got"]
                wanted = event["wanted"]
                found.require(
                    got == wanted,
                    _shortened(wanted, got) if wanted != [] else "no error and no difference",
                    f"rank {rank.rank}, {event['what']}: {_shortened(got, wanted)}",
                    prefix_cause(got, wanted) or _cause_of_keys(event),
                )


def forwards(run: Run) -> Iterator[tuple[int, Event]]:
    """Yield (rank, the record of a forward and its backward)."""
    for rank in run.ranks:
        for event in rank.all("ran"):
            yield rank.rank, event


def differing_elements(got: torch.Tensor, right: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return the indices at which two tensors of one shape differ by more than the tolerance.

    NaN is equal to NaN, and an infinity to itself.
    """
    got = got.reshape(-1).double()
    right = right.reshape(-1).double()
    finite = right[right.isfinite()]
    limit = tolerance * finite.abs().max() if len(finite) else 0.0
    is_same = (got == right) | (got.isnan() & right.isnan())
    return (~(is_same | ((got - right).abs() <= limit))).nonzero().flatten()


def prefix_cause(names: Any, wanted: Any) -> str:
    """Return the cause of names that are right but for a part that the wrapper has inserted."""
    if not (isinstance(names, list) and isinstance(wanted, list)):
        return ""
    if len(names) != len(wanted) or len(names) <= 2:
        return ""
    all_names = zip(map(str, names), map(str, wanted), strict=True)
    different = [(name, right) for name, right in all_names if name != right]
    are_longer = all(
        len(name) > len(right) and name.endswith(right.rpartition(".")[2])
        for name, right in different
    )
    if not different or not are_longer:
        return ""
    return (
        "the names have a part too many, such as the attribute under which the wrapper keeps the "
        "module"
    )


def _cause_of_keys(event: Event) -> str:
    """Return the cause of keys that are too many, or too few, for a buffer or an extra state."""
    names = event["got"]
    wanted = event["wanted"]
    if not event["what"].startswith("keys: ") or not isinstance(names, list):
        return ""
    lost = [name for name in wanted if name not in names]
    if lost and all(str(name).endswith("_extra_state") for name in lost):
        return "the extra states of modules are not saved"
    is_longer = not lost and len(names) > len(wanted)
    return "more is saved than the module saves" if is_longer else ""


def _differ(got: torch.Tensor, right: torch.Tensor) -> bool:
    return got.shape != right.shape or len(differing_elements(got, right, TOLERANCES[""])) > 0


def _comparable_keys(
    rank: RankRecord, other: RankRecord, last: int, only: Sequence[str], steps: int | None
) -> list[str]:
    """Return the keys of the tensors to compare; ``last`` is the step at which the record ends."""
    keys = {*other.tensors, *rank.tensors}
    comparable = [key for key in _in_order(keys, only) if _step(key) < (steps or last)]
    refused = rank.first("refused")
    if refused:
        of_last = only
        if refused["lacks"]:
            of_last = [quantity for quantity in only if quantity in ("output", "loss")]
        comparable += [key for key in _in_order(rank.tensors, of_last) if _step(key) == last]
    return comparable


def _step(key: str) -> int:
    return int(key.partition("/")[0])


def _in_order(keys: Iterable[str], only: Sequence[str]) -> list[str]:
    """Return the keys ``step/quantity/name`` of some quantities in the order of computation."""

    def position(key: str) -> tuple[int, int, str]:
        _, quantity, name = key.split("/", 2)
        return _step(key), ORDER.index(quantity), name

    return sorted((key for key in keys if key.split("/")[1] in only), key=position)


def _first_difference(
    found: Found,
    tensors: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    keys: Sequence[str],
    place: str,
    tolerance: float,
) -> Failure | None:
    """Return the first difference of two ranks, and count the tensors before it."""
    for key in keys:
        failure = _difference(tensors, plain, key, place, tolerance)
        if failure is not None:
            return failure
        found.checked(1)
    return None


def _difference(
    tensors: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    key: str,
    place: str,
    tolerance: float,
) -> Failure | None:
    """Return the failure of one tensor, or None if it is right."""
    step, quantity, name = key.split("/", 2)
    place = f"{place}, step {step}"
    description = f"{_DESCRIPTIONS[quantity]}{name}"
    got = tensors.get(key)
    right = plain.get(key)
    if right is None:
        is_zero = got is not None and not got.any()
        return Failure(
            "none, as without the wrapper",
            f"{place}: there is {description}",
            "zeros in place of no gradient, as of a part that the forward did not use"
            if is_zero
            else "",
        )
    if got is None:
        return Failure(
            f"{description}, as without the wrapper",
            f"{place}: {description}: there is none",
            "the graph ends at the wrapper",
        )
    if got.dtype != right.dtype or got.shape != right.shape:
        return Failure(
            f"{description}: {right.dtype} of shape {tuple(right.shape)}",
            f"{place}: {got.dtype} of shape {tuple(got.shape)}",
        )
    wrong = differing_elements(got, right, tolerance)
    if not len(wrong):
        return None
    got = got.reshape(-1)
    right = right.reshape(-1)
    index = int(wrong[0])
    return Failure(
        f"{right[index].item():.17g}, as without the wrapper",
        f"{place}: {description}, index {index}: {got[index].item():.17g} "
        f"({len(wrong)} of {len(got)} elements differ)",
        _cause(quantity, got, right),
    )


def _cause(quantity: str, got: torch.Tensor, right: torch.Tensor) -> str:
    """Return the known mistake that gives these values, or an empty text if none does."""
    if quantity in ("output", "loss"):
        return "the forward itself differs"
    if not got.any():
        return "all zeros: the graph ends at the wrapper"
    if torch.allclose(got, 2 * right, rtol=1e-5, atol=0.0):
        return "twice as much: it is added once in each of two backwards"
    if quantity in ("gradient", "input"):
        return "outputs are right: the backward uses other values than the forward has computed"
    return ""


def _shortened(one: Any, other: Any) -> str:
    """Return a value as text; of a long list only its items that the other list lacks, or the first
    item that is at another place.
    """
    if not (isinstance(one, list) and isinstance(other, list) and len(one) > 2):
        return str(one)
    different = [str(item) for item in one if item not in other]
    if not different:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        at = len(list(same))
        return f"{one[at]} as number {at + 1}" if at < len(one) else f"{len(one)} items"
    more = ", ..." if len(different) > 3 else ""
    return f"{', '.join(different[:3])}{more}"
