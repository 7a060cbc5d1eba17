"""Calls of an optimizer's own clip_grad_norm()."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.ranks.drivers._optimizer_clips import clip_by_norm
from conformance.scenarios.optimizer_clipping import CLIPPED, share_of_norm

SCENARIO = replace(CLIPPED, session_seed=4)


def calls_of(step: int, **methods: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a call before a step, of gradients whose norm is 5."""
    events: list[tuple[str, dict[str, Any]]] = []
    clip_by_norm(
        SimpleNamespace(
            scenario=SCENARIO,
            optimizer=SimpleNamespace(**methods),
            recorder=SimpleNamespace(event=lambda name, **fields: events.append((name, fields))),
            inside=lambda _: nullcontext(),
            gradients=lambda _: [torch.tensor([3.0]), None, torch.tensor([0.0, 4.0])],
        ),
        step,
    )
    return events


def test_the_largest_norm_is_a_share_of_the_norm():
    shares = [share_of_norm(SCENARIO, step) for step in range(len(SCENARIO.steps))]
    for step, share in enumerate(shares):
        events = calls_of(step, clip_grad_norm_=lambda max_norm, norm_type=2.0: torch.tensor(5.0))
        if share is None:
            assert not events
            continue
        ((name, fields),) = events
        assert name == "clipped"
        assert fields["max_norm"] == pytest.approx(5 * share)
        assert fields["returned"] == 5
    third = len(shares) // 3
    assert sum(share is not None and share < 1 for share in shares) == third
    assert sum(share is not None and share > 1 for share in shares) == third


@pytest.mark.parametrize(
    "methods",
    [
        {},
        {"clip_grad_norm": None},
        {"clip_grad_norm": lambda parameters, max_norm: None},
        {"clip_grad_norm": lambda parameters: None},
        {"clip_grad_norm_": lambda: None},
    ],
)
def test_other_methods_are_not_called(methods):
    assert calls_of(0, **methods) == [("clips_not", {})]


@pytest.mark.parametrize("returned", [None, True, torch.ones(2), "5", torch.tensor(5)])
def test_a_value_that_is_no_number_is_not_judged(returned):
    step = next(s for s in range(len(SCENARIO.steps)) if share_of_norm(SCENARIO, s))
    ((_, fields),) = calls_of(step, clip_grad_norm=lambda *_: returned)
    assert fields["returned"] is None
