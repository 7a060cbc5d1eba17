"""Reference gradient-communication hooks for DistributedDataParallel.

Each module is one family of algorithms under torch's public names and signatures::

    from hooks_ref import allreduce_hook

    ddp.register_comm_hook(None, allreduce_hook)

The package depends on torch alone and is meant to be read as the specification of its hooks.
"""

from hooks_ref.debugging_hooks import noop_hook
from hooks_ref.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from hooks_ref.low_rank import PowerSGDState, batched_powerSGD_hook, powerSGD_hook

__all__ = [
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "powerSGD_hook",
]
