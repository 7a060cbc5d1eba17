"""The subjects of docs/matrix.md: torch's own, and every command of hooks_ref/README.md."""

import re
from dataclasses import dataclass
from pathlib import Path

import hooks_ref

_README = Path(hooks_ref.__file__).parent / "README.md"
_COMMAND = re.compile(r"^\|.*\| `(--\w+ .*)` \|$", re.MULTILINE)
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_POWER_SGD = f"{_HOOKS}.powerSGD_hook"
_STATE = (
    f"{_POWER_SGD}:PowerSGDState,process_group=None,matrix_approximation_rank=1,"
    "start_powerSGD_iter=2"
)
_AVERAGING = "torch.distributed.algorithms.model_averaging"
_QUANTIZE = "torch.distributed.algorithms._quantization.quantization:auto_quantize"
_CHECKPOINT = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


@dataclass(frozen=True)
class Subject:
    """One column of the matrix.

    Attributes:
        name: as it is called in torch, or in ``hooks_ref``.
        options: of the command line that judges it.
    """

    name: str
    options: str

    @property
    def key(self) -> str:
        """The entry of its result."""
        return self.options

    @property
    def target(self) -> str:
        """The options without the claims, which the report names."""
        return self.options.partition(" --claims")[0]

    @property
    def kind(self) -> str:
        """The kind of subject; a set-up registers a hook."""
        kind = self.options.split()[0].removeprefix("--")
        return "hook" if kind == "setup" else kind


TORCHS = (
    Subject("allreduce_hook", f"--hook {_HOOKS}.default_hooks:allreduce_hook"),
    Subject(
        "fp16_compress_hook",
        f'--hook {_HOOKS}.default_hooks:fp16_compress_hook --claims "rounded(float16)"',
    ),
    Subject(
        "bf16_compress_hook",
        '--hook examples.torchs_own:bf16_compress --claims "rounded(bfloat16)"',
    ),
    Subject(
        "fp16_compress_wrapper",
        '--hook examples.torchs_own:fp16_wrapped --claims "rounded(float16)"',
    ),
    Subject(
        "bf16_compress_wrapper",
        '--hook examples.torchs_own:bf16_wrapped --claims "rounded(bfloat16)"',
    ),
    Subject("DDPCommHookType.ALLREDUCE", f"--setup {_HOOKS}:DDPCommHookType.ALLREDUCE"),
    Subject(
        "DDPCommHookType.FP16_COMPRESS",
        f'--setup {_HOOKS}:DDPCommHookType.FP16_COMPRESS --claims "rounded(float16)"',
    ),
    Subject(
        "powerSGD_hook",
        f'--hook {_POWER_SGD}:powerSGD_hook --state {_STATE} --claims "compressed, warmup(2)"',
    ),
    Subject(
        "batched_powerSGD_hook",
        f"--hook {_POWER_SGD}:batched_powerSGD_hook --state {_STATE} "
        '--claims "compressed, warmup(2)"',
    ),
    Subject(
        "quantization_pertensor_hook",
        f"--hook {_HOOKS}.quantization_hooks:quantization_pertensor_hook "
        '--claims "compressed(feedback=False, delta=0.99)"',
    ),
    Subject(
        "quantization_perchannel_hook",
        f"--hook {_HOOKS}.quantization_hooks:quantization_perchannel_hook "
        '--claims "compressed(feedback=False, delta=0.99)"',
    ),
    Subject(
        "post_localSGD_hook",
        '--setup examples.torchs_own:local_pairs --claims "local(mixing=False), warmup(2)"',
    ),
    Subject(
        "_hook_then_optimizer",
        '--setup examples.torchs_own:sgd_in_the_hook --claims "fused(SGD, lr=0.1, momentum=0.9)"',
    ),
    Subject("noop_hook", f"--hook {_HOOKS}.debugging_hooks:noop_hook"),
    Subject(
        "PeriodicModelAverager",
        f"--averager {_AVERAGING}.averagers:PeriodicModelAverager,period=4,warmup_steps=10",
    ),
    Subject(
        "HierarchicalModelAverager",
        f"--averager {_AVERAGING}.hierarchical_model_averager:HierarchicalModelAverager,"
        "period_group_size_dict={2:2,4:4}",
    ),
    Subject("PostLocalSGDOptimizer", "--optimizer torch.distributed.optim:PostLocalSGDOptimizer"),
    Subject(
        "ZeroRedundancyOptimizer", "--optimizer torch.distributed.optim:ZeroRedundancyOptimizer"
    ),
    Subject("DDP.no_sync", "--strategy examples.torchs_own:no_sync --claims all_used"),
    Subject("Join", "--joinable torch.distributed.algorithms.join:Join"),
    *(
        Subject(f"auto_quantize, {func}, {qtype}", f"--collective {_QUANTIZE},{func=!s},{qtype=!s}")
        for func in ("all_gather", "all_to_all", "all_to_all_single")
        for qtype in ("FP16", "BFP16")
    ),
    Subject(
        "checkpoint_wrapper", f"--wrapper {_CHECKPOINT}:checkpoint_wrapper --claims recomputes"
    ),
    Subject(
        "checkpoint_wrapper, REENTRANT",
        f"--wrapper {_CHECKPOINT}:checkpoint_wrapper,checkpoint_impl=REENTRANT",
    ),
    Subject("offload_wrapper", f"--wrapper {_CHECKPOINT}:offload_wrapper"),
)

