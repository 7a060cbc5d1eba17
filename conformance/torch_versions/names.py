"""The private names of torch that the kit uses, with the versions that have them.

A name is listed once, and used in ``private.py`` alone. Those that references use are listed apart,
since ``hooks_ref`` depends on nothing but torch. ``tests/torch_versions/test_names.py`` walks the
sources, and looks up each name in the torch that runs the tests. This module imports no torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateName:
    """One private name of torch.

    Attributes:
        name: the dotted name. Attributes of objects stand behind the name of their class.
        use: its use in the kit.
        since: the first version that has it, ``2.7``; '' if all supported versions do.
        until: the last version that has it; '' if the newest does.
        instead: the replacement in versions that lack it.
        of_instances: objects have it, and not their class.
        of_builds: builds of one version may differ in it.
        modules: the modules of ``hooks_ref`` that use it.
    """

    name: str
    use: str
    since: str = ""
    until: str = ""
    instead: str = ""
    of_instances: bool = False
    of_builds: bool = False
    modules: tuple[str, ...] = ()


def _getter(name: str, since: str = "", *, of_builds: bool = False) -> PrivateName:
    name = f"torch._C.{name}"
    instead = "the flag is not read"
    return PrivateName(name, "9.1 reads the flag", since, "", instead, of_builds=of_builds)


_DDP = "torch.nn.parallel.DistributedDataParallel"
_GROUPS = "torch.distributed.distributed_c10d"
_NOT_SET = "no such option: False"

OF_THE_KIT = (
    PrivateName("torch._C.Future", "the class of the futures that hooks return"),
    PrivateName("torch._C._create_function_from_graph", "keeps futures without their objects"),
    PrivateName(
        "torch._C._dispatch_has_kernel_for_dispatch_key", "kernels of collectives up to torch 2.8"
    ),
    PrivateName("torch._C._after_autograd_keyset", "kernels of collectives up to torch 2.8"),
    PrivateName("torch.ScriptObject._type", "finds the process group among a kernel's arguments"),
    PrivateName("torch.distributed.ProcessGroup._allgather_base", "a method that is recorded"),
    PrivateName("torch.distributed.ProcessGroup._reduce_scatter_base", "a method that is recorded"),
    PrivateName("torch.distributed.ProcessGroup._device_types", "9.3 reads a group's timeouts"),
    PrivateName("torch.distributed.ProcessGroup._get_backend", "9.3 reads a group's timeouts"),
    PrivateName(f"{_GROUPS}._world", "the groups of this process"),
    PrivateName(f"{_GROUPS}._update_default_pg", "simulated ranks"),
    PrivateName(f"{_GROUPS}._get_default_store", "the watch compares ranks through the store"),
    PrivateName(f"{_GROUPS}._new_process_group_helper", "new groups are waits for peers"),
    PrivateName("torch._C._distributed_c10d", "the flight recorder; 9.8 compares its functions"),
    PrivateName(
        "torch._C._distributed_c10d._dump_nccl_trace_json",
        "the flight recorder of NCCL",
        instead="evidence without last collectives",
        of_builds=True,
    ),
    PrivateName(
        "torch._C._distributed_c10d._dump_fr_trace_json",
        "the flight recorder of any backend",
        instead="evidence without last collectives",
        of_builds=True,
    ),
    PrivateName(f"{_DDP}._check_comm_hook", "a refused hook is on record"),
    PrivateName(f"{_DDP}._get_ddp_logging_data", "the hook's name in the log (1.9)"),
    PrivateName("torch.distributed.Reducer._get_zeros_like_grad_buckets", "simulated ranks"),
    PrivateName(f"{_DDP}._sync_buffers", "the buffers after the last step"),
    PrivateName(f"{_DDP}._comm_hooks", "the watch: Join's divisor", of_instances=True),
    PrivateName(
        f"{_DDP}._divide_by_initial_world_size", "the watch: Join's divisor", of_instances=True
    ),
    PrivateName(
        f"{_DDP}._use_python_reducer",
        "the watch refuses compiled autograd",
        instead=_NOT_SET,
        of_instances=True,
    ),
    PrivateName(
        f"{_DDP}._delay_all_reduce_all_params",
        "the watch refuses delayed reduction",
        instead=_NOT_SET,
        of_instances=True,
    ),
    PrivateName(
        f"{_DDP}._delay_all_reduce_params",
        "the watch refuses delayed reduction",
        instead=_NOT_SET,
        of_instances=True,
    ),
    PrivateName("torch.nn.parallel.distributed._find_tensors", "the watch: outputs of a model"),
    PrivateName(
        "torch.autograd.Variable._execution_engine", "the watch: the end of a backward pass"
    ),
    PrivateName(
        "torch.autograd.Node._raw_saved_result",
        "19.4 reads whether hooks on saved tensors are in force",
        of_instances=True,
    ),
    PrivateName("torch._C._autograd._saved_tensors_hooks_is_enabled", "9.1 reads the setting"),
    PrivateName(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "9.1 reads whether hooks on saved tensors are in force",
        since="2.8",
        instead="a tensor is saved: it takes no other hooks",
    ),
    PrivateName("torch._tensor_str.PRINT_OPTS", "9.1 reads the setting"),
    PrivateName("torch.nn.modules.module._global_", "tables whose names begin so (9.1)"),
    PrivateName("torch.optim.optimizer._global_", "tables whose names begin so (9.1)"),
    PrivateName("torch.distributed._functional_collectives", "9.8 compares its functions"),
    PrivateName("torch._C._nn", "9.8 compares its functions"),
    PrivateName("torch._dynamo", "a host imports it for all ranks"),
    PrivateName("torch._dynamo.trace_rules", "a host imports it, and clears its caches"),
    PrivateName("torch._dynamo.utils", "a host imports it for all ranks"),
    PrivateName(
        "torch.profiler._cupti_monitor",
        "a host imports it for all ranks",
        instead="it is not imported",
        of_builds=True,
    ),
    PrivateName(
        "torch.FunctionType._torchdynamo_orig_callable",
        "functions that dynamo wraps are no patches of the subject's",
        of_instances=True,
    ),
    PrivateName("torch._disable_dynamo", "dynamo does not trace the watch"),
    PrivateName("torch.cuda._sleep", "section 21 delays streams", of_builds=True),
    _getter("_get_nnpack_enabled"),
    _getter("_get_flash_sdp_enabled"),
    _getter("_get_mem_efficient_sdp_enabled"),
    _getter("_get_math_sdp_enabled"),
    _getter("_get_cudnn_sdp_enabled"),
    _getter("_get_overrideable_sdp_enabled", "2.5"),
    _getter("_get_math_sdp_allow_fp16_bf16_reduction", "2.5"),
    _getter("_get_linalg_preferred_backend"),
    _getter("_get_blas_preferred_backend"),
    _getter("_get_sdp_priority_order", "2.6"),
    _getter("_get_default_mobile_cpu_allocator", of_builds=True),
    _getter("_get_cpu_allow_fp16_reduced_precision_reduction"),
    _getter("_get_cublas_allow_fp16_accumulation", "2.7"),
    _getter("_get_warnAlways"),
    _getter("_get_onednn_allow_tf32", "2.7"),
    _getter("_is_multithreading_enabled"),
    _getter("_is_view_replay_enabled"),
    _getter("_len_torch_dispatch_stack"),
    _getter("_len_torch_function_stack"),
    _getter("_is_torch_function_enabled"),
)

_ZERO = "torch.distributed.optim.ZeroRedundancyOptimizer"
_ZERO_OVERLAP = "torch's own interface between ZeRO and DDP, which has no public names"

OF_REFERENCES = (
    PrivateName(
        "torch.autograd.Variable._execution_engine",
        "the end of a backward pass",
        modules=("optimizer_overlap",),
    ),
    PrivateName(
        "torch.nn.Module._register_load_state_dict_pre_hook",
        "torch 2.4 has no public name of it",
        modules=("checkpointing",),
    ),
    PrivateName(
        "torch._C._current_graph_task_id",
        "whether a backward pass is running",
        modules=("optimizer_overlap",),
    ),
    *(
        PrivateName(
            f"{_ZERO}.{name}", _ZERO_OVERLAP, of_instances=is_set, modules=("zero_overlap",)
        )
        for name, is_set in (
            ("_overlap_info", True),
            ("_overlap_with_ddp", True),
            ("_init_zero_for_overlap", False),
            ("_bucket_assignments_per_rank", False),
        )
    ),
    PrivateName(
        f"{_DDP}._has_rebuilt_buckets", _ZERO_OVERLAP, of_instances=True, modules=("zero_overlap",)
    ),
)
