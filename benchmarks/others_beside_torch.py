"""Step time of the references that are no hooks beside torch's, two ranks on Gloo, one thread each.

    python benchmarks/others_beside_torch.py [--parameters 1000000] [--steps 30] [--pairs 5] [--only NAME]

Ratios, ours to torch's: medians of step times of both in the same processes, in turns; then the median over several pairs of
processes, in every other of which torch's is made first, and the least and the largest. The first line, of torch's averager beside
itself, says how far from 1 chance takes a ratio. Composer's strategies are timed against DDP's own averaging of the same steps.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from side_by_side import ask, join, leave
from torch.distributed.algorithms import join as torchs_join
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs_wrapper
from torch.distributed.algorithms._quantization import quantization as torchs_quantization
from torch.distributed.algorithms.model_averaging import averagers as torchs_averagers
from torch.nn.parallel import DistributedDataParallel

import hooks_ref

WIDTH = 1000
Step = Callable[[], object]


def _parameters(numel: int) -> list[torch.nn.Parameter]:
    parameters = [
        torch.nn.Parameter(torch.randn(max(1, numel // 10 // WIDTH), WIDTH)) for _ in range(10)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def _averager(ours: bool, numel: int) -> Step:
    module = hooks_ref if ours else torchs_averagers
    averager, parameters = module.PeriodicModelAverager(2, 0), _parameters(numel)  # type: ignore[attr-defined]

    def two_steps() -> None:
        averager.average_parameters(parameters)
        averager.average_parameters(parameters)

    return two_steps


def _hierarchical(ours: bool, numel: int) -> Step:
    from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torchs

    averager, parameters = (
        (hooks_ref if ours else torchs).HierarchicalModelAverager({2: 2}, 0),
        _parameters(numel),
    )  # type: ignore[attr-defined]

    def two_steps() -> None:
        averager.average_parameters(parameters)
        averager.average_parameters(parameters)

    return two_steps


def _post_local_sgd(ours: bool, numel: int) -> Step:
    from torch.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

    parameters = _parameters(numel)
    inner = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    averager = (hooks_ref if ours else torchs_averagers).PeriodicModelAverager(2, 0)  # type: ignore[attr-defined]
    optimizer = (hooks_ref.PostLocalSGDOptimizer if ours else PostLocalSGDOptimizer)(
        inner, averager
    )

    def two_steps() -> None:
        optimizer.step()
        optimizer.step()

    return two_steps


def _model(numel: int, width: int = 256) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        *(torch.nn.Linear(width, width) for _ in range(max(1, numel // width**2)))
    )


def _join_context(ours: bool, numel: int) -> Step:
    ddp, inputs = DistributedDataParallel(_model(numel)), torch.randn(8, 256)
    made = hooks_ref.Join if ours else torchs_join.Join

    def four_steps() -> None:
        with warnings.catch_warnings(), made([ddp]):
            for _ in range(4 + 2 * dist.get_rank()):
                ddp(inputs).sum().backward()

    return four_steps


def _quantized(collective: str, qtype: str) -> Callable[[bool, int], Step]:
    def make(ours: bool, numel: int) -> Step:
        module = hooks_ref if ours else torchs_quantization
        quantized = module.auto_quantize(getattr(dist, collective), module.DQuantType[qtype])  # type: ignore[attr-defined]
        sent = torch.randn(max(2, numel // WIDTH // 2 * 2), WIDTH)
        received = (
            torch.empty_like(sent)
            if collective == "all_to_all_single"
            else [torch.empty_like(sent) for _ in range(2)]
        )
        return lambda: quantized(received, sent)

    return make


def _wrapper(name: str) -> Callable[[bool, int], Step]:
    def make(ours: bool, numel: int) -> Step:
        wrap = getattr(hooks_ref if ours else torchs_wrapper, name)
        model, inputs = wrap(_model(numel)), torch.randn(64, 256, requires_grad=True)

        def step() -> None:
            model(inputs).sum().backward()

        return step

    return make


def _strategy(name: str) -> Callable[[bool, int], Step]:
    def make(ours: bool, numel: int) -> Step:
        ddp, inputs = DistributedDataParallel(_model(numel)), torch.randn(8, 256)

        def step() -> None:
            ddp.zero_grad()
            for last in (False, True):
                with (
                    hooks_ref.ddp_sync_context(ddp, last, name)
                    if ours
                    else ddp.no_sync()
                    if not last
                    else warnings.catch_warnings()
                ):
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
    answers: "multiprocessing.SimpleQueue[float]",
) -> None:
    """Answer ours to torch's; ``first`` is 0 where ours is made first."""
    join(rank, 2, folder)
    warnings.simplefilter("ignore")
    made = {
        ours: PAIRS[name](ours, numel) for ours in ((True, False) if first == 0 else (False, True))
    }
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(steps + 3):
        for ours in (True, False) if number % 2 else (False, True):
            dist.barrier()
            begin = time.perf_counter()
            made[ours]()
            if number >= 3:
                times[ours].append(time.perf_counter() - begin)
    if rank == 0:
        answers.put(statistics.median(times[True]) / statistics.median(times[False]))
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--pairs", type=int, default=5, help="pairs of processes that times are taken in"
    )
    parser.add_argument("--only", default="", help="names that contain this")
    options = parser.parse_args()
    for numel in options.parameters:
        print(
            f"{numel:,} parameters, 2 ranks, {options.steps} steps, {options.pairs} pairs of processes"
        )
        print(f"  {'ours to torch':<42} {'time':>6} {'least':>6} {'largest':>8}")
        for name in (name for name in PAIRS if options.only in name):
            ratios = [
                ask(_time, 2, name, numel, options.steps, pair % 2) for pair in range(options.pairs)
            ]
            print(
                f"  {name:<42} {statistics.median(ratios):6.2f} {min(ratios):6.2f} {max(ratios):8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
