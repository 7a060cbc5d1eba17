"""States of the references, made as a training script would, and named for ``--state``.

Each takes ``process_group`` and is called once per rank.
"""

import torch.distributed as dist

from hooks_ref.compression import CompressionState
from hooks_ref.low_rank import PowerSGDState
from hooks_ref.sign import OneBit, ScaledSign
from hooks_ref.sparsification import RandomK, TopK

Group = dist.ProcessGroup | None


def power_sgd(process_group: Group = None) -> PowerSGDState:
    """Rank 2, from the third step on; every matrix is compressed."""
    return PowerSGDState(process_group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)


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
