"""QSGD and TernGrad: beside a float64 oracle that replays their draws, and unbiased by count."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.scenarios.model import Param
from examples import states
from hooks_ref.compression import CompressionState
from hooks_ref.stochastic import QSGD, TernGrad, _pack, _unpack
from tests.hooks_ref.algorithms import (
    PARAMS,
    every,
    gradients,
    memory_order,
    require_resumes,
    require_same_bits,
    result,
    run_hook,
    scenario,
)
from tests.torch_marks import taken_by_gloo

STATES = "examples.states"
HOOK = "hooks_ref:compression_hook"
NAMES = ("qsgd", "qsgd_4_bits", "terngrad", "terngrad_short")
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}
Compressor = QSGD | TernGrad
COMPRESSORS = (QSGD(), QSGD(7, 16), QSGD(1, 5, seed=9), TernGrad(), TernGrad(3))


def named(compressor: Compressor) -> str:
    return f"{type(compressor).__name__}({compressor.levels}, {compressor.block})"


def decoded(
    compressor: Compressor, x: torch.Tensor, step: int = 0, rank: int = 0, key: int = 1
) -> torch.Tensor:
    """Return the decoded encoding of ``x`` of a rank."""
    into = torch.zeros_like(x)
    compressor.add_decoded(compressor.encode([x], [key], step, rank), [into], [key], step)
    return into


def in_blocks(x: torch.Tensor, block: int) -> list[torch.Tensor]:
    return [x] if block >= len(x) else list(x.split(block))


def definition(
    compressor: Compressor, x: torch.Tensor, step: int, rank: int, key: int, unit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return C(x) in float64, and the possible error if rounding turns a draw the other way.

    ``a = s x / norm`` has three roundings (norm, quotient, product), the fraction of a one: a is
    off by less than 4 u s + u. A draw nearer to the fraction than that, round the circle (0.0 of
    one level is 1.0 of the level below), may fall either way.
    """
    seed = (
        int.from_bytes(
            hashlib.blake2b(
                repr((compressor.seed, step, rank, key)).encode(), digest_size=8
            ).digest(),
            "little",
        )
        >> 1
    )
    blocks = in_blocks(x, compressor.block)
    s = compressor.levels
    width = max(1, min(compressor.block, len(x)))
    dtype = torch.float64 if unit == UNIT["float64"] else torch.float32
    draws = torch.rand(
        -(-len(x) // width), width, dtype=dtype, generator=torch.Generator().manual_seed(seed)
    ).double()
    values = [torch.zeros(0, dtype=torch.float64)]
    turned = [torch.zeros(0, dtype=torch.float64)]
    for v, u in zip(blocks, draws, strict=False):
        norm = v.norm() if isinstance(compressor, QSGD) else v.abs().max()
        a = s * v / norm if norm > 0 else torch.zeros_like(v)
        distance = (u[: len(v)] - (a - a.floor())).abs()
        # Twice the unit roundoff, because the oracle may have the precision of ours, float64.
        near = torch.minimum(distance, 1 - distance) <= (4 * s + 1) * 2 * unit
        values.append(norm / s * (a.floor() + (u[: len(v)] < a - a.floor())))
        turned.append(near * norm / s * (norm > 0))
    return torch.cat(values), torch.cat(turned)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.rarely), 3])
@pytest.mark.parametrize("name", NAMES)
def test_each_step_is_what_the_definition_gives_on_all_ranks(
    pool: Pool, name: str, world: int
) -> None:
    """Twelve steps in several buckets, across the rebuild.

    Gradients have magnitudes from 1e-30 to 1e30, then zeros on one rank, then on all.

    Tolerance, beside draws that may turn: a decoded v is off by 4 u |v| (norm, quotient, product,
    and u for the oracle does), their sum over W by W u sum|v|, the quotient by W by u: (W + 6) u
    sum|v| / W. Below 2**-126 a product is off by half of 2**-149 instead, for each of W + 2
    operations.
    """
    compressor = getattr(states, name)().compressor
    kinds = ("normal",) * 12 + ("wide", "zero_one", "zero_all")
    run = run_hook(
        pool, replace(scenario(15), steps=kinds), world, hook=HOOK, state=f"{STATES}:{name}"
    )
    turned = 0
    elements = 0
    for step, kind in enumerate(kinds):
        for index, spec in enumerate(PARAMS):
            order = memory_order(spec)
            key = len(PARAMS) - index
            fed = gradients(run, step, index)[:, order]
            each = [
                definition(compressor, x, step, rank, key, UNIT["float32"])
                for rank, x in enumerate(fed)
            ]
            value, turn = (torch.stack(tensors) for tensors in zip(*each, strict=True))
            bound = (turn + (world + 6) * UNIT["float32"] * value.abs()).mean(0) + (
                world + 2
            ) * 2.0**-150
            for rank in range(world):
                got = result(run, rank, step, index)
                assert ((got[order] - value.mean(0)).abs() <= bound).all(), (step, rank, index)
                assert torch.equal(got, result(run, 0, step, index)), (
                    "not the same bits on all ranks"
                )
            turned = turned + int((turn > 0).sum()) * (kind == "normal")
            elements = elements + turn.numel()
    assert turned < 0.03 * elements, (
        "inputs of this test: too many draws that could turn to say much"
    )


