"""What ``conformance.watch`` costs a training run: two ranks on Gloo, one thread each, in the same processes and in turns.

    nice python benchmarks/watch.py [--parameters 25000000] [--every 100] [--rounds 20] [--pairs 3] [--batch 32]

Two models of the same shape, linear layers with ReLU between them, train under DDP's own allreduce, forward and backward, without
an optimizer. One of them is watched with every=2, so that its steps are sampled and not, by turns. A round is four steps: of the
model that is not watched, of the other where it is sampled, of the first again, of the other where it is the one before. Ratios
are of medians over the rounds, and the median of several pairs of processes is taken, with the least and the largest; which model
is made first changes from pair to pair. Twice: in time, and in processor time of rank 0 with all of its threads, which says the
same on a machine that others use too, where time does not.

    sampled       a sampled step to one of the model that is not watched
    before        the same of the step before a sampled one, of which a little is copied
    counter       what is called on every other step, timed by itself over many calls, as a share of the step
    average       at every=N: counter + (sampled - 1 + before - 1) / N, the share of a step that the watch takes
    own clock     the same from ``watcher.cost().seconds``: it waits for the other rank in there, as the hook would have to later
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from side_by_side import ask, join, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance import watch

WIDTH = 1000
CLOCKS: tuple[Callable[[], float], ...] = (time.perf_counter, time.process_time)
Times = tuple[float, ...]  # by clock


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
    return tuple(clock() - at for clock, at in zip(CLOCKS, begin, strict=True))


def _counter(watched: DistributedDataParallel, inputs: torch.Tensor) -> float:
    """Return the seconds that a step which is neither sampled nor before one takes, beyond what it took."""
    watcher = watch(watched, every=10**9)
    for _ in range(2):  # the second is its only sampled one
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
    answers: "multiprocessing.SimpleQueue[list[Times]]",
) -> None:
    """Answer sampled, before, counter and own clock, each to the step of the model that is not watched, by clock."""
    join(rank, 2, folder)
    models = [_model(numel) for _ in range(2)]
    plain, watched = models[first], models[1 - first]
    inputs = torch.randn(batch, WIDTH)
    taken: dict[str, list[Times]] = {"plain": [], "before": [], "sampled": []}
    with watch(watched, every=2) as watcher:
        for _ in range(4):  # buckets are rebuilt, memory is warm
            _step(plain, inputs), _step(watched, inputs)
        seconds, samples = watcher.cost().seconds, watcher.cost().samples
        for number in range(2 * rounds):
            taken["plain"].append(_step(plain, inputs))
            taken["sampled" if number % 2 else "before"].append(_step(watched, inputs))
        assert watcher.cost().samples == samples + rounds
        assert not watcher.findings, list(watcher.findings)
        own = (watcher.cost().seconds - seconds) / rounds
    step, before, sampled = (
        [statistics.median(times) for times in zip(*taken[which], strict=True)]
        for which in ("plain", "before", "sampled")
    )
    counter = _counter(watched, inputs)
    rows = [sampled, before, [counter] * len(CLOCKS), [own] * len(CLOCKS)]
    if rank == 0:
        answers.put(
            [tuple(value / to for value, to in zip(row, step, strict=True)) for row in rows]
        )
    leave()


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
    what = f"{options.parameters:,} parameters, batches of {options.batch}, 2 ranks"
    print(f"{what}, {options.rounds} rounds, {options.pairs} pairs of processes")
    found = [
        ask(_measure, 2, "watch", options.parameters, options.rounds, options.batch, pair % 2)
        for pair in range(options.pairs)
    ]
    print(f"  {'':<26} {'median':>9} {'least':>9} {'largest':>9}")
    for number, clock in enumerate(("time", "processor time")):
        sampled, before, counter, own = ([pair[row][number] for pair in found] for row in range(4))  # type: ignore[index]
        every = options.every
        average = [
            c + (s - 1 + b - 1) / every for s, b, c in zip(sampled, before, counter, strict=True)
        ]
        print(f"  in {clock}")
        _say("sampled", sampled, "9.3f")
        _say("before", before, "9.3f")
        _say("counter", counter, "9.5%")
        _say(f"average at every={every}", average, "9.3%")
        if number == 0:
            _say(
                f"own clock at every={every}",
                [c + o / every for c, o in zip(counter, own, strict=True)],
                "9.3%",
            )


def _say(name: str, values: list[float], form: str) -> None:
    print(
        f"    {name:<24} "
        + " ".join(
            format(value, form) for value in (statistics.median(values), min(values), max(values))
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
