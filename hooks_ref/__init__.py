"""Reference gradient-communication hooks for DistributedDataParallel.

Each module is one family of algorithms under torch's public names and signatures::

    from hooks_ref import allreduce_hook

    ddp.register_comm_hook(None, allreduce_hook)

The package depends on torch alone and is meant to be read as the specification of its hooks. Importing it lets
``torch.load(weights_only=True)`` rebuild the states.
"""

from hooks_ref.compression import CompressionState, Compressor, compression_hook, encode_and_decode_hook
from hooks_ref.debugging_hooks import noop_hook
from hooks_ref.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from hooks_ref.low_rank import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from hooks_ref.sign import OneBit, ScaledSign
from hooks_ref.sparsification import RandomK, TopK

__all__ = [
    "CompressionState",
    "Compressor",
    "OneBit",
    "PowerSGDState",
    "RandomK",
    "ScaledSign",
    "TopK",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "compression_hook",
    "encode_and_decode_hook",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "powerSGD_hook",
]