@pytest.mark.parametrize("name", NAMES[1::2])
def test_other_dtypes(pool: Pool, name: str) -> None:
    """As above; to a half bucket each rank's value is added with a rounding of its own, and divided
    with one."""
    compressor = getattr(states, name)().compressor
    params = taken_by_gloo(
        Param(shape, dtype)
        for dtype in ("float64", "float16", "bfloat16", "complex64")
        for shape in ((40,), (3, 5), ())
    )
    run = run_hook(pool, scenario(3, params=params), hook=HOOK, state=f"{STATES}:{name}")
    # Keys are places in the buckets of the first step, counted from the end: DDP fills a bucket
    # per dtype.
    first = [
        [int(name[1:]) for name in call["parameters"]] for call in run.ranks[0].all("call", step=0)
    ]
    keys = {}
    before = 0
    for indices in first:
        keys |= {index: before + len(indices) - place for place, index in enumerate(indices)}
        before += len(indices)
    for step, rank, index in every(run):
        spec = params[index]
        dtype = spec.dtype.replace("complex64", "float32")
        fed = gradients(run, step, index)
        unit = UNIT["float64" if dtype == "float64" else "float32"]
        each = [
            definition(compressor, x, step, peer, keys[index], unit) for peer, x in enumerate(fed)
        ]
        value, turn = (torch.stack(tensors) for tensors in zip(*each, strict=True))
        bound = (turn + (2 + 6) * (unit + UNIT[dtype]) * value.abs()).mean(0) + 2.0**-24 * (
            dtype == "float16"
        )
        assert ((result(run, rank, step, index) - value.mean(0)).abs() <= bound).all(), (
            step,
            rank,
            index,
        )


@pytest.mark.parametrize("name", NAMES)
def test_one_bucket_or_several_is_the_same(pool: Pool, name: str) -> None:
    """Draws belong to parameters: how DDP groups them changes no bit.

    Scalars and empty parameters included.
    """
    params = (*PARAMS, Param((0,)), Param(()))
    one, several = (
        run_hook(
            pool, scenario(4, params=params, bucket_cap_mb=cap), hook=HOOK, state=f"{STATES}:{name}"
        )
        for cap in (25.0, 64 / 2**20)
    )
    require_same_bits(one, several)


@pytest.mark.parametrize("name", NAMES[::2])
def test_resumes_bit_for_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    require_resumes(pool, tmp_path, HOOK, f"{STATES}:{name}")


@pytest.mark.parametrize("name", NAMES[1::2])
def test_what_is_not_finite_stays_so_on_all_ranks(pool: Pool, name: str) -> None:
    """Its block, whichever rank fed it; other blocks and the next step are finite."""
    block = getattr(states, name)().compressor.block
    params = (Param((3,)), Param((block, 4)), Param((2,)))
    run = run_hook(
        pool,
        replace(scenario(4, params=params), steps=("normal", "nan", "inf", "normal")),
        hook=HOOK,
        state=f"{STATES}:{name}",
    )
    for step, rank, index in every(run):
        fed = gradients(run, step, index)
        got = result(run, rank, step, index)
        for x, y in zip(fed.split(block, 1), got.split(block), strict=True):
            assert (y.isfinite() == x.isfinite().all()).all(), (step, rank, index)


