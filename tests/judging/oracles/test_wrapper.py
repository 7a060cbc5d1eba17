"""The messages on wrapped modules, on records written by hand."""

from dataclasses import replace
from typing import Any

import expecttest
import torch

from conformance.judging.oracles import wrapper, wrapper_training
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.wrapper import PLAIN, RANDOM
from tests.made_runs import event, read_failures, refused

Tensors = dict[str, torch.Tensor]


def run(*events: dict[str, Any], tensors: Tensors | None = None) -> Run:
    """Return a run of one rank."""
    return Run(PLAIN, 1, [RankRecord(0, list(events), tensors or {}, exit=0)])


def results(tensors: Tensors, plain: Tensors, *events: dict[str, Any]) -> str:
    """Return the failures of tensors beside those without the wrapper."""
    found = Found()
    runs = {"plain@1": run(*events, tensors=tensors), "vanilla-plain@1": run(tensors=plain)}
    wrapper.require_same_results(runs, found)
    return read_failures(found.failures)


def test_the_first_difference_of_the_results_is_described() -> None:
    ones = torch.ones(2, 3)
    refused = event("refused", 0, error="RuntimeError: no graph", lacks=["p0"])
    expecttest.assert_expected_inline(
        "\n".join(
            (
                results({"0/output/0": ones}, {}),
                results({}, {"0/gradient/p0": ones}),
                results({"0/output/0": ones.double()}, {"0/output/0": ones}),
                results({"0/output/0": 3 * ones}, {"0/output/0": ones}),
                results({"0/gradient/p0": 0 * ones}, {"0/gradient/p0": ones}),
                results({"0/gradient/p0": 2 * ones}, {"0/gradient/p0": ones}),
                results({"0/input/0": 3 * ones}, {"0/input/0": ones}),
                results({"0/parameter/p0": 3 * ones}, {"0/parameter/p0": ones}),
                results({}, {}, refused),
            )
        ),
        """\
Expected: none, as without the wrapper
Actual: rank 0 of plain@1, step 0: there is output 0
Expected: the gradient of p0, as without the wrapper
Actual: rank 0 of plain@1, step 0: the gradient of p0: there is none
Likely cause: the graph ends at the wrapper
Expected: output 0: torch.float32 of shape (2, 3)
Actual: rank 0 of plain@1, step 0: torch.float64 of shape (2, 3)
Expected: 1, as without the wrapper
Actual: rank 0 of plain@1, step 0: output 0, index 0: 3 (6 of 6 elements differ)
Likely cause: the forward itself differs
Expected: 1, as without the wrapper
Actual: rank 0 of plain@1, step 0: the gradient of p0, index 0: 0 (6 of 6 elements differ)
Likely cause: all zeros: the graph ends at the wrapper
Expected: 1, as without the wrapper
Actual: rank 0 of plain@1, step 0: the gradient of p0, index 0: 2 (6 of 6 elements differ)
Likely cause: twice as much: it is added once in each of two backwards
Expected: 1, as without the wrapper
Actual: rank 0 of plain@1, step 0: the gradient of input 0, index 0: 3 (6 of 6 elements
    differ)
Likely cause: outputs are right: the backward uses other values than the forward has
    computed
Expected: 1, as without the wrapper
Actual: rank 0 of plain@1, step 0: p0, index 0: 3 (6 of 6 elements differ)
Expected: a step like those without the wrapper
Actual: rank 0 of plain@1, step 0: RuntimeError: no graph
Likely cause: the graph ends at the wrapper""",
    )


