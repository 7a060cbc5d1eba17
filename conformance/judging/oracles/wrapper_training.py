"""Right results and memory of wrapped modules in float32 training.

Results are those of the same network without the wrapper, which another process has computed by the
same operations. A tensor may differ by a share of the right tensor's largest magnitude, since a
right wrapper may run kernels that add in another order, for example after saved tensors come back
with other strides. The unit roundoff u of float32 is 2**-24.

    2**-20    ``wrapper_large``: every element is computed for itself, by fewer than 16 operations
              from the input to its gradient. Another kernel rounds each of them once: 16 u.
    0         ``wrapper_ranges``, ``wrapper_complex``: all results are exact
              (``drivers/_exact_factors.py``, ``drivers/_turning_blocks.py``), so that every element
              has to be the same number, whatever its magnitude.
    2**-14    The other networks: a sum has at most 16 terms. Two orders of it differ by at most
              2 * 15 u of the sum of magnitudes, which is about twice the largest magnitude of the
              result or less: 60 u, below 2**-18. From output to input there are ten such sums in
              three blocks. None of them cancels, since there is no softmax, and residual
              connections keep the factor of a block near 1: ten times 2**-18 is below 2**-14. The
              block and the four layers of ``wrapper_long`` have eight, and the three blocks of
              ``wrapper_retained`` and their layer have twelve. So have ``wrapper_single`` and
              ``wrapper_graphs`` with a block whose linear layer is cut: its sum in the backward has
              at most 32 terms and counts twice, so that they are thirteen. A
              saved tensor in float16 costs 2**-11 of each element, and one in bfloat16 2**-8. The
              rows of layers of ``wrapper_single`` have no sums: their 41 layers or fewer round each
              element 123 times, which is 2**-17. Its convolutions have inputs of their own. Four
              sums of at most 18 terms follow each other, 2**-15.9, and the gradient of a weight is
              one of at most 64 terms. Of random ones the sum of magnitudes is about 3.2 times the
              largest magnitude of the result, so that 126 u of it are 403 u, 2**-15.3. Together
              these are below 2**-14. So are its expanded tensors: three sums of at most 16 terms
              follow each other, and the gradient of a matrix has at most 20. The blocks of
              ``wrapper_written`` that change a product have twelve sums.
    2**-12    With a gradient penalty, which differentiates these twice: the first derivative has
              errors of 2**-14, the second has as many again, and the square doubles them. If the
              gradient of one input is asked for alone, 2**-14 again.
    2**-6     In float16 by autocast another order changes a result by one unit in its last place,
              2**-10 of the element, and ten operations follow each other.
    2**-3     The same in bfloat16, whose unit is 2**-7.

Memory is that in use by the C library's allocator. It is compared with the memory of the run
without the wrapper, so that gradients and results count nothing. A quarter of the smallest large
activation, 2**17 bytes or more, is allowed for objects of Python and for states of generators
(5,056 bytes each). The first step is small, so that libraries are loaded by then.
"""

from collections.abc import Collection
from dataclasses import replace

from conformance.judging.oracles.wrapper import (
    Event,
    Runs,
    forwards,
    pairs,
    require_same_results,
)
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.wrapper_graphs import GRAPHS, share_in_graphs
from conformance.scenarios.wrapper_training import (
    COMPLEX,
    HALF,
    LARGE,
    PENALTY,
    RANGES,
    first_with_dropout,
    has_replaced,
    has_settings,
    has_trained_input,
    order_of_writing,
)
from conformance.subjects.claims import Claims

SHORT_SUMS = 2.0**-14
# By the scenario's variant.
TOLERANCES = {
    LARGE.variant: 2.0**-20,
    RANGES.variant: 0.0,
    COMPLEX.variant: 0.0,
    PENALTY.variant: 2.0**-12,
    HALF.variant: 2.0**-6,
}
# By the setting of autocast, if forwards under several have graphs at once; '' are parameters.
# float16 has the tolerance of HALF. bfloat16 has three bits less, 8 for 11: its is 2**3 as large.
_OF_SETTINGS = {"float32": SHORT_SUMS, "float16": 2.0**-6, "bfloat16": 2.0**-3, "": 2.0**-3}
# The bytes of a number in float32.
_BYTES = 4


def require_same_training(runs: Runs, found: Found, steps: int | None = None) -> None:
    """Require the results of the network without the wrapper, up to the bounds of this module."""
    for name, run, plain in pairs(runs):
        tolerance = TOLERANCES.get(run.scenario.variant, SHORT_SUMS)
        both = {name: run, f"vanilla-{name}": plain}
        require_same_results(both, found, steps=steps, tolerance=tolerance)


