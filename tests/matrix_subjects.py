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

# For each refused subject of torch's, by name: the consequence for a training that uses it.
MEANINGS: dict[str, str] = {}


def ours() -> tuple[Subject, ...]:
    """Return the subjects of the commands of hooks_ref/README.md."""
    found = []
    name = ""
    for line in _README.read_text().splitlines():
        if command := _COMMAND.match(line):
            name = line.split("|")[1].strip().strip("`") or name
            found.append(Subject(name, command.group(1)))
    return tuple(found)