# Unbiased


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=named)
def test_is_unbiased(compressor: Compressor) -> None:
    """The mean of N independent decodings is the input, for each of n elements.

    Every decoding of an element is one of two neighbouring levels, ``norm / s`` apart, so that by
    Hoeffding the mean of N is off its expectation by t norm / s or more with probability at most 2
    exp(-2 N t**2). With t = sqrt(ln(2 n / 1e-7) / 2N) that is 1e-7 over all n. The expectation
    itself is off by at most the grain 2**-24 norm / s (draws are multiples of it), and each
    decoding by the roundings of a and of the product: 4 u norm + 2 u norm < 6 * 2**-24 norm. Draws
    of different steps, ranks and parameters, and of one generator, count alike.
    """
    n = min(12, compressor.block)
    copies = 100
    steps = 10
    ranks = 3
    keys = (1, 2, 70)
    x = torch.randn(n, generator=torch.Generator().manual_seed(1))
    x[0] = 0.0
    x[1:2] = 1e-3
    alone = type(compressor)(**{**vars_of(compressor), "block": n})
    total = torch.zeros(n, dtype=torch.float64)
    count = 0
    for step in range(steps):
        for rank in range(ranks):
            parts = [torch.zeros(n * copies) for _ in keys]
            alone.add_decoded(
                alone.encode([x.repeat(copies)] * len(keys), keys, step, rank), parts, keys, step
            )
            total += torch.cat(parts).double().view(-1, n).sum(0)
            count += copies * len(keys)
    norm = float(x.double().norm() if isinstance(compressor, QSGD) else x.abs().max())
    t = math.sqrt(math.log(2 * n / 1e-7) / (2 * count))
    error = (total / count - x.double()).abs()
    assert count == 9000
    # Small enough to find rounding to the nearest level, off by up to 0.5, and a level off by one.
    assert t < 0.034
    assert (error <= (t + 2.0**-24) * norm / compressor.levels + 6 * 2.0**-24 * norm).all(), error


def vars_of(compressor: Compressor) -> dict[str, int]:
    """Return the arguments that would make it again."""
    return {
        name: value
        for name, value in vars(compressor).items()
        if name != "levels" or isinstance(compressor, QSGD)
    }


def test_ranks_err_independently() -> None:
    """Averaging W ranks divides the squared error by W.

    With D_i the mean over W = 8 of the errors of element i, in levels: its square is in [0, 1] and
    has expectation f (1 - f) / 8 <= 1 / 32; equal draws would give f (1 - f).

    Each element has f = 1/2 exactly (a = 1/2 of one level): 1/32 and 1/4. The mean over N = 2000
    independent trials is 1/32 to within t = sqrt(ln(2 / 1e-7) / 2N) = 0.065 but with probability
    1e-7 (Hoeffding), far from 1/4.
    """
    compressor = TernGrad(block=2)
    trials = 2000
    world = 8
    x = torch.tensor([1.0, 0.5]).repeat(trials // 10)
    squares = [
        (torch.stack([decoded(compressor, x, step, rank) for rank in range(world)]).mean(0) - x)[
            1::2
        ]
        .square()
        .mean()
        for step in range(10)
    ]
    assert (torch.stack(squares).mean() - 1 / 32).abs() <= math.sqrt(
        math.log(2 / 1e-7) / (2 * trials)
    )


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=named)
def test_draws_differ_by_seed_step_rank_and_parameter_and_by_nothing_else(
    compressor: Compressor,
) -> None:
    """At least 200 elements have a fraction f in [0.1, 0.9].

    Two encodings hold the same level there with probability f**2 + (1 - f)**2 <= 0.82, and are
    equal with at most 0.82**200 < 1e-17, times 10 pairs.
    """
    block = torch.tensor([1.0, -0.3, 0.4])
    x = block.repeat(200)
    same = type(compressor)(**{**vars_of(compressor), "block": 3})
    other = type(compressor)(**{**vars_of(compressor), "block": 3, "seed": 1000})
    s = same.levels
    norm = float(block.norm()) if isinstance(compressor, QSGD) else 1.0
    fractions = torch.tensor([s * abs(float(v)) / norm % 1 for v in block])
    assert ((fractions > 0.1) & (fractions < 0.9)).sum() >= 1
    codes = [
        same.encode([x], [key], step, rank)[0]
        for step, rank, key in ((0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2))
    ]
    codes.append(other.encode([x], [1], 0, 0)[0])
    assert all(
        not torch.equal(one, another)
        for place, one in enumerate(codes)
        for another in codes[:place]
    )
    assert torch.equal(codes[0], same.encode([torch.ones(4), x], [9, 1], 0, 0)[0][-len(codes[0]) :])


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    for compressor in COMPRESSORS:
        decoded(compressor, torch.ones(9))
    assert torch.equal(torch.get_rng_state(), before)