_IN_THE_LIST = (
    "The given output tensors are not written: other tensors take their places in the list, so "
    "that views of one buffer keep their old values. float64, float16 and bfloat16 come back as "
    "float32."
)
_MATRICES = (
    "Only matrices are accepted. A transposed matrix arrives in the order of its memory, and some "
    "NaN arrive as -0."
)
_SPLITS = (
    "Split sizes are only read from arguments named out_splits and in_splits, and a group only "
    "from a keyword: given otherwise they are ignored, and rows arrive at other places."
)

# For each refused subject of torch's, by name: the consequence for a training that uses it.
MEANINGS: dict[str, str] = {
    "powerSGD_hook": (
        "With several buckets chance decides in which order a rank starts its collectives. Ranks "
        "may wait for each other for ever, or add up numbers of different buckets. "
        "[The first story](stories.md#ranks-that-wait-for-each-other) has it."
    ),
    "batched_powerSGD_hook": (
        "In torch 2.13 it cannot be used: its first step after the warm-up raises AssertionError, "
        "because its matrices have two dimensions and torch's _orthogonalize requires three."
    ),
    "quantization_pertensor_hook": (
        "On Gloo it cannot be used: its first call raises IndexError, because the future of an "
        "all_gather holds a list there, and the hook expects a list in a list."
    ),
    "quantization_perchannel_hook": (
        "On Gloo it cannot be used, for the same reason as quantization_pertensor_hook."
    ),
    "_hook_then_optimizer": (
        "If a collective fails, the optimizer steps with gradients that were not reduced, and "
        "nothing is raised. Parameters that are not contiguous, such as those of channels_last "
        "models, are stepped with the elements of their gradients in another order."
    ),
    "noop_hook": "It sends nothing, on purpose: with it each rank trains a model of its own.",
    "PeriodicModelAverager": (
        "Only parameters with a gradient are averaged. If ranks differ in these, for example in a "
        "mixture of experts, their collectives do not match, and the run aborts. Each average "
        "makes channels_last parameters contiguous, and moves all parameters to other memory: "
        "views, flat buffers and CUDA graphs keep the old values."
    ),
    "HierarchicalModelAverager": "The same as PeriodicModelAverager.",
    "PostLocalSGDOptimizer": (
        "After load_state_dict() a learning-rate schedule writes to the old param_groups, and has "
        "no effect. step() takes no closure, so that the rules on closures do not apply."
    ),
    "Join": (
        "At the end of the context, the process's filter of warnings is changed for good. The "
        "advice weighs more: joinables stay enabled, so that each later step issues additional "
        "collectives, and a step on one rank alone waits for ever; and a ZeroRedundancyOptimizer "
        "that is first in the list hangs."
    ),
    "checkpoint_wrapper": (
        "It compares the versions of positional arguments alone. Tensors that are given by "
        "keyword, or in a list, and changed in place before the backward are read again as they "
        "are then: gradients are wrong, and nothing is raised."
    ),
    **{f"auto_quantize, {func}, FP16": _IN_THE_LIST for func in ("all_gather", "all_to_all")},
    **{
        f"auto_quantize, {func}, BFP16": f"{_MATRICES} {_IN_THE_LIST.partition('. ')[0]}."
        for func in ("all_gather", "all_to_all")
    },
    "auto_quantize, all_to_all_single, FP16": (
        f"Integers beyond 65504 are clamped to it, without an error. {_SPLITS}"
    ),
    "auto_quantize, all_to_all_single, BFP16": f"{_MATRICES} {_SPLITS}",
}


def ours() -> tuple[Subject, ...]:
    """Return the subjects of the commands of hooks_ref/README.md."""
    found = []
    name = ""
    for line in _README.read_text().splitlines():
        if command := _COMMAND.match(line):
            name = line.split("|")[1].strip().strip("`") or name
            found.append(Subject(name, command.group(1)))
    return tuple(found)
