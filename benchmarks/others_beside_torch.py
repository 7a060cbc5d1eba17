"""Step time of the other references (not hooks) compared with torch's.

    python benchmarks/others_beside_torch.py [--parameters 1000000] [--steps 30] [--pairs 5]
        [--only NAME]

Two ranks on Gloo, one thread each. The table has ratios, ours to torch's: both run in the same
processes, in turns, and the ratio is between the medians of their step times. It has the median,
the least and the largest over several pairs of processes; torch's is made first in every other
pair. The first line compares torch's averager with itself, and shows how far from 1 chance takes a
ratio. Composer's strategies are compared with DDP's own averaging of the same steps.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from side_by_side import join, leave, measure
from torch.distributed.algorithms import join as torchs_join
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs_wrapper
from torch.distributed.algorithms._quantization import quantization as torchs_quantization
from torch.distributed.algorithms.model_averaging import averagers as torchs_averagers
from torch.nn.parallel import DistributedDataParallel

import hooks_ref

WIDTH = 1000
WARM_UP = 3  # steps that are not timed
Step = Callable[[], object]

# Modules as Any: torch annotates some of their names incompletely.
OURS: Any = hooks_ref
AVERAGERS: Any = torchs_averagers
QUANTIZATION: Any = torchs_quantization


def _parameters(numel: int) -> list[torch.nn.Parameter]:
    parameters = [
        torch.nn.Parameter(torch.randn(max(1, numel // 10 // WIDTH), WIDTH)) for _ in range(10)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


# Each function below makes ours or torch's, and returns a function that is timed as one step. For
# an averager it takes two steps, which is a whole period, and for a join context a whole context.


def _averager(ours: bool, numel: int) -> Step:
    module = OURS if ours else AVERAGERS
    averager = module.PeriodicModelAverager(2, 0)
    parameters = _parameters(numel)

    def two_steps() -> None:
        averager.average_parameters(parameters)
        averager.average_parameters(parameters)

    return two_steps


def _hierarchical(ours: bool, numel: int) -> Step:
    from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torchs

    module: Any = OURS if ours else torchs
    averager = module.HierarchicalModelAverager({2: 2}, 0)
    parameters = _parameters(numel)

    def two_steps() -> None:
        averager.average_parameters(parameters)
        averager.average_parameters(parameters)

    return two_steps


def _post_local_sgd(ours: bool, numel: int) -> Step:
    from torch.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

    parameters = _parameters(numel)
    inner = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    module = OURS if ours else AVERAGERS
    make = hooks_ref.PostLocalSGDOptimizer if ours else PostLocalSGDOptimizer
    optimizer: Any = make(inner, module.PeriodicModelAverager(2, 0))

    def two_steps() -> None:
        optimizer.step()
        optimizer.step()

    return two_steps


def _model(numel: int, width: int = 256) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        *(torch.nn.Linear(width, width) for _ in range(max(1, numel // width**2)))
    )


def _join_context(ours: bool, numel: int) -> Step:
    ddp = DistributedDataParallel(_model(numel))
    inputs = torch.randn(8, 256)
    context: Any = hooks_ref.Join if ours else torchs_join.Join

    def four_steps_or_six() -> None:
        with warnings.catch_warnings(), context([ddp]):
            for _ in range(4 + 2 * dist.get_rank()):
                ddp(inputs).sum().backward()

    return four_steps_or_six


def _quantized(collective: str, qtype: str) -> Callable[[bool, int], Step]:
    def make(ours: bool, numel: int) -> Step:
        module = OURS if ours else QUANTIZATION
        quantized = module.auto_quantize(getattr(dist, collective), module.DQuantType[qtype])
        sent = torch.randn(max(2, numel // WIDTH // 2 * 2), WIDTH)
        received: Any = [torch.empty_like(sent) for _ in range(2)]
        if collective == "all_to_all_single":
            received = torch.empty_like(sent)
        return lambda: quantized(received, sent)

    return make


def _wrapper(name: str) -> Callable[[bool, int], Step]:
    def make(ours: bool, numel: int) -> Step:
        wrap = getattr(hooks_ref if ours else torchs_wrapper, name)
        model = wrap(_model(numel))
        inputs = torch.randn(64, 256, requires_grad=True)

        def step() -> None:
            model(inputs).sum().backward()

        return step

    return make


def _strategy(name: str) -> Callable[[bool, int], Step]:
    def make(ours: bool, numel: int) -> Step:
        ddp = DistributedDataParallel(_model(numel))
        inputs = torch.randn(8, 256)

        def context(last: bool) -> AbstractContextManager[Any]:
            if ours:
                return hooks_ref.ddp_sync_context(ddp, last, name)
            return nullcontext() if last else ddp.no_sync()

        def step() -> None:
            ddp.zero_grad()
            for last in (False, True):
                with context(last):
                    ddp(inputs).sum().backward()

        return step

    return make


PAIRS: dict[str, Callable[[bool, int], Step]] = {
    "torch's averager beside itself": lambda ours, numel: _averager(False, numel),
    "PeriodicModelAverager": _averager,
    "HierarchicalModelAverager": _hierarchical,
    "PostLocalSGDOptimizer": _post_local_sgd,
    "Join": _join_context,
    "auto_quantize(all_gather, FP16)": _quantized("all_gather", "FP16"),
    "auto_quantize(all_gather, BFP16)": _quantized("all_gather", "BFP16"),
    "auto_quantize(all_to_all_single, FP16)": _quantized("all_to_all_single", "FP16"),
    "checkpoint_wrapper": _wrapper("checkpoint_wrapper"),
    "offload_wrapper": _wrapper("offload_wrapper"),
    "single_auto_sync beside no_sync": _strategy("single_auto_sync"),
    "forced_sync beside no_sync": _strategy("forced_sync"),
    "overlapped_sync beside no_sync": _strategy("overlapped_sync"),
}


def _time(
    rank: int,
    folder: str,
    name: str,
    numel: int,
    steps: int,
    first: int,
    results: "multiprocessing.SimpleQueue[float]",
) -> None:
    """Measure the ratio of step times; ``first`` is 0 if ours is made first."""
    join(rank, 2, folder)
    warnings.simplefilter("ignore")
    order = [True, False] if first == 0 else [False, True]
    run = {ours: PAIRS[name](ours, numel) for ours in order}
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(steps + WARM_UP):
        # Neither of the two is always the first in a step.
        for ours in (True, False) if number % 2 else (False, True):
            dist.barrier()
            begin = time.perf_counter()
            run[ours]()
            if number >= WARM_UP:
                times[ours].append(time.perf_counter() - begin)
    if rank == 0:
        results.put(statistics.median(times[True]) / statistics.median(times[False]))
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of processes, each timed once")
    parser.add_argument("--only", default="", help="run those whose names contain this")
    options = parser.parse_args()
    for numel in options.parameters:
        print(
            f"{numel:,} parameters, 2 ranks, {options.steps} steps, "
            f"{options.pairs} pairs of processes"
        )
        print(f"  {'ours to torch':<42} {'time':>6} {'least':>6} {'largest':>8}")
        for name in (name for name in PAIRS if options.only in name):
            ratios = [
                measure(_time, 2, name, numel, options.steps, pair % 2)
                for pair in range(options.pairs)
            ]
            columns = f"{statistics.median(ratios):6.2f} {min(ratios):6.2f} {max(ratios):8.2f}"
            print(f"  {name:<42} {columns}", flush=True)


if __name__ == "__main__":
    main()
