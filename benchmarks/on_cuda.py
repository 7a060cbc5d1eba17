"""Step times on CUDA, by events of the device: the reference hooks beside torch's, and the watch.

    python benchmarks/on_cuda.py hooks [--ranks 1] [--backend nccl] [--parameters 25000000]
        [--steps 30] [--only NAME]
    python benchmarks/on_cuda.py watch [--ranks 1] [--backend nccl] [--parameters 25000000]
        [--steps 30]

One rank for each GPU. More ranks than GPUs share them, which NCCL allows from 2.30 on, and Gloo
always. Times are medians in milliseconds on rank 0, from an event before the forward to an event
after the backward.

hooks   Our hook and torch's, in the same processes and in turns, step by step. Their backward only
        returns ready gradients, so that the hook alone makes a difference. The first line compares
        a hook with itself, and shows the part of chance. Hooks that torch does not have are
        compared with plain averaging.
watch   Linear layers under DDP's own allreduce: a step without the watch, a step before a sampled
        one, and a sampled step.

``--device cpu`` measures with the clock of the host instead, to try the script without a GPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from hooks_beside_torch import ALONE, AVERAGING, PAIRS, WIDTH, Made
from side_by_side import leave, measure
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance import watch

NOT_RUN = 8  # the exit code of the kit on a machine that cannot run a profile
WARM_UP = 5  # steps in which DDP rebuilds its buckets, and the allocator grows
Step = Callable[[], None]


class _ReadyGradient(torch.autograd.Function):
    """Passes a ready gradient to a parameter, so that the backward takes almost no time."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.grad = grad
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.grad.clone(), None


class _ReadyGradients(nn.Module):
    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__()
        rows = max(1, min(WIDTH, numel // WIDTH // 4))
        count = max(1, numel // (rows * WIDTH))
        shape = (rows, WIDTH)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, device=device)) for _ in range(count)
        )
        self.grads = [torch.randn(shape, device=device) for _ in range(count)]

    def forward(self) -> torch.Tensor:
        pairs = zip(self.weights, self.grads, strict=True)
        return torch.stack([_ReadyGradient.apply(weight, grad) for weight, grad in pairs]).sum()


def _join(rank: int, ranks: int, folder: str, backend: str, device_type: str) -> torch.device:
    """Join the process group, and return this rank's device."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    return device


def _milliseconds(step: Step, device: torch.device) -> float:
    """Return the time of one step, between two events of the device."""
    dist.barrier()
    if device.type == "cpu":
        begin_on_host = time.perf_counter()
        step()
        return (time.perf_counter() - begin_on_host) * 1000
    torch.cuda.synchronize(device)
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))


def _time_hooks(
    rank: int,
    folder: str,
    name: str,
    options: argparse.Namespace,
    results: "multiprocessing.SimpleQueue[list[float]]",
) -> None:
    """Put the medians of our hook and of the other one."""
    device = _join(rank, options.ranks, folder, options.backend, options.device)
    ours, other, one_bucket = PAIRS.get(name) or (ALONE[name], AVERAGING, False)
    models = [_hooked(made, options.parameters, device, one_bucket) for made in (ours, other)]
    times: list[list[float]] = [[] for _ in models]
    order = list(zip(models, times, strict=True))
    for step in range(options.steps + WARM_UP):
        order.reverse()  # neither hook is always the first in a step
        for ddp, taken in order:
            ddp.zero_grad()
            milliseconds = _milliseconds(lambda ddp=ddp: ddp().backward(), device)
            if step >= WARM_UP:
                taken.append(milliseconds)
    if rank == 0:
        results.put([statistics.median(taken) for taken in times])
    leave()


def _hooked(
    made: Made, numel: int, device: torch.device, one_bucket: bool
) -> DistributedDataParallel:
    state, hook = made
    ddp = DistributedDataParallel(
        _ReadyGradients(numel, device), bucket_cap_mb=1 << 20 if one_bucket else 25
    )
    ddp.register_comm_hook(state(), hook)
    return ddp


def _time_watch(
    rank: int,
    folder: str,
    name: str,
    options: argparse.Namespace,
    results: "multiprocessing.SimpleQueue[list[float]]",
) -> None:
    """Put the medians of a plain step, of one before a sampled one, and of a sampled one."""
    device = _join(rank, options.ranks, folder, options.backend, options.device)
    plain, watched = (_layers(options.parameters, device) for _ in range(2))
    inputs = torch.randn(32, WIDTH, device=device)
    times: dict[str, list[float]] = {"plain": [], "before": [], "sampled": []}

    def step(ddp: DistributedDataParallel) -> Step:
        ddp.zero_grad()
        return lambda: ddp(inputs).square().mean().backward()

    with watch(watched, every=2) as watcher:
        for number in range(2 * (options.steps + WARM_UP)):
            of_plain = _milliseconds(step(plain), device)
            of_watched = _milliseconds(step(watched), device)
            if number >= 2 * WARM_UP:
                times["plain"].append(of_plain)
                times["sampled" if number % 2 else "before"].append(of_watched)
        assert not watcher.findings, list(watcher.findings)
    if rank == 0:
        results.put([statistics.median(taken) for taken in times.values()])
    leave()


def _layers(numel: int, device: torch.device) -> DistributedDataParallel:
    layers = [
        layer
        for _ in range(max(1, numel // (WIDTH * WIDTH)))
        for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())
    ]
    return DistributedDataParallel(nn.Sequential(*layers[:-1]).to(device))


def _print_hooks(options: argparse.Namespace) -> None:
    print(f"  {'':<36} {'ours':>9} {'other':>9} {'ratio':>7}")
    for name in (name for name in (*PAIRS, *ALONE) if options.only in name):
        ours, other = measure(_time_hooks, options.ranks, name, options)
        beside = "torch's" if name in PAIRS and "ours" not in name else "averaging"
        row = f"{ours:9.3f} {other:9.3f} {ours / other:7.2f}"
        print(f"  {name:<36} {row}  beside {beside}", flush=True)


def _print_watch(options: argparse.Namespace) -> None:
    plain, before, sampled = measure(_time_watch, options.ranks, "watch", options)
    print(f"  {'a step without the watch':<36} {plain:9.3f}")
    print(f"  {'a step before a sampled one':<36} {before:9.3f} {before / plain:7.2f}")
    print(f"  {'a sampled step':<36} {sampled:9.3f} {sampled / plain:7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("hooks", "watch"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", default="", help="run the hooks whose names contain this")
    options = parser.parse_args()
    if options.device == "cpu":
        options.backend = "gloo"
    elif not torch.cuda.is_available():
        print("not run: no CUDA device")
        raise SystemExit(NOT_RUN)
    print(
        f"milliseconds; {options.parameters:,} parameters, {options.ranks} ranks, "
        f"{options.backend} on {options.device}, {options.steps} steps"
    )
    if options.table == "hooks":
        _print_hooks(options)
    else:
        _print_watch(options)


if __name__ == "__main__":
    main()
