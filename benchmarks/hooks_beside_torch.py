"""Step time and peak memory of the reference hooks beside torch's, two ranks on Gloo, one thread each.

    python benchmarks/hooks_beside_torch.py [--parameters 1000000 25000000] [--steps 15]

Both hooks of a pair run in the same processes, in turns, step by step, on models of the same shape whose backward only
hands out gradients: what differs is the hook. Printed is the ratio of the medians, ours to torch's, and that of the
compression hooks beyond torch to plain averaging. Only ratios mean anything: the machine is what it is.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import hooks_ref

WIDTH = 1000
Made = tuple[Callable[[], Any], Callable[..., Any]]  # state, hook


def _power(state: Any) -> Callable[[], Any]:
    return lambda: state(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def _local(state: Any) -> Callable[[], Any]:
    return lambda: state(None, dist.new_group([dist.get_rank()], use_local_synchronization=True), 2)


def _compressed(compressor: Callable[[], hooks_ref.Compressor]) -> Made:
    return lambda: hooks_ref.CompressionState(None, compressor()), hooks_ref.compression_hook


def _none() -> None:
    return None


# name: ours, the other, whether all gradients have to be in one bucket (where torch's hangs with more)
PAIRS: dict[str, tuple[Made, Made, bool]] = {
    "allreduce": ((_none, hooks_ref.allreduce_hook), (_none, default_hooks.allreduce_hook), False),
    "fp16_compress": ((_none, hooks_ref.fp16_compress_hook), (_none, default_hooks.fp16_compress_hook), False),
    "noop": ((_none, hooks_ref.noop_hook), (_none, debugging_hooks.noop_hook), False),
    "powerSGD, one bucket": (
        (_power(hooks_ref.PowerSGDState), hooks_ref.powerSGD_hook),
        (_power(powerSGD_hook.PowerSGDState), powerSGD_hook.powerSGD_hook),
        True,
    ),
    "powerSGD, several buckets of ours": (
        (_power(hooks_ref.PowerSGDState), hooks_ref.powerSGD_hook),
        (_none, default_hooks.allreduce_hook),
        False,
    ),
    "post_localSGD": (
        (_local(hooks_ref.PostLocalSGDState), hooks_ref.post_localSGD_hook),
        (_local(post_localSGD_hook.PostLocalSGDState), post_localSGD_hook.post_localSGD_hook),
        False,
    ),
}
ALONE: dict[str, Made] = {
    "TopK(0.01)": _compressed(lambda: hooks_ref.TopK(0.01)),
    "RandomK(0.01)": _compressed(lambda: hooks_ref.RandomK(0.01)),
    "ScaledSign": _compressed(hooks_ref.ScaledSign),
    "OneBit": _compressed(hooks_ref.OneBit),
}


class _GivesGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.grad = grad
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.grad.clone(), None


class _Model(torch.nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        rows = max(1, min(WIDTH, numel // WIDTH // 4))
        count = max(1, numel // (rows * WIDTH))
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(rows, WIDTH)) for _ in range(count))
        self.grads = [torch.randn(rows, WIDTH) for _ in range(count)]

    def forward(self) -> torch.Tensor:
        return torch.stack([_GivesGradients.apply(p, g) for p, g in zip(self.weights, self.grads, strict=True)]).sum()


def _rank(rank: int, folder: str, numel: int, steps: int, answers: "multiprocessing.SimpleQueue[Any]") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, (ours, other, one_bucket) in PAIRS.items():
        times = _in_turns([ours, other], numel, steps, one_bucket)
        if rank == 0:
            answers.put((name, statistics.median(times[0]) / statistics.median(times[1])))
    for name, made in ALONE.items():
        times = _in_turns([made, (_none, default_hooks.allreduce_hook)], numel, steps, False)
        if rank == 0:
            answers.put((name, statistics.median(times[0]) / statistics.median(times[1])))
    dist.barrier()
    dist.destroy_process_group()


def _in_turns(hooks: list[Made], numel: int, steps: int, one_bucket: bool) -> list[list[float]]:
    models = []
    for state, hook in hooks:
        ddp = DistributedDataParallel(_Model(numel), bucket_cap_mb=1 << 20 if one_bucket else 25)
        ddp.register_comm_hook(state(), hook)
        models.append(ddp)
    times: list[list[float]] = [[] for _ in models]
    for step in range(steps + 3):
        for ddp, taken in zip(models, times, strict=True):
            ddp.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            ddp().backward()
            if step >= 3:  # the first regroup buckets and warm up
                taken.append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000_000, 25_000_000])
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for numel in options.parameters:
        answers = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            arguments = (folder, numel, options.steps, answers)
            ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
            for process in ranks:
                process.start()
            print(f"{numel:,} parameters, 2 ranks, ratio of median step times over {options.steps} steps:")
            for name in [*PAIRS, *ALONE]:
                said, ratio = answers.get()
                beside = "torch's" if name in PAIRS and "ours" not in name else "plain averaging"
                print(f"  {said:<36} {ratio:5.2f} times {beside}", flush=True)
            for process in ranks:
                process.join()


if __name__ == "__main__":
    main()
