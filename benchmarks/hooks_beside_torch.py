"""Step time and peak memory of the reference hooks compared with torch's hooks.

    python benchmarks/hooks_beside_torch.py [--parameters 1000000 25000000] [--steps 15]
        [--pairs 5] [--only NAME]

Two ranks on Gloo, one thread each. For each model size there are three tables of ratios; absolute
times would depend on the machine.

time      Medians of step times, ours to torch's. Both hooks of a pair run in the same processes, in
          turns, step by step. Their models have the same shape, and their backward only returns
          ready gradients: the hook alone makes a difference. The table has the median, the least
          and the largest ratio over several pairs of processes, because memory addresses make one
          pair differ from the next by some percent. Which model is made first changes from pair to
          pair. The first line compares a hook with itself, and shows how far from 1 chance takes a
          ratio.
memory    The growth of a process at its peak, ours to torch's; each hook in processes of its own.
traffic   The compression hooks that torch does not have, in a group of one rank: the time of a
          step, less that of the noop hook, to the time of reading and writing all gradients once.

Some of torch's hooks do not run here (batched PowerSGD, quantization, ZeRO overlap, optimizer in
backward, mixed precision). Ours are compared with plain averaging then.
"""

import argparse
import functools
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from side_by_side import join, leave, measure
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

import hooks_ref

WIDTH = 1000
Made = tuple[Callable[[], Any], Callable[..., Any]]  # a function that makes the state, the hook


def _power(state: Any) -> Callable[[], Any]:
    return lambda: state(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def _local(state: Any) -> Callable[[], Any]:
    return lambda: state(None, dist.new_group([dist.get_rank()], use_local_synchronization=True), 2)


def _compressed(compressor: Callable[[], hooks_ref.Compressor]) -> Made:
    return lambda: hooks_ref.CompressionState(None, compressor()), hooks_ref.compression_hook


def _none() -> None:
    return None


def _renamed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook under another name: on CPU, DDP refuses torch's bf16 hook by its name alone."""

    def renamed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    return renamed


@functools.cache
def _fused(ours: bool) -> Callable[..., Any]:
    # Made in the rank at the first call, since an optimizer's state belongs to one process.
    options = {"lr": 1e-3, "momentum": 0.9}
    if ours:
        optimizer = hooks_ref.OptimizerHookState(hooks_ref.functional(torch.optim.SGD, **options))
        return hooks_ref.hook_then_optimizer(hooks_ref.allreduce_hook, optimizer)
    from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks
    from torch.distributed.optim.utils import as_functional_optim

    state = optimizer_overlap_hooks._OptimizerHookState(
        as_functional_optim(torch.optim.SGD, **options)
    )
    return optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)