def test_modes_and_hooks_are_described() -> None:
    evaluated = {"what": "no_grad", "runs": {"block0": 2}}
    phases = {"forward": ["bfloat16"], "backward": ["float16"]}
    one = run(
        event("evaluated", 1, asks=True, **evaluated),
        event("ran", 1, autocast=phases),
        event("fired", 1, hooks={"forward of block0": 2}),
        event("stepped", 1, packs=True),
    )
    other = run(event("evaluated", 1, asks=False, **evaluated), event("fired", 1, hooks={}))
    runs = {"plain@1": one, "vanilla-plain@1": other}
    found = Found()
    wrapper.require_same_modes(runs, found)
    wrapper.require_same_hooks(runs, found)
    wrapper.require_no_saved_tensor_hooks(one, found, "", "")
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: requires_grad=False of a block's output
Actual: rank 0, no_grad of plain@1: requires_grad=True
Expected: autocast to bfloat16, as in the forward
Actual: rank 0, step 1 of plain@1: autocast to float16 in the backward
Expected: 0 times
Actual: rank 0, step 1 of plain@1: forward of block0: 2 times
Expected: no hook on saved tensors outside of the forward
Actual: rank 0, step 1: hooks on saved tensors are in force""",
    )


def test_recomputation_and_memory_are_described() -> None:
    passes = {"forward": {"block0": 1}, "backward": {"block0": 2}}
    kept = {"kept": {"block0": 64}, "left": {"block0": 32}}
    one = run(
        event("ran", 1, **passes, **kept),
        event("evaluated", 2, what="no_grad", runs={"block0": 2}),
        tensors={"0/buffer/num_batches_tracked": torch.ones(1)},
    )
    other = run(
        event("ran", 1, **passes, kept={"block0": 8}, left={}),
        tensors={"0/buffer/num_batches_tracked": torch.zeros(1)},
    )
    runs = {"plain@1": one, "vanilla-plain@1": other}
    found = Found()
    wrapper.require_recomputation(one, found)
    wrapper.require_less_memory(runs, found)
    wrapper.require_same_buffers(runs, found)
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: one forward of block0 in the backward
Actual: rank 0, step 1: 2 forwards of block0 in the backward
Expected: no activation of a block between forward and backward
Actual: rank 0, step 1: 64 bytes of block0
Likely cause: the first graph is kept
Expected: one forward in no_grad
Actual: rank 0, step 2: 2 of block0
Expected: less than the 8 bytes that are kept without the wrapper
Actual: rank 0, step 1 of plain@1: 64 bytes
Expected: no activation of a block after the backward
Actual: rank 0, step 1 of plain@1: 32 bytes
Likely cause: activations are never freed
Expected: buffers as without the wrapper
Actual: rank 0, 0/buffer/num_batches_tracked of plain@1: 1 buffers and steps differ
Likely cause: they are updated again when the forward runs again""",
    )


def test_names_are_described_by_those_that_differ() -> None:
    wanted = ["0.weight", "0.bias", "1.weight"]
    inserted = ["wrapped.0.weight", "wrapped.0.bias", "1.weight"]
    repeated = [*wanted, "1.weight"]
    one = run(
        event("compared", 0, what="parameter names: wrapper", got=inserted, wanted=wanted),
        event("compared", 0, what="parameter names: network", got=wanted[::-1], wanted=wanted),
        event("compared", 0, what="buffer names: network", got=repeated, wanted=wanted),
        event("compared", 0, what="mode: train", got=False, wanted=True),
    )
    found = Found()
    wrapper.require_compared(one, found, "parameter names: ", "buffer names: ", "mode: ")
    expecttest.assert_expected_inline(
        read_failures(found.failures),
        """\
Expected: 0.weight, 0.bias
Actual: rank 0, parameter names: wrapper: wrapped.0.weight, wrapped.0.bias
Likely cause: the names have a part too many, such as the attribute under which the
    wrapper keeps the module
Expected: 0.weight as number 1
Actual: rank 0, parameter names: network: 1.weight as number 1
Expected: 3 items
Actual: rank 0, buffer names: network: 1.weight as number 4
Expected: True
Actual: rank 0, mode: train: False""",
    )


def memory(before: int, between: int, after: int) -> dict[str, Any]:
    return event("memory", 2, before=before, between=between, after=after)


def test_training_is_described() -> None:
    stepped = event("stepped", 1, generator="a", packs=False)
    buffers = {"0/buffer/rows": torch.tensor([0, 3]), "0/buffer/mean": torch.ones(2)}
    one = run(memory(0, 500, 700), stepped, tensors={"0/buffer/rows": torch.tensor([0, 2])})
    other = run(memory(0, 400, 0), stepped | {"generator": "b"}, tensors=buffers)
    runs = {"plain@1": one, "vanilla-plain@1": other}
    found = Found()
    wrapper_training.require_all_batches(runs, found)
    rank, plain = one.ranks[0], other.ranks[0]
    wrapper_training._require_no_growth(rank, plain, 64, True, "rank 0", found)
    wrapper_training._require_less(rank, plain, False, "rank 0", found)
    texts = [read_failures(found.failures), refused("19.3", runs)]
    drawing = replace(one, scenario=RANDOM)
    texts.append(refused("19.18", {"random@1": drawing, "vanilla-random@1": drawing}, "draws_anew"))
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
Expected: 3 batches of 1 rows, as counted, or more
Actual: rank 0, step 0 of plain@1: buffer rows: 2
Likely cause: buffers are set back to a forward before another one
Expected: a buffer of shape (2,)
Actual: rank 0, step 0 of plain@1: buffer mean
Expected: 64 bytes more after a step than without the wrapper at most
Actual: rank 0, step 2: 700 bytes more
Likely cause: copies of activations are kept after the backward
Expected: less than the 400 bytes that are kept without the wrapper
Actual: rank 0, step 2: 500 bytes between forward and backward
Likely cause: copies of activations are kept beside the recomputed ones
Expected: torch's generator in the same state as without the wrapper
Actual: rank 0, step 1 of plain@1: it is in another state
Expected: some difference, as it claims draws_anew
Actual: none in random@1
Likely cause: it claims draws_anew in vain""",
    )