# Values


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=named)
def test_within_one_level_and_exact_where_a_level_is_hit(
    compressor: Compressor, dtype: str
) -> None:
    """One level, and the roundings of ``definition``, of the result in its own dtype."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2)).to(getattr(torch, dtype))
    y = decoded(compressor, x)
    assert y.dtype == x.dtype
    for v, w in zip(
        in_blocks(x.double(), compressor.block),
        in_blocks(y.double(), compressor.block),
        strict=True,
    ):
        norm = v.norm() if isinstance(compressor, QSGD) else v.abs().max()
        assert (
            (v - w).abs() <= norm / compressor.levels + 8 * 2.0**-24 * norm + UNIT[dtype] * norm
        ).all()
    one = torch.zeros(1000, dtype=x.dtype)
    one[[3, 600]] = torch.tensor([-0.3, 7.0], dtype=x.dtype)
    assert torch.equal(decoded(compressor, one), one)
    assert torch.equal(decoded(compressor, x[:1]), x[:1])
    assert torch.equal(decoded(compressor, one[:0]), one[:0])
    assert torch.equal(decoded(compressor, torch.zeros_like(x)), torch.zeros_like(x))


@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-30, 1e30, 1e37])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=named)
def test_squares_neither_overflow_nor_vanish(compressor: Compressor, scale: float) -> None:
    y = decoded(compressor, torch.full((5,), scale))
    assert y.isfinite().all()
    assert (
        decoded(compressor, torch.tensor([0.0, -scale])).tolist()
        == torch.tensor([0.0, -scale]).tolist()
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=named)
def test_what_is_not_finite_spoils_its_block_alone(compressor: Compressor, value: float) -> None:
    """This includes elements whose levels share a byte with it."""
    x = torch.ones(2000)
    x[5] = value
    broken = torch.zeros(2000, dtype=torch.bool)
    broken[5 // compressor.block * compressor.block :][: compressor.block] = True
    y = decoded(compressor, x)
    assert not y[broken].isfinite().any()
    assert y[~broken].isfinite().all()
    assert torch.equal(y[~broken], decoded(compressor, torch.ones(2000))[~broken])


def test_what_is_subtracted_is_what_is_added() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(3))
    for compressor in COMPRESSORS:
        encoded = compressor.encode([x], [1], 0, 0)
        into = torch.zeros(50)
        compressor.add_decoded(encoded, [into], [1], 0)
        compressor.add_decoded(encoded, [into], [1], 0, -1)
        assert torch.equal(into, torch.zeros(50))


# Size


@pytest.mark.parametrize(
    ("compressor", "bits", "blocks"),
    [
        (QSGD(), 8, 2),
        (QSGD(8), 8, 2),
        (QSGD(7), 4, 2),
        (QSGD(2, 100), 4, 10),
        (QSGD(1), 2, 2),
        (TernGrad(), 2, 2),
        (TernGrad(7), 2, 143),
    ],
    ids=lambda value: named(value) if isinstance(value, QSGD | TernGrad) else str(value),
)
def test_bytes_on_the_wire(compressor: Compressor, bits: int, blocks: int) -> None:
    for dtype, size in ((torch.float32, 4), (torch.float16, 4), (torch.float64, 8)):
        encoded = compressor.encode(
            [torch.ones(1000, dtype=dtype), torch.ones(0, dtype=dtype)], [1, 2], 0, 0
        )
        assert [tensor.numel() * tensor.element_size() for tensor in encoded] == [
            1000 * bits // 8,
            blocks * size,
        ]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 101])
def test_packing_is_undone(bits: int, n: int) -> None:
    codes = torch.randint(
        1 << bits, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n)
    )
    packed = _pack(codes, bits)
    assert packed.numel() == math.ceil(n * bits / 8)
    assert torch.equal(_unpack(packed, bits)[:n], codes)


# Arguments


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: QSGD(0), "levels: an integer of at least 1; got 0"),
        (lambda: QSGD(128), r"levels: an integer in \[1, 127\]; got 128"),
        (lambda: QSGD(4.0), "levels: an integer"),  # type: ignore[arg-type]
        (lambda: QSGD(4, block=0), "block: an integer of at least 1"),
        (lambda: QSGD(4, seed=-1), "seed: an integer of at least 0"),
        (lambda: TernGrad(block=True), "block: an integer"),
        (lambda: TernGrad(seed="x"), "seed: an integer"),  # type: ignore[arg-type]
    ],
)
def test_arguments_out_of_range_are_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make()


def test_states_are_plain_data_and_need_no_process_group(tmp_path: Path) -> None:
    for name in NAMES:
        state = getattr(states, name)()
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        assert isinstance(loaded, CompressionState)
        assert vars(loaded.compressor) == vars(state.compressor)
        assert loaded.compressor is not state.compressor
