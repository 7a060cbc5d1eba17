"""Limits of versions of torch: marks of tests that cannot run there, and parts that they leave out.

Each condition is a feature that torch has or lacks, or a fault that the kit knows
(``conformance/torch_versions/faults.py``).
"""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch.ao.quantization.utils import check_min_max_valid
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import (
    quantization_pertensor_hook,
)

from conformance.scenarios.model import Param
from conformance.torch_versions.faults import faults_of
from conformance.torch_versions.tested import release

_HERE = f"torch {torch.__version__}"
_COMPLEX_FAULTS = [
    fault
    for fault in faults_of(torch.__version__)
    if (fault.backend, fault.dtypes) == ("gloo", "complex")
]
COMPLEX_OVER_GLOO = not _COMPLEX_FAULTS

needs_complex_over_gloo = pytest.mark.skipif(
    not COMPLEX_OVER_GLOO,
    reason="; ".join(f"{_HERE} {fault.summary} ({fault.issue})" for fault in _COMPLEX_FAULTS),
)
"""Torch through 2.8 broadcasts and reduces no complex tensor over Gloo."""

OWN_HOOKS_ARE_REFUSED = {"2.8"} if release(torch.__version__) == (2, 9) else set()
"""DDP of torch 2.9 copies the reals of a complex result as they are (pytorch#158753).

Torch's own hooks return such results over Gloo.
"""

needs_list_keys = pytest.mark.skipif(
    not hasattr(dist.Store, "list_keys"), reason=f"{_HERE} cannot list the keys of a store"
)
"""Torch 2.9 and older have no ``Store.list_keys``: torchruns with ``--rdzv-id`` are not found."""

needs_flight_recorder_of_gloo = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
    reason=f"{_HERE} records no collectives of Gloo",
)
"""Torch through 2.7 has the flight recorder of NCCL alone."""

needs_build_for_cpu = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason=f"{_HERE} is built with CUDA"
)
"""On a CPU, hooks of torch's own that need a GPU fail otherwise if torch is built with CUDA.

The bf16 hook then works.
"""


needs_quantization_hooks_of_a_cpu = pytest.mark.skipif(
    "cuda" in quantization_pertensor_hook.__code__.co_names,
    reason=f"{_HERE} has quantization hooks that call cuda(), whatever the device of the bucket",
)
"""The quantization hooks of torch 2.4 run on a GPU alone."""

ignores_autocast_of_torch = pytest.mark.filterwarnings(
    "ignore:.torch.cpu.amp.autocast:FutureWarning"
)
"""The checkpoints of torch 2.4 call a function that it deprecates itself."""


def observers_take_nan() -> bool:
    """Whether torch's quantization observers take NaN; those of torch 2.9 and older refuse it."""
    nan = torch.tensor(float("nan"))
    try:
        return check_min_max_valid(nan, nan)
    except AssertionError:
        return False


def taken_by_gloo(params: Iterable[Param]) -> tuple[Param, ...]:
    """Return parameters without the complex ones if this torch cannot broadcast them over Gloo."""
    return tuple(
        param for param in params if COMPLEX_OVER_GLOO or not param.dtype.startswith("complex")
    )
