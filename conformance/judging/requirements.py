"""Requirements that rules of several sections share; each records its findings in a ``Found``."""

import ast
from collections.abc import Callable
from typing import Any

import torch

from conformance.judging.likely_causes import diagnose
from conformance.judging.oracles import lossy
from conformance.judging.oracles import mean as oracle
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.model import Param
from conformance.subjects.claims import Claims

# The bound on the parameters of a fused optimizer, in epsilons of the sum of all their changes: it
# may take its operations in another order.
_ROUNDINGS_OF_OPTIMIZER = 64


def require_steps(run: Run, claims: Claims, found: Found, steps: list[int]) -> bool:
    """Require every gradient of ``steps`` to be right, and report the first that is not.

    A single step of a lossy run is neither right nor wrong: all its steps are judged together.

    Returns:
        Whether the requirement holds.
    """
    if claims.lossy:
        before = len(found.failures)
        lossy.require(run, claims, found)
        return len(found.failures) == before
    for step in steps:
        comparison = oracle.compare(run, step, claims)
        found.checked(comparison.checked, comparison.margin)
        if comparison.mismatch:
            expected, actual = describe(run, comparison.mismatch, claims)
            found.require(False, expected, actual, diagnose(run, step, claims))
            return False
    return True


def skip_if_lossy(claims: Claims, found: Found, reason: str) -> bool:
    """Declare a rule not applicable if the claims are lossy, and return whether they are.

    Args:
        claims: the claims.
        found: the findings of the rule.
        reason: why the rule cannot judge a lossy result, in words that "because" can follow.
    """
    if claims.lossy:
        found.does_not_apply(f"{reason}, because the subject claims {claims}")
    return bool(claims.lossy)


def replaced_by_lossy_rules(claims: Claims, found: Found) -> bool:
    """Declare a rule replaced if the claims are lossy, and return whether they are."""
    return skip_if_lossy(claims, found, "replaced by rules 13.1 to 13.5")


def describe(run: Run, wrong: oracle.Mismatch, claims: Claims) -> tuple[str, str]:
    """Return the expected value of a mismatch, and the actual value with its place."""
    spec = run.scenario.params[wrong.parameter]
    result = "sum" if claims.sum else "mean"
    within = f" within {wrong.bound:.3g}" if wrong.bound else ", bit for bit"
    expected = f"{result} {wrong.expected:.9g}{within}"
    value = "no gradient" if wrong.missing else f"{wrong.actual:.9g}"
    place = f"rank {wrong.rank}, step {wrong.step}"
    bucket = run.bucket_of(wrong.rank, wrong.step, wrong.parameter)
    if bucket is not None:
        place += f", bucket {bucket}"
    place += f", parameter {run.parameter_name(wrong.parameter)} ({spec.dtype})"
    place += f", index {run.element_index(wrong.parameter, wrong.index)}"
    count = f"{wrong.wrong} of {wrong.total} elements of the step are wrong"
    return expected, f"{value} on {place}; {count}"


def require_same(
    one: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
    pair: str,
    found: Found,
    element: Callable[[str, int], str] | None = None,
) -> None:
    """Require two sets of tensors to have the same names and bits; report the first difference.

    Args:
        one: tensors by name, ``step/...``.
        other: the same of another rank or run.
        pair: the two in words, such as "ranks 0 and 1".
        found: the findings of the rule.
        element: return the words for an element of a tensor, from the tensor's name and the
            element's place in C order.
    """
    only_one = sorted(one.keys() ^ other.keys())[:3]
    found.require(not only_one, "the same gradients", f"{pair}: only one has {only_one}")
    for name in sorted(one.keys() & other.keys(), key=_step_and_rest):
        first = one[name]
        second = other[name]
        if torch.equal(_bits(first), _bits(second)):
            found.checked(first.numel())
            continue
        at = int((first.reshape(-1) != second.reshape(-1)).nonzero()[:1].sum())
        step, _, rest = name.partition("/")
        place = f"step {step}, {rest}, {element(name, at) if element else f'element {at}'}"
        values = f"{first.reshape(-1)[at].item():.9g} and {second.reshape(-1)[at].item():.9g}"
        found.require(False, "the same bits", f"{pair} differ at {place}: {values}")
        return


def _step_and_rest(name: str) -> tuple[int, str]:
    """Return a key that sorts names by step, not by digits."""
    step, _, rest = name.partition("/")
    return (int(step), rest) if step.isdigit() else (-1, name)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def require_optimizer(run: Run, claims: Claims, found: Found) -> None:
    """Require the parameters that the optimizer of ``claims.fused`` makes of the gradients."""
    for rank in range(run.world):
        for index in range(len(run.scenario.params)):
            if not _require_optimized(run, claims, found, rank, index):
                return


def _require_optimized(run: Run, claims: Claims, found: Found, rank: int, index: int) -> bool:
    """Compare one parameter of one rank after every step; return whether all are right."""
    spec = run.scenario.params[index]
    name = run.parameter_name(index)
    parameter = _first_values(spec)
    optimizer = _make_optimizer(claims.fused, parameter)
    changes = torch.zeros(())
    for step in range(len(run.scenario.steps)):
        got = run.got(rank, step, index)
        if got is None:
            return True  # a missing gradient is a failure of 2.1
        before = parameter.detach().clone()
        if step >= claims.after:
            parameter.grad = got.to(parameter.dtype).reshape(spec.shape)
            optimizer.step()
        right = parameter.detach()
        changes = changes + (right - before).abs()
        now = run.ranks[rank].tensors[f"{step}/parameter/{name}"]
        bound = _ROUNDINGS_OF_OPTIMIZER * torch.finfo(parameter.dtype).eps * changes
        near = (now - right).abs() <= bound
        # Adam divides 0 by 0 if float16 has lost its epsilon: NaN is then right.
        wrong = ~(near | (now == right) | (now.isnan() & right.isnan()))
        place = f"rank {rank}, step {step}, parameter {name}"
        holds = found.require(
            not wrong.any(),
            f"as {claims.fused} leaves it",
            f"{place}: {_first_wrong(wrong, right, now)}",
            "it was not stepped at all" if now.numel() and not now.any() else "",
        )
        if not holds:
            return False
        found.checked(now.numel())
    return True


def _first_values(spec: Param) -> torch.nn.Parameter:
    """Return a parameter as a run with a fused optimizer begins with: zeros."""
    values = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
    return torch.nn.Parameter(lay_out(values, spec.layout))


def _make_optimizer(text: str, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Make the optimizer that a claim names, such as ``SGD(lr=0.1)``."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    options: dict[str, Any] = {
        str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords
    }
    made: torch.optim.Optimizer = getattr(torch.optim, call.func.id)([parameter], **options)
    return made


def _first_wrong(wrong: torch.Tensor, right: torch.Tensor, now: torch.Tensor) -> str:
    """Return the first wrong value and the number of wrong values; empty if none is wrong."""
    if not wrong.any():
        return ""
    at = int(wrong.reshape(-1).nonzero()[0])
    values = f"{now.reshape(-1)[at].item():.9g} instead of {right.reshape(-1)[at].item():.9g}"
    return f"{values}; {int(wrong.sum())} of {wrong.numel()} elements are wrong"
