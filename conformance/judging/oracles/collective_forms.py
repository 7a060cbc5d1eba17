"""Require calls of quantized collectives with tensors of all forms: shapes, layouts and dtypes;
and the same bits on all ranks.
"""

import torch

from conformance.judging.oracles.collective import Call, arrived_tensor, calls, require_call
from conformance.judging.oracles.collective_training import require_no_error_in_wait
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.subjects.claims import Claims


def is_plain(run: Run, call: Call) -> bool:
    """Return whether a call has contiguous tensors of float32, which have to arrive."""
    spec = run.scenario.params[call.index]
    return spec.dtype == "float32" and spec.is_contiguous


def require_shape(run: Run, claims: Claims, found: Found, call: Call) -> None:
    """Require that all messages of a call arrived.

    With the claim dimensions(n) an error has to refuse tensors of another number of dimensions.
    """
    shape = run.scenario.params[call.index].shape
    claimed = claims.options["dimensions"]["name"] if claims.has("dimensions") else None
    if claimed in (None, str(len(shape))):
        require_call(run, claims, found, call)
        return
    expected = f"an error: dimensions({claimed}) is claimed"
    found.require(bool(call.refused), expected, f"{call}, of shape {shape}: there was none")


def require_dtype(run: Run, claims: Claims, found: Found, call: Call) -> None:
    """Require that all messages of a call arrived in their dtype, integers exactly, or that an
    error refused the call.
    """
    if call.was_not_made:
        return
    if call.refused:
        require_no_error_in_wait(found, call)
        return
    dtype = run.scenario.params[call.index].dtype
    others = sorted({other for other in call.event["dtypes"] if other != dtype})
    actual = f"{call}: {', '.join(others)} in their place"
    if found.require(not others, f"tensors of {dtype}", actual):
        require_call(run, claims, found, call, is_exact=dtype.startswith("int"))


def require_same_bits(run: Run, found: Found) -> None:
    """Require that all ranks of a group hold the same outputs after each call that is not
    refused.
    """
    first: dict[tuple[int, int, tuple[int, ...]], Call] = {}
    for call in calls(run):
        if call.refused:
            continue
        group = run.group(call.rank)
        other = first.setdefault((call.step, call.index, tuple(group)), call)
        output = 0
        while (right := arrived_tensor(run, other, output)) is not None:
            mine = arrived_tensor(run, call, output)
            is_same = mine is not None and _have_same_bits(mine, right)
            actual = f"{call}, output {output}: it differs"
            found.require(is_same, f"the bits of rank {other.rank}", actual)
            output += 1


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two outputs are equal; any two NaN are."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
