"""TODO: conformance/judging/oracles/wrapper.py."""

from collections.abc import Iterator
from typing import Any

import torch

from conformance.judging.verdict import Failure, Found
from conformance.records.run import Run
from conformance.scenarios.wrapper import AUTOCAST
from conformance.subjects.claims import Claims

# What a step leaves on record, in the order in which it comes about: the first that differs is the reason for the rest.
ORDER = ("output", "loss", "gradient", "input", "parameter")


WORDS = {"gradient": "the gradient of ", "input": "the gradient of input ", "parameter": "", "output": "output ", "loss": "loss "}


# Of a tensor's largest element. Networks are ten operations deep and compute in float64, with sums of at most 48 terms: three
# steps lose less than 2**-40 to another order of summation, as where what is saved comes back with other strides; and float32
# anywhere on the way costs more than 2**-25. With autocast the first operation rounds to 2**-9 already, and a few are to follow.
CLOSE = {"": 2.0**-30, AUTOCAST.variant: 2.0**-4}


def _pairs(runs: dict[str, Run]) -> Iterator[tuple[str, Run, Run]]:
    """Yield (name, the subject's run, the same without it); the former may have fewer steps, which :func:`_same` refuses."""
    for name in _names(runs):
        yield name, runs[name], runs[f"vanilla-{name}"]


def _names(runs: dict[str, Run]) -> list[str]:
    return [name for name in runs if not name.startswith("vanilla-")]


def _same(runs: dict[str, Run], found: Found, only: tuple[str, ...] = (), steps: int | None = None, close: float | None = None) -> None:
    """Require what the same network has without the wrapper; of each rank, the first difference is kept."""
    for name, run, plain in _pairs(runs):
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            place, within = f"rank {rank.rank} of {name}", CLOSE.get(run.scenario.variant, CLOSE[""]) if close is None else close
            refused = rank.first("refused")
            last = refused["step"] if refused else len(run.scenario.steps)
            keys = [key for key in _in_order({**other.tensors, **rank.tensors}, only) if _step(key) < (steps or last)]
            if refused:  # where some gradients lack, DDP has not averaged the others
                there = tuple(what for what in only or ORDER if not refused["lacks"] or what in ("output", "loss"))
                keys += [key for key in _in_order(rank.tensors, there) if _step(key) == last]
            for key in keys:
                if failure := _difference(rank.tensors, other.tensors, key, place, within):
                    found.require(False, failure.expected, failure.actual, failure.cause)
                    break
                found.checked(1)
            else:
                if refused:
                    cause = "the graph ends at the wrapper" if refused["lacks"] else ""
                    found.require(False, "a step like those without the wrapper", f"{place}, step {last}: {refused['error']}", cause)


def _step(key: str) -> int:
    return int(key.partition("/")[0])


def _same_unless_reentrant(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Require the same results; of what claims to be reentrant, note what it gives instead."""
    if not claims.has("reentrant"):
        _same(runs, found)
        return
    tried = Found()
    _same(runs, tried)
    found.does_not_apply("not asked of what claims to be reentrant, which is held to that by 19.18")
    for failure in tried.failures[:1]:
        found.note(f"it claims reentrant: {failure.actual}")


def _in_order(tensors: dict[str, torch.Tensor], only: tuple[str, ...]) -> list[str]:
    """Return the keys ``step/what/name`` of what a step leaves, in the order in which it comes about."""

    def place(key: str) -> tuple[int, int, str]:
        _, what, name = key.split("/", 2)
        return _step(key), ORDER.index(what), name

    return sorted((key for key in tensors if key.split("/")[1] in (only or ORDER)), key=place)


def _apart(got: torch.Tensor, right: torch.Tensor, within: float) -> torch.Tensor:
    """Return where two tensors of one shape differ by more than that part of the largest."""
    got, right = got.reshape(-1).double(), right.reshape(-1).double()
    limit = within * right.abs().max() if len(right) else 0.0
    return (~((got - right).abs() <= limit)).nonzero().flatten()


def _difference(tensors: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], key: str, place: str, within: float) -> Failure | None:
    """Return what is wrong with one tensor, or None."""
    step, what, name = key.split("/", 2)
    at, called = f"{place}, step {step}", f"{WORDS[what]}{name}"
    got, right = tensors.get(key), plain.get(key)
    if right is None:
        return Failure("none, as without the wrapper", f"{at}: there is {called}")
    if got is None:
        return Failure(f"{called}, as without the wrapper", f"{at}: {called}: there is none", "the graph ends at the wrapper")
    if got.dtype != right.dtype or got.shape != right.shape:
        return Failure(f"{called}: {right.dtype} of shape {tuple(right.shape)}", f"{at}: {got.dtype} of shape {tuple(got.shape)}")
    wrong = _apart(got, right, within)
    if not len(wrong):
        return None
    got, right, index = got.reshape(-1), right.reshape(-1), int(wrong[0])
    actual = f"{at}: {called}, index {index}: {got[index].item():.17g} ({len(wrong)} of {len(got)} elements differ)"
    cause = _cause(what, got, right) if within else "what is saved comes back with other strides, or is added up in another order"
    return Failure(f"{right[index].item():.17g}, as without the wrapper", actual, cause)


def _cause(what: str, got: torch.Tensor, right: torch.Tensor) -> str:
    """Name the mistake that makes this of what is right, where it is a known one."""
    if what in ("output", "loss"):
        return "the forward itself is another one"
    if not got.any():
        return "all zeros: the graph ends at the wrapper"
    if torch.allclose(got, 2 * right, rtol=1e-5, atol=0.0):
        return "twice as much: it is added once in each of two backwards"
    return "outputs are right: the backward works on other values than the forward has computed" if what in ("gradient", "input") else ""


def _compared(run: Run, found: Found, *kinds: str) -> None:
    """Require what ranks compared to be equal, of those whose names begin as said."""
    for rank in run.ranks:
        for said in rank.all("compared"):
            if said["what"].startswith(kinds):
                got, wanted = said["got"], said["wanted"]
                seen = f"rank {rank.rank}, {said['what']}: {_shortened(got, wanted)}"
                found.require(got == wanted, _shortened(wanted, got), seen, _prefix(got, wanted))


def _shortened(one: Any, other: Any) -> str:
    """Return, of a list, what is not in the other one too; lists of names are long."""
    if isinstance(one, list) and isinstance(other, list) and len(one) > 2:
        apart = [item for item in one if item not in other]
        return f"{', '.join(map(str, apart[:3]))}{', ...' if len(apart) > 3 else ''}" if apart else "the same in another order"
    return str(one)


def _prefix(names: Any, wanted: Any) -> str:
    """Say where names are the right ones with something of the wrapper's in them."""
    if not (isinstance(names, list) and isinstance(wanted, list) and len(names) == len(wanted) > 2):
        return ""
    apart = [(str(name), str(right)) for name, right in zip(names, wanted, strict=True) if name != right]
    longer = all(len(name) > len(right) and name.endswith(right.rpartition(".")[2]) for name, right in apart)
    return "the wrapper's own name is part of them" if apart and longer else ""


def _ran(run: Run) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank in run.ranks:
        for said in rank.all("ran"):
            yield rank.rank, said
