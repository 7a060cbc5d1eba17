"""Require calls of quantized collectives with tensors of all forms: shapes, layouts and dtypes."""

from conformance.judging.oracles.collective import Call, require_call
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.subjects.claims import Claims


def is_plain(run: Run, call: Call) -> bool:
    """Return whether a call has contiguous tensors of float32, which have to arrive."""
    spec = run.scenario.params[call.index]
    return spec.dtype == "float32" and spec.layout == "contiguous"


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
        found.checked(1)
        return
    dtype = run.scenario.params[call.index].dtype
    others = sorted({other for other in call.event["dtypes"] if other != dtype})
    actual = f"{call}: {', '.join(others)} in their place"
    if found.require(not others, f"tensors of {dtype}", actual):
        require_call(run, claims, found, call, is_exact=dtype.startswith("int"))
