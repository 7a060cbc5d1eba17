"""References under the names of torch's modules, and tests for GPUs on CPUs.

Importing this module changes torch in this process, and imports torch's suite after that. Every
process that torch's suite spawns imports it, too.
"""

import os
from types import ModuleType
from typing import Any

# torch's suite reads them when it is imported.
os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", os.environ.get("TMPDIR", "/tmp"))

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook
import torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks
import torch.distributed.algorithms.model_averaging.averagers
import torch.distributed.algorithms.model_averaging.hierarchical_model_averager
import torch.distributed.algorithms.model_averaging.utils
import torch.distributed.optim.post_localSGD_optimizer
import torch.nn.parallel.distributed as ddp
from torch.distributed import algorithms, optim
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

import hooks_ref

# DDP's own module is one of them because DDP is a joinable.
REPLACED: tuple[ModuleType, ...] = (
    algorithms.ddp_comm_hooks.default_hooks,
    algorithms.ddp_comm_hooks.post_localSGD_hook,
    algorithms.ddp_comm_hooks.powerSGD_hook,
    algorithms.ddp_comm_hooks.quantization_hooks,
    algorithms.model_averaging.averagers,
    algorithms.model_averaging.hierarchical_model_averager,
    algorithms.model_averaging.utils,
    optim.post_localSGD_optimizer,
    ddp,
)


def put_references_in_place() -> list[str]:
    """Replace each public name in torch's modules that a reference has, and return these names."""
    replaced = []
    for module in REPLACED:
        for name in hooks_ref.__all__:
            if hasattr(module, name):
                setattr(module, name, getattr(hooks_ref, name))
                replaced.append(f"{module.__name__}.{name}")
    ddp.DistributedDataParallel.__bases__ = (torch.nn.Module, hooks_ref.Joinable)
    ddp._DDPJoinHook.__bases__ = (hooks_ref.JoinHook,)
    return replaced


class OnCpu(TorchFunctionMode):
    """Puts tensors on the CPU wherever a test asks for a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in given:
            given["device"] = "cpu"
        if func in (torch.Tensor.to, torch._C._nn._parse_to):
            args = tuple("cpu" if _is_device(value) else value for value in args)
        return func(*args, **given)


def _is_device(value: object) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number or isinstance(value, (str, torch.device))


def run_on_cpu() -> None:
    """Take the need for GPUs from torch's suite: its decorators, and DDP's devices."""

    def runs_anywhere(_: int) -> Any:
        return lambda test: test

    def without_devices(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> None:
        made(self, module, **options)

    def of_gloo(ranks: Any = None, backend: Any = None, **options: Any) -> Any:
        return new_group(ranks, backend="gloo" if backend == "nccl" else backend, **options)

    made = ddp.DistributedDataParallel.__init__
    ddp.DistributedDataParallel.__init__ = without_devices
    new_group = dist.new_group
    dist.new_group = of_gloo
    common_distributed.skip_if_lt_x_gpu = runs_anywhere
    common_distributed.init_multigpu_helper = lambda world_size, backend: {
        rank: [rank] for rank in range(world_size)
    }
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device=None: None


REPLACED_NAMES = put_references_in_place() if "TORCHS_OWN" not in os.environ else []
run_on_cpu()

from torch.testing._internal.distributed import distributed_test  # noqa: E402

distributed_test.init_multigpu_helper = common_distributed.init_multigpu_helper


class TorchsTest(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """torch's tests, each of which starts ``WORLD_SIZE`` processes."""

    __test__ = False

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        with OnCpu():
            super()._run(*args, **kwargs)
