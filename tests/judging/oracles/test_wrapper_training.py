"""Bounds of wrapped modules in float32: above another order of summation, below fewer bits."""

from dataclasses import replace
from itertools import pairwise, product

import torch

from conformance.judging.oracles.wrapper import differing_elements
from conformance.judging.oracles.wrapper_training import SHORT_SUMS, TOLERANCES
from conformance.ranks.drivers._exact_factors import exact_factors
from conformance.ranks.drivers._turning_blocks import Turns
from conformance.scenarios.draws import drawn
from conformance.scenarios.model import Param
from conformance.scenarios.wrapper import blocks_by_name
from conformance.scenarios.wrapper_graphs import (
    BACKWARD,
    FIRST_IN_TURNS,
    FORWARD,
    GRAPHS,
    MOST_ALIVE,
    passes_in_turns,
    share_in_graphs,
)
from conformance.scenarios.wrapper_training import (
    HALF,
    INDICES,
    LARGE,
    LARGEST,
    LONG,
    LONG_STEPS,
    MANY,
    MANY_GRAPHS,
    MANY_LAYERS,
    PENALTY,
    SMALLEST,
    WAYS_OF_DRAWING,
    evaluates_before,
    first_with_dropout,
    ways_of_drawing,
)


def test_bounds_are_above_another_order_and_below_fewer_bits() -> None:
    numbers = torch.Generator().manual_seed(0)
    left = torch.randn(6, 16, generator=numbers)
    right = torch.randn(16, 16, generator=numbers)
    forward = left @ right
    backward = left.flip(1) @ right.flip(0)
    assert not len(differing_elements(backward, forward, SHORT_SUMS))
    for dtype in (torch.float16, torch.bfloat16):
        rounded = left.to(dtype).float() @ right
        assert len(differing_elements(rounded, forward, SHORT_SUMS)), dtype
    bits = (forward.view(torch.int32) & ~511).view(torch.float32)
    assert len(differing_elements(bits, forward, TOLERANCES[LARGE.variant]))
    assert TOLERANCES[LARGE.variant] < SHORT_SUMS < TOLERANCES[PENALTY.variant]


def test_drawn_numbers_are_in_their_ranges() -> None:
    for seed in range(50):
        sizes = sorted(param.shape[0] for param in drawn(LARGE, seed).params)
        assert SMALLEST <= sizes[0] < 2**19 < sizes[2] <= LARGEST
        (layers,), (graphs,) = (param.shape for param in drawn(MANY, seed).params)
        assert MANY_LAYERS[0] <= layers <= MANY_LAYERS[1]
        assert MANY_GRAPHS[0] <= graphs <= MANY_GRAPHS[1]
        assert 0 < first_with_dropout(drawn(LONG, seed)) < LONG_STEPS[0]
        ((table, _),) = (param.shape for param in drawn(INDICES, seed).params)
        assert table // 2 > 2**15
        assert table > 2**16


def test_graphs_are_in_their_ranges() -> None:
    for seed in range(50):
        scenario = drawn(GRAPHS, seed)
        rows = [param.shape for param in scenario.params]
        assert len(rows) == len(GRAPHS.steps)
        at_once = rows[:FIRST_IN_TURNS]
        assert all(2 <= len(shape) <= 6 and len({*shape}) == len(shape) for shape in at_once)
        assert sum(shape.count(0) for shape in at_once) == 1
        assert all(4 <= count <= 12 for shape in rows for count in shape if count)
        assert all(5 <= len(shape) <= 9 for shape in rows[FIRST_IN_TURNS:])
        steps = range(len(GRAPHS.steps))
        assert sum(share_in_graphs(scenario, step) > 0 for step in steps) == 3


def test_passes_of_graphs_take_turns() -> None:
    for seed, step in product(range(50), range(FIRST_IN_TURNS, len(GRAPHS.steps))):
        scenario = drawn(GRAPHS, seed)
        graphs = range(len(scenario.params[step].shape))
        passes = passes_in_turns(scenario, step)
        assert [graph for direction, graph in passes if direction == FORWARD] == [*graphs]
        assert {graph for direction, graph in passes if direction == BACKWARD} == {*graphs}
        alive: set[int] = set()
        for direction, graph in passes:
            # Each forward but the first one comes while another graph is alive.
            assert alive or direction == BACKWARD or not graph
            alive ^= {graph}
            assert len(alive) <= MOST_ALIVE
        assert not alive


def test_a_run_for_a_number_of_steps_has_no_dropout() -> None:
    probe = replace(LONG, steps=("normal",) * 9, params=(Param((1,) * 9),))
    assert first_with_dropout(probe) == 9


def test_blocks_draw_by_one_way_after_another_and_evaluations_come_between() -> None:
    for seed in range(20):
        scenario = drawn(LONG, seed)
        first = first_with_dropout(scenario)
        steps = range(len(scenario.steps))
        assert not ways_of_drawing(scenario, first - 1)
        assert ways_of_drawing(scenario, first)
        assert ways_of_drawing(scenario, steps[-1]) == WAYS_OF_DRAWING
        evaluated = [step for step in steps if evaluates_before(scenario, step)]
        assert {later - one for one, later in pairwise(evaluated)} <= {*range(8, 25)}
        assert sum(step > first for step in evaluated) >= 2


def test_each_block_gets_its_input_by_name_in_some_step() -> None:
    for seed in range(20):
        named = [blocks_by_name(drawn(HALF, seed), step) for step in range(3)]
        assert frozenset().union(*named) == {0, 1, 2}
        assert all(1 <= len(numbers) <= 2 for numbers in named)


def test_turning_blocks_are_exact_and_save_bits() -> None:
    block = Turns("block", 50, torch.complex64)
    factors = block.factors(torch.Generator().manual_seed(0), is_plain_but_one=False)
    saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tensor.is_conj(), tensor.is_neg()))
        return tensor

    results = []
    for wide in (False, True):
        x = factors.x.to(torch.float64 if wide else torch.float32, copy=True)
        block = block.double() if wide else block
        with torch.no_grad():
            block.first.copy_(factors.first)
            block.second.copy_(factors.second)
        block.zero_grad()
        x.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = block(block.given(x))
        output.backward(factors.grad.to(output.dtype))
        gradients = (x.grad, block.first.grad, block.second.grad)
        results.append([tensor.double() for tensor in (output, *gradients)])  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert {(True, False), (False, True)} <= set(saved)


def test_plain_factors_are_exact_in_eight_bits_but_for_one() -> None:
    like = torch.empty(5000)
    seen = set()
    for seed in range(8):
        factors = exact_factors(like, torch.Generator().manual_seed(seed), is_plain_but_one=True)
        saved = (factors.x, factors.x * factors.first, factors.grad)
        others = [values.to(torch.float8_e5m2).float() != values for values in saved]
        assert sum(torch.stack(others).any(0).tolist()) == 1
        seen.add(factors.x.unique().numel())
    assert seen == {2, 6}