def _fused_ours(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _fused(ours=True)(state, bucket)


def _fused_torchs(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _fused(ours=False)(state, bucket)


# By name: our hook, the other hook, and whether all gradients have to be in one bucket. torch's
# PowerSGD hangs with several.
PAIRS: dict[str, tuple[Made, Made, bool]] = {
    "torch's allreduce beside itself": (
        (_none, default_hooks.allreduce_hook),
        (_none, default_hooks.allreduce_hook),
        False,
    ),
    "allreduce": ((_none, hooks_ref.allreduce_hook), (_none, default_hooks.allreduce_hook), False),
    "fp16_compress": (
        (_none, hooks_ref.fp16_compress_hook),
        (_none, default_hooks.fp16_compress_hook),
        False,
    ),
    "bf16_compress": (
        (_none, hooks_ref.bf16_compress_hook),
        (_none, _renamed(default_hooks.bf16_compress_hook)),
        False,
    ),
    "fp16_compress_wrapper": (
        (_none, hooks_ref.fp16_compress_wrapper(hooks_ref.allreduce_hook)),
        (_none, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        False,
    ),
    "hook_then_optimizer": ((_none, _fused_ours), (_none, _fused_torchs), False),
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
# Our hooks without a counterpart of torch's that runs here.
ALONE: dict[str, Made] = {
    "TopK(0.01)": _compressed(lambda: hooks_ref.TopK(0.01)),
    "RandomK(0.01)": _compressed(lambda: hooks_ref.RandomK(0.01)),
    "ScaledSign": _compressed(hooks_ref.ScaledSign),
    "OneBit": _compressed(hooks_ref.OneBit),
    "QSGD()": (
        lambda: hooks_ref.CompressionState(None, hooks_ref.QSGD(), memory="none"),
        hooks_ref.compression_hook,
    ),
    "TernGrad()": (
        lambda: hooks_ref.CompressionState(None, hooks_ref.TernGrad(), memory="none"),
        hooks_ref.compression_hook,
    ),
    "quantization_pertensor": (_none, hooks_ref.quantization_pertensor_hook),
    "quantization_perchannel": (_none, hooks_ref.quantization_perchannel_hook),
    "batched_powerSGD": (_power(hooks_ref.PowerSGDState), hooks_ref.batched_powerSGD_hook),
    "gossip": (hooks_ref.GossipGraDState, hooks_ref.gossip_grad_hook),
}
AVERAGING: Made = (_none, hooks_ref.allreduce_hook)
WARM_UP = 3  # steps in which DDP rebuilds its buckets and caches fill


class _ReadyGradient(torch.autograd.Function):
    """Passes a ready gradient to a parameter, so that the backward takes almost no time."""

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
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(rows, WIDTH)) for _ in range(count)
        )
        self.grads = [torch.randn(rows, WIDTH) for _ in range(count)]

    def forward(self) -> torch.Tensor:
        return torch.stack(
            [_ReadyGradient.apply(p, g) for p, g in zip(self.weights, self.grads, strict=True)]
        ).sum()


def _train(hooks: list[Made], numel: int, steps: int, one_bucket: bool) -> list[list[float]]:
    """Return the step times of each hook; the hooks take turns."""
    models = []
    for state, hook in hooks:
        ddp = DistributedDataParallel(_Model(numel), bucket_cap_mb=1 << 20 if one_bucket else 25)
        ddp.register_comm_hook(state(), hook)
        models.append(ddp)
    times: list[list[float]] = [[] for _ in models]
    order = list(zip(models, times, strict=True))
    for step in range(steps + WARM_UP):
        order.reverse()  # neither hook is always the first in a step
        for ddp, taken in order:
            ddp.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            ddp().backward()
            if step >= WARM_UP:
                taken.append(time.perf_counter() - begin)
    return times


def _hooks_of(name: str) -> tuple[Made, Made, bool]:
    if name in PAIRS:
        return PAIRS[name]
    return (ALONE[name], AVERAGING, False)


def _time(
    rank: int,
    folder: str,
    name: str,
    numel: int,
    steps: int,
    first: int,
    results: "multiprocessing.SimpleQueue[float]",
) -> None:
    """Measure the ratio of step times; ``first`` is 0 if the model of our hook is made first.

    The model that is made first has other memory than the second.
    """
    join(rank, 2, folder)
    *hooks, one_bucket = _hooks_of(name)
    if first == 1:
        hooks.reverse()
    times = [statistics.median(taken) for taken in _train(hooks, numel, steps, one_bucket)]
    if rank == 0:
        results.put(times[first] / times[1 - first])
    leave()


def _memory(
    rank: int,
    folder: str,
    name: str,
    numel: int,
    which: int,
    results: "multiprocessing.SimpleQueue[float]",
) -> None:
    """Measure the growth of a process, in KiB; ``which`` is 0 for our hook and 1 for the other."""
    join(rank, 2, folder)
    *hooks, one_bucket = _hooks_of(name)
    before = _peak()
    _train([hooks[which]], numel, 3, one_bucket)
    if rank == 0:
        results.put(_peak() - before)
    leave()


def _peak() -> int:
    """Return the largest memory of this process so far, in KiB."""
    # VmHWM belongs to the process's own memory map. ru_maxrss would start at the parent's peak.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]


def _traffic(
    rank: int,
    folder: str,
    name: str,
    numel: int,
    steps: int,
    results: "multiprocessing.SimpleQueue[float]",
) -> None:
    """Measure the time of a hook's own work, as a multiple of a copy of all gradients."""
    join(rank, 1, folder)
    noop: Made = (_none, hooks_ref.noop_hook)
    with_hook, without = (
        statistics.median(taken) for taken in _train([ALONE[name], noop], numel, steps, False)
    )
    source = torch.randn(numel)
    destination = torch.empty(numel)
    copies = []
    for _ in range(steps):
        begin = time.perf_counter()
        destination.copy_(source)
        copies.append(time.perf_counter() - begin)
    results.put((with_hook - without) / statistics.median(copies))
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000_000, 25_000_000])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of processes, each timed once")
    parser.add_argument("--only", default="", help="run the hooks whose names contain this")
    options = parser.parse_args()
    for numel in options.parameters:
        print(
            f"{numel:,} parameters, 2 ranks, {options.steps} steps, "
            f"{options.pairs} pairs of processes"
        )
        print(f"  {'':<36} {'time':>6} {'least':>6} {'largest':>8} {'memory':>7} {'traffic':>8}")
        for name in (name for name in (*PAIRS, *ALONE) if options.only in name):
            other = "torch's" if name in PAIRS and "ours" not in name else "averaging"
            ratios = [
                measure(_time, 2, name, numel, options.steps, pair % 2)
                for pair in range(options.pairs)
            ]
            memory_of_ours = measure(_memory, 2, name, numel, 0)
            memory_of_other = measure(_memory, 2, name, numel, 1)
            columns = [
                f"{statistics.median(ratios):6.2f} {min(ratios):6.2f} {max(ratios):8.2f}",
                f"{memory_of_ours / memory_of_other:7.2f}",
                f"{measure(_traffic, 1, name, numel, options.steps):8.1f}"
                if name in ALONE
                else " " * 8,
            ]
            print(f"  {name:<36} {' '.join(columns)}  beside {other}", flush=True)


if __name__ == "__main__":
    main()
