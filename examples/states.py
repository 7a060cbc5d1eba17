"""States for ``--state``: those of the reference hooks, made as in a training script.

Each function is called once per rank, with the model's process group.
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
    """PowerSGD of rank 2 from the third step on; every matrix is compressed."""
    return PowerSGDState(
        process_group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )


def power_sgd_same_shapes(process_group: Group = None) -> PowerSGDState:
    """The same PowerSGD, with matrices of one shape multiplied together."""
    return PowerSGDState(process_group, 2, 2, 1, batch_tensors_with_same_shape=True)


def power_sgd_from_the_start(process_group: Group = None) -> PowerSGDState:
    """PowerSGD from the first step on, before DDP has rebuilt its buckets."""
    return PowerSGDState(process_group, start_powerSGD_iter=0, min_compression_rate=1)


def power_sgd_fresh(process_group: Group = None) -> PowerSGDState:
    """PowerSGD with a fresh Q in every step, and without error feedback."""
    return PowerSGDState(process_group, 2, 2, 1, use_error_feedback=False, warm_start=False)


def top_k(process_group: Group = None) -> CompressionState:
    """A quarter of the elements, with error feedback."""
    return CompressionState(process_group, TopK(0.25))


def top_k_later(process_group: Group = None) -> CompressionState:
    """A quarter of the elements, with error feedback, from the third step on."""
    return CompressionState(process_group, TopK(0.25), start_iter=2)


def everything(process_group: Group = None) -> CompressionState:
    """All elements: exact, but through the code of a compressed step."""
    return CompressionState(process_group, TopK(1))


def everything_at_random(process_group: Group = None) -> CompressionState:
    """All elements, in a random order, summed."""
    return CompressionState(process_group, RandomK(1))


def top_k_dgc(process_group: Group = None) -> CompressionState:
    """A quarter of the elements, with error feedback and momentum correction."""
    return CompressionState(process_group, TopK(0.25), momentum=0.5)


def top_k_ef21(process_group: Group = None) -> CompressionState:
    """A quarter of the elements of the change since the last step (EF21)."""
    return CompressionState(process_group, TopK(0.25), memory="ef21")


def random_k(process_group: Group = None) -> CompressionState:
    """A random quarter of the elements, with error feedback."""
    return CompressionState(process_group, RandomK(0.25, seed=3))


def random_k_unbiased(process_group: Group = None) -> CompressionState:
    """A random quarter of the elements, scaled by four."""
    return CompressionState(process_group, RandomK(0.25, seed=3, unbiased=True), memory="none")


def scaled_sign(process_group: Group = None) -> CompressionState:
    """Signs with one scale per parameter, with error feedback."""
    return CompressionState(process_group, ScaledSign())


def one_bit(process_group: Group = None) -> CompressionState:
    """Signs with two values per parameter, with error feedback."""
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
    """Average over the ranks of this machine from the third step on.

    The state finds these ranks by itself. With one machine they are all ranks.
    """
    return PostLocalSGDState(process_group, None, start_localSGD_iter=2)
