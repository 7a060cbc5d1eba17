"""Step time and peak memory of the reference hooks beside torch's, two ranks on Gloo, one thread each.

    python benchmarks/hooks_beside_torch.py [--parameters 1000000 25000000] [--steps 15] [--pairs 5] [--only NAME]

Three tables for each model size, all of them ratios, since the machine is what it is:

time      medians of step times, ours to torch's; both hooks of a pair run in the same processes, in turns, step by step, on
          models of the same shape whose backward only hands out gradients: what differs is the hook. The median over several
          pairs of processes, and the least and the largest: where memory happens to lie makes a process pair differ from the
          next by some percent, and which of the two is made first changes from pair to pair. The first line, of one hook beside
          itself, says how far from 1 chance takes a ratio
memory    by how much a process has grown at its peak, ours to torch's; each hook in processes of its own
traffic   of the compression hooks beyond torch, alone in a group of one rank: time of a step, less that of the noop hook, to
          the time that reading and writing all gradients once takes

Hooks of torch's that do not run here (batched PowerSGD, quantization, ZeRO overlap, optimizer in backward, mixed
precision) have nothing to be beside: ours is beside plain averaging then.
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
from side_by_side import ask, join, leave
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
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


def _named(hook: Callable[..., Any]) -> Callable[..., Any]:
    """DDP refuses torch's bf16 hook on CPU by its name alone."""

    def renamed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    return renamed


@functools.cache
def _fused(whose: str) -> Callable[..., Any]:
    options = {"lr": 1e-3, "momentum": 0.9}
    if whose == "ours":
        optimizer = hooks_ref.OptimizerHookState(hooks_ref.functional(torch.optim.SGD, **options))
        return hooks_ref.hook_then_optimizer(hooks_ref.allreduce_hook, optimizer)
    from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks
    from torch.distributed.optim.utils import as_functional_optim

    state = optimizer_overlap_hooks._OptimizerHookState(
        as_functional_optim(torch.optim.SGD, **options)
    )
    return optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)


def _fused_ours(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _fused("ours")(state, bucket)


def _fused_torchs(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _fused("torch's")(state, bucket)


# name: ours, the other, whether all gradients have to be in one bucket (where torch's hangs with more)
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
        (_none, _named(default_hooks.bf16_compress_hook)),
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
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(rows, WIDTH)) for _ in range(count)
        )
        self.grads = [torch.randn(rows, WIDTH) for _ in range(count)]

    def forward(self) -> torch.Tensor:
        return torch.stack(
            [_GivesGradients.apply(p, g) for p, g in zip(self.weights, self.grads, strict=True)]
        ).sum()


def _train(hooks: list[Made], numel: int, steps: int, one_bucket: bool) -> list[list[float]]:
    """Return the step times of each hook, in turns; the first three steps regroup buckets and warm up."""
    models = []
    for state, hook in hooks:
        ddp = DistributedDataParallel(_Model(numel), bucket_cap_mb=1 << 20 if one_bucket else 25)
        ddp.register_comm_hook(state(), hook)
        models.append(ddp)
    times: list[list[float]] = [[] for _ in models]
    for step in range(steps + 3):
        for ddp, taken in list(zip(models, times, strict=True))[:: 1 if step % 2 else -1]:
            ddp.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            ddp().backward()
            if step >= 3:
                taken.append(time.perf_counter() - begin)
    return times


def _hooks_of(name: str) -> tuple[Made, Made, bool]:
    return PAIRS[name] if name in PAIRS else (ALONE[name], AVERAGING, False)


def _time(
    rank: int,
    folder: str,
    name: str,
    numel: int,
    steps: int,
    first: int,
    answers: "multiprocessing.SimpleQueue[float]",
) -> None:
    """Answer ours to the other's; ``first`` is 0 where the model of ours is made first, in whatever memory is left to it then."""
    join(rank, 2, folder)
    *hooks, one_bucket = _hooks_of(name)
    times = [
        statistics.median(taken)
        for taken in _train(hooks if first == 0 else hooks[::-1], numel, steps, one_bucket)
    ]
    if rank == 0:
        answers.put(times[first] / times[1 - first])
    leave()


def _memory(
    rank: int,
    folder: str,
    name: str,
    numel: int,
    which: int,
    answers: "multiprocessing.SimpleQueue[float]",
) -> None:
    join(rank, 2, folder)
    hooks = _hooks_of(name)
    before = _peak()
    _train([hooks[0] if which == 0 else hooks[1]], numel, 3, hooks[2])
    if rank == 0:
        answers.put(_peak() - before)
    leave()


def _peak() -> int:
    """The most that this process has held, in KiB: that of its own memory map, not what it inherited."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def _traffic(
    rank: int,
    folder: str,
    name: str,
    numel: int,
    steps: int,
    answers: "multiprocessing.SimpleQueue[float]",
) -> None:
    join(rank, 1, folder)
    times = [
        statistics.median(taken)
        for taken in _train([ALONE[name], (_none, hooks_ref.noop_hook)], numel, steps, False)
    ]
    one, other = torch.randn(numel), torch.empty(numel)
    copies = []
    for _ in range(steps):
        begin = time.perf_counter()
        other.copy_(one)
        copies.append(time.perf_counter() - begin)
    answers.put((times[0] - times[1]) / statistics.median(copies))
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000_000, 25_000_000])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument(
        "--pairs", type=int, default=5, help="pairs of processes that times are taken in"
    )
    parser.add_argument("--only", help="names that contain this")
    options = parser.parse_args()
    for numel in options.parameters:
        print(
            f"{numel:,} parameters, 2 ranks, {options.steps} steps, {options.pairs} pairs of processes"
        )
        print(f"  {'':<36} {'time':>6} {'least':>6} {'largest':>8} {'memory':>7} {'traffic':>8}")
        for name in (name for name in (*PAIRS, *ALONE) if (options.only or "") in name):
            beside = "torch's" if name in PAIRS and "ours" not in name else "averaging"
            ratios = [
                ask(_time, 2, name, numel, options.steps, pair % 2) for pair in range(options.pairs)
            ]
            times = f"{statistics.median(ratios):6.2f} {min(ratios):6.2f} {max(ratios):8.2f}"
            ours, other = (ask(_memory, 2, name, numel, which) for which in (0, 1))
            traffic = (
                f"{ask(_traffic, 1, name, numel, options.steps):8.1f}"
                if name in ALONE
                else f"{'':8}"
            )
            print(
                f"  {name:<36} {times} {ours / other:7.2f} {traffic}  beside {beside}", flush=True
            )


if __name__ == "__main__":
    main()
