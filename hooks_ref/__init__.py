"""Reference gradient-communication hooks for DistributedDataParallel.

Each module is one family of algorithms under torch's public names and signatures::

    from hooks_ref import allreduce_hook

    ddp.register_comm_hook(None, allreduce_hook)

The package depends on torch alone and is meant to be read as the specification of its hooks.
Importing it lets ``torch.load(weights_only=True)`` rebuild the states.
"""

from hooks_ref.checkpointing import (
    ActivationWrapper,
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_to_cpu,
    offload_wrapper,
)
from hooks_ref.compression import (
    CompressionState,
    Compressor,
    compression_hook,
    encode_and_decode_hook,
)
from hooks_ref.debugging_hooks import noop_hook
from hooks_ref.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from hooks_ref.diloco import DiLoCoModelAverager, OuterStepModelAverager
from hooks_ref.ema import EMAModelAverager
from hooks_ref.gossip import GossipGraDState, gossip_grad_hook
from hooks_ref.gossip_averaging import GossipModelAverager
from hooks_ref.join import Join, Joinable, JoinConfig, JoinHook
from hooks_ref.local_sgd import PostLocalSGDState, post_localSGD_hook
from hooks_ref.low_rank import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from hooks_ref.mixed_precision import MixedPrecisionState, allreduce_and_upcast_hook
from hooks_ref.model_averaging import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)
from hooks_ref.optimizer_overlap import (
    OptimizerHookState,
    apply_optim_in_backward_hook,
    functional,
    hook_then_optimizer,
)
from hooks_ref.post_local_sgd_optimizer import PostLocalSGDOptimizer
from hooks_ref.quantization import quantization_perchannel_hook, quantization_pertensor_hook
from hooks_ref.quantized_collectives import DQuantType, auto_quantize
from hooks_ref.registration import DDPCommHookType, register_ddp_comm_hook
from hooks_ref.sign import OneBit, ScaledSign
from hooks_ref.sparsification import RandomK, TopK
from hooks_ref.stochastic import QSGD, TernGrad
from hooks_ref.sync_strategies import (
    DDPSyncStrategy,
    GradientAccumulation,
    ddp_sync_context,
    prepare_ddp_module,
)
from hooks_ref.zero_overlap import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = [
    "QSGD",
    "ActivationWrapper",
    "CheckpointImpl",
    "CheckpointWrapper",
    "CompressionState",
    "Compressor",
    "DDPCommHookType",
    "DDPSyncStrategy",
    "DQuantType",
    "DiLoCoModelAverager",
    "EMAModelAverager",
    "GossipGraDState",
    "GossipModelAverager",
    "GradientAccumulation",
    "HierarchicalModelAverager",
    "Join",
    "JoinConfig",
    "JoinHook",
    "Joinable",
    "MixedPrecisionState",
    "ModelAverager",
    "OffloadWrapper",
    "OneBit",
    "OptimizerHookState",
    "OuterStepModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PowerSGDState",
    "RandomK",
    "ScaledSign",
    "TernGrad",
    "TopK",
    "allreduce_and_upcast_hook",
    "allreduce_hook",
    "apply_activation_checkpointing",
    "apply_optim_in_backward_hook",
    "auto_quantize",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "checkpoint_wrapper",
    "compression_hook",
    "ddp_sync_context",
    "encode_and_decode_hook",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "functional",
    "get_params_to_average",
    "gossip_grad_hook",
    "hook_then_optimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "noop_hook",
    "offload_to_cpu",
    "offload_wrapper",
    "post_localSGD_hook",
    "powerSGD_hook",
    "prepare_ddp_module",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "register_ddp_comm_hook",
]
