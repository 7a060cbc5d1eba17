"""Mutants of rule 1.5, mostly: hooks that raise, hang, spin, die or flood."""

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, call_number, completed, group_of, sum_of

# Raises


def raises(state: Any, bucket: Bucket) -> Result:
    """Raise in the first call."""
    raise ValueError("this hook is not finished")


def raises_at_call_4(state: Any, bucket: Bucket) -> Result:
    """Raise in the fifth call."""
    if call_number() == 4:
        raise ValueError("the warm-up is over, and nothing follows")
    return average(bucket, state)


def raises_on_rank_1(state: Any, bucket: Bucket) -> Result:
    """Raise on rank 1, while the others wait in their collective."""
    if dist.get_rank() == 1:
        raise ValueError("only on rank 1")
    return average(bucket, state)


def asks_none_for_its_size(state: Any, bucket: Bucket) -> Result:
    """Use the state as a group, although None stands for the default group."""
    buffer = bucket.buffer().div_(state.size())
    return sum_of(buffer, state)


def groups_of_gpus(state: Any, bucket: Bucket) -> Result:
    """Make groups of as many ranks as there are GPUs, which fails without a GPU."""
    gpus = torch.cuda.device_count()
    groups = [
        dist.new_group(list(range(first, first + gpus)))
        for first in range(0, dist.get_world_size(), gpus)
    ]
    return average(bucket, groups[dist.get_rank() // gpus])


def raises_in_callback(state: Any, bucket: Bucket) -> Result:
    """Raise in the callback."""

    def fail(fut: Result) -> torch.Tensor:
        raise ValueError("this callback is not finished")

    return average(bucket, state).then(fail)


def sets_exception(state: Any, bucket: Bucket) -> Result:
    """Complete the future with an exception."""
    average(bucket, state).wait()
    future = torch.futures.Future()
    future.set_exception(RuntimeError("this hook is not finished"))
    return future


def completes_twice(state: Any, bucket: Bucket) -> Result:
    """Set the result of the future twice."""
    future = completed(average(bucket, state).wait())
    future.set_result(bucket.buffer())
    return future


def differentiates(state: Any, bucket: Bucket) -> Result:
    """Call backward inside the hook, where grad mode is off."""
    (bucket.parameters()[0] * 2).sum().backward()
    return average(bucket, state)


def third_argument(state: Any, bucket: Bucket, group: Any) -> Result:
    """Take a third argument, which registration does not notice."""
    return average(bucket, group)


def swapped_arguments(bucket: Bucket, state: Any) -> Result:
    """Take the bucket first, which registration does not notice."""
    return average(bucket, state)


def exits_python(state: Any, bucket: Bucket) -> Result:
    """Call sys.exit(0)."""
    sys.exit(0)


def interrupts(state: Any, bucket: Bucket) -> Result:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


def skips_test(state: Any, bucket: Bucket) -> Result:
    """Call pytest.skip."""
    import pytest

    pytest.skip("not today")


# Hangs


def never_completes(state: Any, bucket: Bucket) -> Result:
    """Return a future that is never completed."""
    average(bucket, state).wait()
    return torch.futures.Future()


def never_completes_on_rank_1(state: Any, bucket: Bucket) -> Result:
    """Return a future that is never completed on rank 1."""
    future = average(bucket, state)
    return future if dist.get_rank() != 1 else torch.futures.Future()


def never_completes_at_call_3(state: Any, bucket: Bucket) -> Result:
    """Return a future that is never completed in the fourth call."""
    future = average(bucket, state)
    return future if call_number() != 3 else torch.futures.Future()


def thread_dies(state: Any, bucket: Bucket) -> Result:
    """Leave the future to a thread that raises before completing it."""
    future = torch.futures.Future()

    def complete() -> None:
        raise ValueError("this thread is not finished")

    average(bucket, state).wait()
    threading.Thread(target=complete).start()
    return future


def spins(state: Any, bucket: Bucket) -> Result:
    """Loop for ever."""
    while True:
        pass


def sleeps_in_c(state: Any, bucket: Bucket) -> Result:
    """Sleep in C without releasing the interpreter's lock."""
    ctypes.PyDLL(None).sleep(100_000)
    return average(bucket, state)


def locks_twice(state: Any, bucket: Bucket) -> Result:
    """Acquire a lock twice."""
    lock = threading.Lock()
    with lock, lock:
        return average(bucket, state)


def locks_reducer(model: Any) -> tuple[None, Any]:
    """Call a method of the reducer, which holds its lock during the hook."""

    def hook(state: Any, bucket: Bucket) -> Result:
        model.reducer._get_local_used_map()
        return average(bucket, state)

    return None, hook


def stops_itself(state: Any, bucket: Bucket) -> Result:
    """Stop its own process with SIGSTOP."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return average(bucket, state)


def sits_out_on_rank_1(state: Any, bucket: Bucket) -> Result:
    """Issue no collective on rank 1."""
    return average(bucket, state) if dist.get_rank() != 1 else completed(bucket.buffer())


def noop_on_rank_0(model: Any, rank: int) -> None:
    """Register a hook that does nothing on rank 0, and none on the others."""
    if rank == 0:
        model.register_comm_hook(None, lambda state, bucket: completed(bucket.buffer()))


def broadcasts_on_rank_1(state: Any, bucket: Bucket) -> Result:
    """Issue a broadcast on rank 1, and an allreduce on the others."""
    if dist.get_rank() != 1:
        return average(bucket, state)
    work = dist.broadcast(
        bucket.buffer(),
        group=group_of(state),
        src=dist.get_global_rank(group_of(state), 0),
        async_op=True,
    )
    return work.get_future().then(lambda fut: fut.value()[0])


def longer_on_rank_1(state: Any, bucket: Bucket) -> Result:
    """Send more elements on rank 1, so that Gloo aborts the process."""
    if dist.get_rank() != 1:
        return average(bucket, state)
    numel = bucket.buffer().numel()
    return sum_of(torch.cat([bucket.buffer()] * 3), state).then(lambda fut: fut.value()[:numel])


def wider_on_rank_1(state: Any, bucket: Bucket) -> Result:
    """Send float64 on rank 1, and float32 on the others."""
    if dist.get_rank() != 1:
        return average(bucket, state)
    return sum_of(bucket.buffer().double(), state).then(lambda fut: fut.value().float())


# Dies


def segfaults(state: Any, bucket: Bucket) -> Result:
    """Read address 0."""
    ctypes.string_at(0)
    return average(bucket, state)


def aborts_at_call_2(state: Any, bucket: Bucket) -> Result:
    """Abort in the third call."""
    if call_number() == 2:
        os.abort()
    return average(bucket, state)


def exits_0(state: Any, bucket: Bucket) -> Result:
    """End the process with status 0, as after a success."""
    os._exit(0)


def exits_86(state: Any, bucket: Bucket) -> Result:
    """End the process with status 86, a skipped test in torch's own test harness."""
    os._exit(86)


def exits_0_on_rank_1(state: Any, bucket: Bucket) -> Result:
    """End the process of rank 1 with status 0 after its last collective."""
    result = average(bucket, state).wait()
    if dist.get_rank() == 1 and call_number() == 5:
        os._exit(0)
    return completed(result)


def kills_itself(state: Any, bucket: Bucket) -> Result:
    """Kill its own process, as the kernel does if memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return average(bucket, state)


def kills_parent(state: Any, bucket: Bucket) -> Result:
    """Kill the parent process."""
    os.kill(os.getppid(), signal.SIGKILL)
    return average(bucket, state)


def kills_grandparent(state: Any, bucket: Bucket) -> Result:
    """Kill the parent of the parent process."""
    os.kill(
        int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]),
        signal.SIGKILL,
    )
    return average(bucket, state)


def destroys_group(state: Any, bucket: Bucket) -> Result:
    """Destroy the process group."""
    result = average(bucket, state).wait()
    dist.destroy_process_group()
    return completed(result)


def closes_files(state: Any, bucket: Bucket) -> Result:
    """Close every file descriptor of the process."""
    os.closerange(3, 4096)
    return average(bucket, state)


# Floods


def prints_a_gigabyte(state: Any, bucket: Bucket) -> Result:
    """Print a gigabyte."""
    for _ in range(1024):
        print("x" * (1 << 20))
    return average(bucket, state)


MUTANTS = [
    *(
        Mutant(name, ("1.5",))
        for name in ("raises", "raises_at_call_4", "raises_on_rank_1", "raises_in_callback")
    ),
    Mutant("asks_none_for_its_size", ("1.5",)),
    *(
        Mutant(name, ("1.5",))
        for name in (
            "sets_exception",
            "completes_twice",
            "differentiates",
            "third_argument",
            "swapped_arguments",
        )
    ),
    *(Mutant(name, ("1.5",)) for name in ("exits_python", "interrupts", "skips_test")),
    *(
        Mutant(name, ("1.5",))
        for name in (
            "never_completes",
            "never_completes_on_rank_1",
            "never_completes_at_call_3",
            "thread_dies",
        )
    ),
    *(
        Mutant(name, ("1.5",))
        for name in ("spins", "sleeps_in_c", "locks_twice", "stops_itself", "sits_out_on_rank_1")
    ),
    *(Mutant(name, ("1.5",), setup=True) for name in ("locks_reducer", "noop_on_rank_0")),
    *(
        Mutant(name, ("1.5",))
        for name in ("broadcasts_on_rank_1", "longer_on_rank_1", "wider_on_rank_1")
    ),
    *(
        Mutant(name, ("1.5",))
        for name in ("segfaults", "aborts_at_call_2", "exits_0", "exits_86", "exits_0_on_rank_1")
    ),
    *(
        Mutant(name, ("1.5",))
        for name in (
            "kills_itself",
            "kills_parent",
            "kills_grandparent",
            "destroys_group",
            "closes_files",
        )
    ),
    Mutant("groups_of_gpus", ("1.5",)),
    Mutant("prints_a_gigabyte", ("9.7",)),
]
