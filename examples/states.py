"""States of the reference hooks, made as a training script would, for ``--state``.

Each is called once per rank, with the process group that the model lives on.
"""

import torch
import torch.distributed as dist

from hooks_ref import (
    QSGD,
    CompressionState,
    MixedPrecisionState,
    OneBit,
    PostLocalSGDState,
    PowerSGDState,
    RandomK,
    ScaledSign,
    TernGrad,
    TopK,
)

Group = dist.ProcessGroup | None


def power_sgd(process_group: Group = None) -> PowerSGDState:
    """Rank 2, from the third step on; every matrix is compressed."""
    return PowerSGDState(
        process_group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )


def power_sgd_same_shapes(process_group: Group = None) -> PowerSGDState:
    """The same, matrices of one shape multiplied together."""
    return PowerSGDState(process_group, 2, 2, 1, batch_tensors_with_same_shape=True)


def power_sgd_from_the_start(process_group: Group = None) -> PowerSGDState:
    """Compresses in the first step already, before DDP has regrouped its buckets."""
    return PowerSGDState(process_group, start_powerSGD_iter=0, min_compression_rate=1)


def power_sgd_fresh(process_group: Group = None) -> PowerSGDState:
    """Begins every step from a fresh Q, and forgets what is lost."""
    return PowerSGDState(process_group, 2, 2, 1, use_error_feedback=False, warm_start=False)


def top_k(process_group: Group = None) -> CompressionState:
    """A quarter of the elements, with feedback."""
    return CompressionState(process_group, TopK(0.25))


def top_k_later(process_group: Group = None) -> CompressionState:
    """The same from the third step on."""
    return CompressionState(process_group, TopK(0.25), start_iter=2)


def everything(process_group: Group = None) -> CompressionState:
    """All of the elements: exact, by the way that a compressed step takes."""
    return CompressionState(process_group, TopK(1))


def everything_at_random(process_group: Group = None) -> CompressionState:
    """All of the elements, in a random order, summed."""
    return CompressionState(process_group, RandomK(1))


def top_k_dgc(process_group: Group = None) -> CompressionState:
    """A quarter of the elements, with feedback and momentum correction."""
    return CompressionState(process_group, TopK(0.25), momentum=0.5)


def top_k_ef21(process_group: Group = None) -> CompressionState:
    """A quarter of the elements of the change."""
    return CompressionState(process_group, TopK(0.25), memory="ef21")


def random_k(process_group: Group = None) -> CompressionState:
    """A quarter of the elements, at random, with feedback."""
    return CompressionState(process_group, RandomK(0.25, seed=3))


def random_k_unbiased(process_group: Group = None) -> CompressionState:
    """A quarter of the elements, at random, scaled by four."""
    return CompressionState(process_group, RandomK(0.25, seed=3, unbiased=True), memory="none")


def scaled_sign(process_group: Group = None) -> CompressionState:
    """Signs with one scale per parameter, with feedback."""
    return CompressionState(process_group, ScaledSign())


def one_bit(process_group: Group = None) -> CompressionState:
    """Signs with two values per parameter, with feedback."""
    return CompressionState(process_group, OneBit())


def qsgd(process_group: Group = None) -> CompressionState:
    """Eight bits per element, in blocks of 512."""
    return CompressionState(process_group, QSGD(seed=5), memory="none")


def qsgd_4_bits(process_group: Group = None) -> CompressionState:
    """Four bits per element, in blocks of 16."""
    return CompressionState(process_group, QSGD(levels=7, block=16, seed=5), memory="none")


def terngrad(process_group: Group = None) -> CompressionState:
    """Two bits per element, in blocks of 512."""
    return CompressionState(process_group, TernGrad(seed=5), memory="none")


def terngrad_short(process_group: Group = None) -> CompressionState:
    """Two bits per element, in blocks of 10."""
    return CompressionState(process_group, TernGrad(block=10, seed=5), memory="none")


def mixed_float16(process_group: Group = None) -> MixedPrecisionState:
    """Reduce in float16."""
    return MixedPrecisionState(process_group, torch.float16)


def mixed_bfloat16(process_group: Group = None) -> MixedPrecisionState:
    """Reduce in bfloat16."""
    return MixedPrecisionState(process_group, torch.bfloat16)


def on_this_machine(process_group: Group = None) -> PostLocalSGDState:
    """From the third step on over the ranks of this machine, which the state finds: all of them where there is one machine."""
    return PostLocalSGDState(process_group, None, start_localSGD_iter=2)