def require_same_half(runs: Runs, found: Found) -> None:
    """Require the results without the wrapper under autocast.

    If forwards under several settings have graphs at once, each has the bound of its own dtype, and
    gradients of parameters have the widest, since they are sums of all.
    """
    for name, run, plain in pairs(runs):
        steps = range(len(run.scenario.steps))
        together = {step for step in steps if has_settings(step)}
        both = {
            name: without_steps(run, together),
            f"vanilla-{name}": without_steps(plain, together),
        }
        require_same_training(both, found)
        for end, tolerance in _OF_SETTINGS.items():
            both = {
                key: _with_end(without_steps(one, {*steps} - together), end)
                for key, one in ((name, run), (f"vanilla-{name}", plain))
            }
            require_same_results(both, found, tolerance=tolerance)


def _with_end(run: Run, end: str) -> Run:
    """Return a run with the tensors of one setting; those of parameters if ``end`` is empty."""
    ranks = [
        replace(
            rank,
            tensors={
                key: tensor
                for key, tensor in rank.tensors.items()
                if (key.rpartition("/")[2] if "/gradient/" not in key else "") == end
            },
        )
        for rank in run.ranks
    ]
    return replace(run, ranks=ranks)


def require_same_long_run(runs: Runs, claims: Claims, found: Found) -> None:
    """Require the results of a long run without the wrapper.

    With the claim ``draws_anew`` the gradients of steps with dropout are others. Parameters stay as
    they are, so that outputs are the same in all steps.
    """
    if not claims.has("draws_anew"):
        require_same_training(runs, found)
        return
    for name, run, plain in pairs(runs):
        both = {name: run, f"vanilla-{name}": plain}
        first = first_with_dropout(run.scenario)
        require_same_results(both, found, steps=first, tolerance=SHORT_SUMS)
        require_same_results(both, found, ("output",), tolerance=SHORT_SUMS)


def require_same_graphs(runs: Runs, claims: Claims, found: Found) -> None:
    """Require the results of graphs without the wrapper.

    With the claim ``draws_anew`` the gradients of steps with dropout are others. The generator is
    seeded before each forward of these steps, so that outputs are the same.
    """
    if not claims.has("draws_anew"):
        require_same_training(runs, found)
        return
    for name, run, plain in pairs(runs):
        steps = {
            step
            for step in range(len(run.scenario.steps))
            if run.scenario.variant == GRAPHS.variant and share_in_graphs(run.scenario, step)
        }
        both = {name: without_steps(run, steps), f"vanilla-{name}": without_steps(plain, steps)}
        require_same_training(both, found)
        both = {name: run, f"vanilla-{name}": plain}
        require_same_results(both, found, ("output",), tolerance=SHORT_SUMS)


def require_all_batches(runs: Runs, found: Found) -> None:
    """Require that each forward has counted in the buffers of blocks.

    A forward that runs again may count again: torch's checkpoints leave buffers to it.
    """
    for name, run, plain in pairs(runs):
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            for key, right in other.tensors.items():
                if "/buffer/" not in key:
                    continue
                step, _, buffer = key.split("/", 2)
                place = f"rank {rank.rank}, step {step} of {name}: buffer {buffer}"
                got = rank.tensors.get(key)
                if got is None or got.shape != right.shape:
                    found.require(False, f"a buffer of shape {tuple(right.shape)}", place)
                    continue
                for rows in (got < right).nonzero().flatten().tolist()[:1]:
                    found.require(
                        False,
                        f"{int(right[rows])} batches of {rows} rows, as counted, or more",
                        f"{place}: {int(got[rows])}",
                        "buffers are set back to a forward before another one",
                    )
                found.checked(1)


def require_same_or_refused(runs: Runs, found: Found, steps_compared: int | None = None) -> None:
    """Require the same results unless the wrapper raises an error, which a note then quotes.

    Args:
        runs: the runs.
        found: receives the findings.
        steps_compared: limits the steps that are compared.

    A run may end with an error, or leave out steps by one; the steps before it are compared. An
    error that there is without the wrapper too is not worth a note.
    """
    errors: list[str] = []
    for name, run, plain in pairs(runs):
        refused = [event for rank in run.ranks for event in rank.all("refused")]
        declined = [event for rank in run.ranks for event in rank.all("declined")]
        own = [event for event in declined if not event["as_without"]]
        for event in (*refused, *own)[:1]:
            errors.append(event["error"])
            _note_error(name, event, found)
        steps = {event["step"] for event in declined}
        if refused:
            first = min(event["step"] for event in refused)
            steps |= {*range(first, len(run.scenario.steps))}
        both = {name: without_steps(run, steps), f"vanilla-{name}": without_steps(plain, steps)}
        require_same_training(both, found, steps=steps_compared)
    if errors and not found.checks:
        found.does_not_apply(f"the wrapper refuses it: {errors[0]}")


