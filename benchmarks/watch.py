"""What ``conformance.watch`` costs a training run: two ranks on Gloo, one thread each, in the same processes and in turns.

    nice python benchmarks/watch.py [--parameters 25000000] [--every 100] [--rounds 20] [--pairs 3] [--batch 32]

Two models of the same shape, linear layers with ReLU between them, train under DDP's own allreduce, forward and backward, without
an optimizer. One of them is watched with every=2, so that its steps are sampled and not, by turns. A round is four steps: of the
model that is not watched, of the other where it is sampled, of the first again, of the other where it is the one before. Ratios are of
medians over the rounds, and the median of several pairs of processes is taken, with the least and the largest; which model is
made first changes from pair to pair.

    sampled       a sampled step to one of the model that is not watched
    before        the same of the step before a sampled one, of which a little is copied
    counter       what is called on every other step, timed by itself over many calls, as a share of the step
    average       at every=N: counter + (sampled - 1 + before - 1) / N, the share of the time that the watch takes
    own clock     the same from ``watcher.cost().seconds``: it waits for the other rank in there, as the hook would have to later
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from side_by_side import ask, join, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance import watch

WIDTH = 1000


def _model(numel: int) -> DistributedDataParallel:
    layers = [layer for _ in range(max(1, numel // (WIDTH * WIDTH))) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers[:-1]))


def _step(ddp: DistributedDataParallel, batch: torch.Tensor) -> float:
    ddp.zero_grad()
    dist.barrier()
    begin = time.perf_counter()
    ddp(batch).square().mean().backward()
    return time.perf_counter() - begin


def _measure(
    rank: int, folder: str, name: str, numel: int, rounds: int, batch: int, first: int, answers: "multiprocessing.SimpleQueue[list[float]]"
) -> None:
    join(rank, 2, folder)
    models = [_model(numel) for _ in range(2)]
    plain, watched = models[first], models[1 - first]
    inputs = torch.randn(batch, WIDTH)
    watcher = watch(watched, every=2)
    for _ in range(4):  # buckets are rebuilt, memory is warm; then a sampled step is next
        _step(plain, inputs), _step(watched, inputs)
    watcher_before, samples_before = watcher.cost().seconds, watcher.cost().samples
    taken: dict[str, list[float]] = {"plain": [], "before": [], "sampled": []}
    for _ in range(rounds):
        for _ in range(2):
            taken["plain"].append(_step(plain, inputs))
            before = watcher.cost().samples
            seconds = _step(watched, inputs)
            taken["sampled" if watcher.cost().samples > before else "before"].append(seconds)
    own = (watcher.cost().seconds - watcher_before) / (watcher.cost().samples - samples_before)
    assert len(taken["sampled"]) == len(taken["before"]) == rounds
    assert not watcher.findings, list(watcher.findings)
    watcher.close()
    idle = watch(watched, every=10**9)
    for _ in range(2):  # the second is its only sampled one
        _step(watched, inputs)
    (hook,) = watched._forward_hooks.values()
    begin = time.perf_counter()
    for _ in range(10_000):
        hook(watched, (), inputs)
    counter = (time.perf_counter() - begin) / 10_000
    step = statistics.median(taken["plain"])
    assert idle.cost().samples == 1
    if rank == 0:
        answers.put([statistics.median(taken["before"]) / step, counter / step, statistics.median(taken["sampled"]) / step, own / step])
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    what = f"{options.parameters:,} parameters, batches of {options.batch}, 2 ranks"
    print(f"{what}, {options.rounds} rounds, {options.pairs} pairs of processes")
    found = [
        ask(_measure, 2, "watch", options.parameters, options.rounds, options.batch, pair % 2)  # type: ignore[misc]
        for pair in range(options.pairs)
    ]
    rows = {
        "before": [each[0] for each in found],
        "counter": [each[1] for each in found],
        "sampled": [each[2] for each in found],
        f"average at every={options.every}": [each[1] + (each[2] - 1 + each[0] - 1) / options.every for each in found],
        f"own clock at every={options.every}": [each[1] + each[3] / options.every for each in found],
    }
    print(f"  {'':<28} {'median':>9} {'least':>9} {'largest':>9}")
    for name, values in rows.items():
        share = name not in ("before", "sampled")
        said = (f"{100 * value:8.4f}%" if share else f"{value:9.3f}" for value in (statistics.median(values), min(values), max(values)))
        print(f"  {name:<28} {' '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
