"""TODO: conformance/judging/requirements.py."""

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
from conformance.subjects.claims import Claims


def require_optimizer(run: Run, claims: Claims, found: Found) -> None:
    """Compare the parameters after every step with what the optimizer of ``claims.fused`` makes of the run's gradients."""
    for rank in range(run.world):
        for index, spec in enumerate(run.scenario.params):
            parameter = torch.nn.Parameter(lay_out(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)), spec.layout))
            optimizer, moved = _optimizer(claims.fused, parameter), torch.zeros(())
            for step in range(len(run.scenario.steps)):
                got, before = run.got(rank, step, index), parameter.detach().clone()
                if got is None:
                    break  # 2.1 says so
                if step >= claims.after:
                    parameter.grad = got.to(parameter.dtype).reshape(spec.shape)
                    optimizer.step()
                moved = moved + (parameter.detach() - before).abs()
                now = run.ranks[rank].tensors[f"{step}/parameter/{run.parameter_name(index)}"]
                right = parameter.detach()
                near = (now - right).abs() <= 64 * torch.finfo(parameter.dtype).eps * moved
                wrong = ~(near | (now == right) | (now.isnan() & right.isnan()))  # Adam divides 0 by 0 where float16 has lost its epsilon
                where = f"rank {rank}, step {step}, parameter {run.parameter_name(index)}"
                said = _first(wrong, parameter.detach(), now)
                if not found.require(
                    not wrong.any(), f"as {claims.fused} leaves it", f"{where}: {said}", _fused_cause(run, rank, step, index)
                ):
                    return
                found.checked(now.numel())


def _optimizer(text: str, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    options: dict[str, Any] = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    made: torch.optim.Optimizer = getattr(torch.optim, call.func.id)([parameter], **options)
    return made


def _first(wrong: torch.Tensor, expected: torch.Tensor, now: torch.Tensor) -> str:
    if not wrong.any():
        return ""
    at = int(wrong.reshape(-1).nonzero()[0])
    values = f"{now.reshape(-1)[at].item():.9g} instead of {expected.reshape(-1)[at].item():.9g}"
    return f"{values}; {int(wrong.sum())} of {wrong.numel()} elements are wrong"


def _fused_cause(run: Run, rank: int, step: int, index: int) -> str:
    now = run.ranks[rank].tensors[f"{step}/parameter/{run.parameter_name(index)}"]
    return "it was not stepped at all" if now.numel() and not now.any() else ""


def require_steps(run: Run, claims: Claims, found: Found, steps: list[int]) -> bool:
    """Require every gradient of ``steps`` to be right; report the first that is not. Returns whether all are.

    Of a lossy result no one step says whether it is right: all steps of the run are judged together, as its claim says.
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


def lossy_instead(claims: Claims, found: Found, rules: str) -> bool:
    """Where the claims are lossy, say which rules hold the result to account instead. Returns whether they are."""
    if claims.lossy:
        found.does_not_apply(f"under {claims} {rules}")
    return bool(claims.lossy)


def describe(run: Run, wrong: oracle.Mismatch, claims: Claims) -> tuple[str, str]:
    """Say what a mismatch should have been and what it was, with its place."""
    spec = run.scenario.params[wrong.parameter]
    bucket = run.bucket_of(wrong.rank, wrong.step, wrong.parameter)
    what = "sum" if claims.sum else "mean"
    within = f" within {wrong.bound:.3g}" if wrong.bound else ", bit for bit"
    actual = "no gradient" if wrong.missing else f"{wrong.actual:.9g}"
    place = run.element_index(wrong.parameter, wrong.index)
    where = f"rank {wrong.rank}, step {wrong.step}" + ("" if bucket is None else f", bucket {bucket}")
    return (
        f"{what} {wrong.expected:.9g}{within}",
        f"{actual} on {where}, parameter {run.parameter_name(wrong.parameter)} ({spec.dtype}), index {place}; "
        f"{wrong.wrong} of {wrong.total} elements of the step are wrong",
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _step_and_name(name: str) -> tuple[int, str]:
    step, _, what = name.partition("/")
    return (int(step), what) if step.isdigit() else (-1, name)


def _element(name: str, at: int) -> str:
    return f"element {at}"


def require_same(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], who: str, found: Found, element: Callable[[str, int], str] = _element
) -> None:
    """Require two sets of tensors to have the same names and bits; report the first that differs, an ``element`` as that says."""
    found.require(one.keys() == other.keys(), "the same gradients", f"{who}: only one has {sorted(one.keys() ^ other.keys())[:3]}")
    for name in sorted(one.keys() & other.keys(), key=_step_and_name):
        a, b = one[name], other[name]
        if not torch.equal(_bits(a), _bits(b)):
            at = int((a.reshape(-1) != b.reshape(-1)).nonzero()[:1].sum())
            step, _, what = name.partition("/")
            where = element(name, at)
            found.require(
                False,
                "the same bits",
                f"{who} differ at step {step}, {what}, {where}: {a.reshape(-1)[at].item():.9g} and {b.reshape(-1)[at].item():.9g}",
            )
            return
        found.checked(a.numel())