def _note_error(name: str, event: Event, found: Found) -> None:
    found.note(f"{name}: the wrapper raises {event['error']}")


def require_same_frozen(runs: Runs, claims: Claims, found: Found) -> None:
    """Require the results without the wrapper in the steps of ``wrapper_frozen``.

    With the claim ``reentrant`` a step is left out if no input requires a gradient. If parameters
    are others than those of the module that was wrapped, an error is an answer.
    """
    for name, run, plain in pairs(runs):
        steps = range(len(run.scenario.steps))
        left_out = {
            step for step in steps if claims.has("reentrant") and not has_trained_input(step)
        }
        for rank in run.ranks:
            for event in rank.all("declined"):
                step = event["step"]
                if step in left_out:
                    continue
                left_out.add(step)
                if has_replaced(step):
                    _note_error(name, event, found)
                    continue
                found.require(
                    False,
                    "a step like those without the wrapper",
                    f"rank {rank.rank} of {name}, step {step}: {event['error']}",
                )
        both = {
            name: without_steps(run, left_out),
            f"vanilla-{name}": without_steps(plain, left_out),
        }
        require_same_training(both, found)


def without_ways(runs: Runs, left_out: Collection[str]) -> Runs:
    """Return runs of ``wrapper_written`` without the steps of some ways to change tensors."""
    return {
        name: without_steps(
            run,
            {
                step
                for step, (way, _) in enumerate(order_of_writing(run.scenario))
                if way in left_out
            },
        )
        for name, run in runs.items()
    }


def runs_again(runs: Runs) -> bool:
    """Whether a block of the subject has run again in a backward."""
    return any(event.get("backward") for _, run, _ in pairs(runs) for _, event in forwards(run))


def without_steps(run: Run, steps: set[int]) -> Run:
    """Return a run without the tensors and the refusals of some steps."""
    ranks = [
        replace(
            rank,
            events=[
                event
                for event in rank.events
                if event["event"] not in ("declined", "refused") or event["step"] not in steps
            ],
            tensors={
                key: tensor
                for key, tensor in rank.tensors.items()
                if int(key.partition("/")[0]) not in steps
            },
        )
        for rank in run.ranks
    ]
    return replace(run, ranks=ranks)


def require_memory_back(runs: Runs, claims: Claims, found: Found) -> None:
    """Require that steps keep no memory, and recomputation less than no wrapper at all."""
    for name, run, plain in pairs(runs):
        sizes = [param.shape[0] for param in run.scenario.params]
        slack = min(sizes) * _BYTES // 4
        repeats = {rank for rank, event in forwards(run) if event.get("backward")}
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            if not _measured(rank) or not _measured(other):
                found.lacks_evidence("this C library does not tell its memory in use")
                return
            place = f"rank {rank.rank} of {name}"
            _require_no_growth(rank, other, slack, claims.has("recomputes"), place, found)
            if rank.rank in repeats:
                _require_less(rank, other, claims.has("recomputes"), place, found)


def _require_no_growth(
    rank: RankRecord, other: RankRecord, slack: int, at_once: bool, place: str, found: Found
) -> None:
    """Require that memory after each step is that before it.

    A wrapper that moves tensors may keep a pool of memory, which it fills in the first large step
    and uses again. One that claims to recompute has nothing to keep (``at_once``).
    """
    for event, right in zip(rank.all("memory"), other.all("memory"), strict=True):
        if event["step"] < (1 if at_once else 2):
            continue
        grown = event["after"] - event["before"] - (right["after"] - right["before"])
        found.require(
            grown <= slack,
            f"{slack} bytes more after a step than without the wrapper at most",
            f"{place}, step {event['step']}: {grown} bytes more",
            "copies of activations are kept after the backward",
        )


def _require_less(
    rank: RankRecord, other: RankRecord, claimed: bool, place: str, found: Found
) -> None:
    """Require less memory between forward and backward than without the wrapper.

    Without it a block keeps an output and four activations of its size. One that recomputes needs
    the output, and at most a copy of the input: two of five.
    """
    for event, right in zip(rank.all("memory"), other.all("memory"), strict=True):
        if not event["step"]:
            continue
        kept = event["between"] - event["before"]
        without = right["between"] - right["before"]
        share = "half of " if claimed else ""
        found.require(
            kept < (without // 2 if claimed else without),
            f"less than {share}the {without} bytes that are kept without the wrapper",
            f"{place}, step {event['step']}: {kept} bytes between forward and backward",
            "copies of activations are kept beside the recomputed ones",
        )


def _measured(rank: RankRecord) -> bool:
    return all(event["after"] for event in rank.all("memory"))
