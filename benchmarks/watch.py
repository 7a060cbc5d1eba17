"""The cost of ``conformance.watch`` in a training run: two ranks on Gloo, one thread each.

    nice python benchmarks/watch.py [--parameters 25000000] [--every 100] [--rounds 20] [--pairs 3]
        [--batch 32]

Two models of the same shape, linear layers with ReLU between them, train in the same processes and
in turns, under DDP's own allreduce: forward and backward, without an optimizer. One of them is
watched with every=2, so that every second step is sampled. A round is four steps: of the plain
model, of the watched one in a step before a sampled one, of the plain model again, and of the
watched one in a sampled step. Ratios are between medians over the rounds. The table has the median,
the least and the largest ratio over several pairs of processes; which model is made first changes
from pair to pair. There are two tables: one of time, and one of the processor time of rank 0 with
all of its threads, which means the same on a machine that other processes use, too.

    sampled       a sampled step to a step of the plain model
    before        a step before a sampled one, which copies a little, to one of the plain model
    counter       the call made in every other step, timed by itself over many calls, as a share of
                  the step
    average       at every=N: counter + (sampled - 1 + before - 1) / N, the watch's share of a step
    own clock     the same from ``watcher.cost().seconds``; it includes the wait for the other rank,
                  which the hook would have to wait for later in any case
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from side_by_side import join, leave, measure
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance import watch

WIDTH = 1000
CLOCKS: tuple[Callable[[], float], ...] = (time.perf_counter, time.process_time)
CLOCK_NAMES = ("time", "processor time")
Times = tuple[float, ...]  # by clock


@dataclass(frozen=True)
class Result:
    """The ratios of one pair of processes, each by clock."""

    sampled: Times
    before: Times
    counter: Times
    own_clock: Times


def _model(numel: int) -> DistributedDataParallel:
    layers = [
        layer
        for _ in range(max(1, numel // (WIDTH * WIDTH)))
        for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())
    ]
    return DistributedDataParallel(nn.Sequential(*layers[:-1]))


def _step(ddp: DistributedDataParallel, batch: torch.Tensor) -> Times:
    ddp.zero_grad()
    dist.barrier()
    begin = [clock() for clock in CLOCKS]
    ddp(batch).square().mean().backward()
    return tuple(clock() - start for clock, start in zip(CLOCKS, begin, strict=True))


def _counter(watched: DistributedDataParallel, inputs: torch.Tensor) -> float:
    """Return the seconds that the watch adds to a step that is neither sampled nor before one."""
    watcher = watch(watched, every=10**9)
    for _ in range(2):  # the second step is the only sampled one
        _step(watched, inputs)
    assert watcher.cost().samples == 1
    (hook,) = watched._forward_hooks.values()
    begin = time.perf_counter()
    for _ in range(10_000):
        hook(watched, (), inputs)
    return (time.perf_counter() - begin) / 10_000


def _measure(
    rank: int,
    folder: str,
    name: str,
    numel: int,
    rounds: int,
    batch: int,
    first: int,
    results: "multiprocessing.SimpleQueue[Result]",
) -> None:
    """Measure one pair of processes; ``first`` is 0 if the plain model is made first."""
    join(rank, 2, folder)
    models = [_model(numel) for _ in range(2)]
    plain = models[first]
    watched = models[1 - first]
    inputs = torch.randn(batch, WIDTH)
    times: dict[str, list[Times]] = {"plain": [], "before": [], "sampled": []}
    with watch(watched, every=2) as watcher:
        # In the first steps, DDP rebuilds its buckets and the allocator grows.
        for _ in range(4):
            _step(plain, inputs)
            _step(watched, inputs)
        # cost() returns one object that the watcher updates, so its numbers are copied here.
        samples_before = watcher.cost().samples
        seconds_before = watcher.cost().seconds
        for number in range(2 * rounds):
            times["plain"].append(_step(plain, inputs))
            times["sampled" if number % 2 else "before"].append(_step(watched, inputs))
        assert watcher.cost().samples == samples_before + rounds
        assert not watcher.findings, list(watcher.findings)
        own_clock = (watcher.cost().seconds - seconds_before) / rounds
    step = _medians(times["plain"])
    counter = _counter(watched, inputs)
    if rank == 0:
        results.put(
            Result(
                sampled=_ratios(_medians(times["sampled"]), step),
                before=_ratios(_medians(times["before"]), step),
                counter=_ratios([counter] * len(CLOCKS), step),
                own_clock=_ratios([own_clock] * len(CLOCKS), step),
            )
        )
    leave()


def _medians(times: Sequence[Times]) -> Times:
    """Return the median of several times, by clock."""
    return tuple(statistics.median(by_clock) for by_clock in zip(*times, strict=True))


def _ratios(values: Sequence[float], step: Times) -> Times:
    return tuple(value / seconds for value, seconds in zip(values, step, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    every = options.every
    print(
        f"{options.parameters:,} parameters, batches of {options.batch}, 2 ranks, "
        f"{options.rounds} rounds, {options.pairs} pairs of processes"
    )
    results: list[Result] = [
        measure(_measure, 2, "watch", options.parameters, options.rounds, options.batch, pair % 2)
        for pair in range(options.pairs)
    ]
    print(f"  {'':<26} {'median':>9} {'least':>9} {'largest':>9}")
    for clock, name in enumerate(CLOCK_NAMES):
        sampled = [result.sampled[clock] for result in results]
        before = [result.before[clock] for result in results]
        counter = [result.counter[clock] for result in results]
        own_clock = [result.own_clock[clock] for result in results]
        average = [
            c + (s - 1 + b - 1) / every for s, b, c in zip(sampled, before, counter, strict=True)
        ]
        print(f"  in {name}")
        _print_row("sampled", sampled, "9.3f")
        _print_row("before", before, "9.3f")
        _print_row("counter", counter, "9.5%")
        _print_row(f"average at every={every}", average, "9.3%")
        if name == "time":
            own = [c + o / every for c, o in zip(counter, own_clock, strict=True)]
            _print_row(f"own clock at every={every}", own, "9.3%")


def _print_row(name: str, values: list[float], form: str) -> None:
    columns = (statistics.median(values), min(values), max(values))
    print(f"    {name:<24} " + " ".join(format(value, form) for value in columns), flush=True)


if __name__ == "__main__":
    main()
