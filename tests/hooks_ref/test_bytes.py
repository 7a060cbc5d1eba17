"""Bytes on the wire: the recorded bytes of each rank's collectives are those of the papers."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from conformance.hosts.pool import Pool
from tests.hooks_ref.algorithms import PARAMS, run_hook, scenario

NUMELS = [math.prod(spec.shape) for spec in PARAMS]
TOTAL = sum(NUMELS)
WIDE = 4  # bytes of float32
STEP = 4  # after every warm-up, and after DDP has regrouped its buckets
ONE_EACH = 4 / 2**20  # a cap of four bytes: a bucket for each parameter


def each(formula: Callable[[int], int]) -> int:
    return sum(map(formula, NUMELS))


def whole(n: int, size: int) -> int:
    """Full rows of ``size``; a smaller parameter is one row of its own size."""
    return -(-n // min(n, size))


def low_rank(rank: int) -> int:
    """P and Q of a matrix that they make smaller, every element of the rest."""
    total = 0
    for spec, numel in zip(PARAMS, NUMELS, strict=True):
        n = spec.shape[0] if len(spec.shape) > 1 else 1
        m = numel // n
        k = min(n, numel // n, rank)
        total += (n + m) * k if n > 1 and (n + m) * k < numel else numel
    return total * WIDE


def square(rank: int) -> int:
    """P and Q of every bucket as a square matrix."""
    sides = [math.isqrt(n - 1) + 1 for n in NUMELS]
    return sum(2 * side * min(side, rank) for side in sides) * WIDE


COMPRESSION = "hooks_ref:compression_hook"
# name: hook, state, bytes of a step
SENT: dict[str, tuple[str | None, str | None, int]] = {
    "allreduce": ("hooks_ref:allreduce_hook", None, TOTAL * WIDE),
    "fp16": ("hooks_ref:fp16_compress_hook", None, TOTAL * 2),
    "bf16": ("hooks_ref:bf16_compress_hook", None, TOTAL * 2),
    "noop": ("hooks_ref:noop_hook", None, 0),
    "mixed precision": (
        "hooks_ref:allreduce_and_upcast_hook",
        "examples.states:mixed_float16",
        TOTAL * 2,
    ),
    "powerSGD": ("hooks_ref:powerSGD_hook", "examples.states:power_sgd", low_rank(2)),
    "powerSGD, same shapes": (
        "hooks_ref:powerSGD_hook",
        "examples.states:power_sgd_same_shapes",
        low_rank(2),
    ),
    "batched powerSGD": ("hooks_ref:batched_powerSGD_hook", "examples.states:power_sgd", square(2)),
    "top-k": (
        COMPRESSION,
        "examples.states:top_k",
        each(lambda n: math.ceil(0.25 * n) * (WIDE + 4)),
    ),
    "EF21": (
        COMPRESSION,
        "examples.states:top_k_ef21",
        each(lambda n: math.ceil(0.25 * n) * (WIDE + 4)),
    ),
    "random-k": (
        COMPRESSION,
        "examples.states:random_k",
        each(lambda n: math.ceil(0.25 * n) * WIDE),
    ),
    "sign": (COMPRESSION, "examples.states:scaled_sign", each(lambda n: -(-n // 8) + 2 * WIDE)),
    "1-bit": (COMPRESSION, "examples.states:one_bit", each(lambda n: -(-n // 8) + 2 * WIDE)),
    "QSGD": (COMPRESSION, "examples.states:qsgd", each(lambda n: n + WIDE)),
    "QSGD, 4 bits": (
        COMPRESSION,
        "examples.states:qsgd_4_bits",
        each(lambda n: -(-n // 2) + WIDE * whole(n, 16)),
    ),
    "TernGrad": (COMPRESSION, "examples.states:terngrad", each(lambda n: -(-n // 4) + WIDE)),
    "per tensor": ("hooks_ref:quantization_pertensor_hook", None, each(lambda n: n + 2 * WIDE)),
    "per channel": (
        "tests.hooks_ref.quantization_subjects:perchannel_16",
        None,
        each(lambda n: whole(n, 16) * (min(n, 16) + 2 * WIDE)),
    ),
    "gossip": ("hooks_ref:gossip_grad_hook", "hooks_ref:GossipGraDState", TOTAL * WIDE),
    "post-local": (None, "examples.setups:own", 0),
}


@pytest.mark.parametrize("name", SENT)
def test_a_step_sends_what_the_paper_says(pool: Pool, name: str) -> None:
    hook, state, expected = SENT[name]
    setup = state if hook is None else None
    run = run_hook(
        pool,
        replace(scenario(STEP + 1, bucket_cap_mb=ONE_EACH), order="rank0_first"),
        hook=hook,
        state=None if setup else state,
        setup=setup,
    )
    for rank in run.ranks:
        assert len(list(rank.all("call", step=STEP))) == len(PARAMS), (
            "one bucket for each parameter was meant"
        )
        sent = next(rank.all("sent", step=STEP))["collectives"]
        assert sum(size for _, size in sent) == expected, sent
