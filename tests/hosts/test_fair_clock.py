"""A deadline's clock stands still while a process waits for a processor, but never for good."""

import os

from conformance.hosts.fair_clock import SLOWEST, FairClock, seconds_in_queue


class Machine:
    """A machine whose time and queues are set by hand."""

    def __init__(self) -> None:
        self.time = 100.0
        self.queues = {1: 3.0, 2: 0.0}

    def clock(self) -> FairClock:
        return FairClock(self.queues, lambda: self.time, self.queues.__getitem__)


def test_it_runs_while_no_process_is_in_the_queue() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.time += 8
    assert clock.read() == 8
    machine.time += 1
    assert clock.read() == 9


def test_the_longest_wait_for_a_processor_does_not_count() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.time += 8
    machine.queues[1] += 1
    machine.queues[2] += 6
    assert clock.read() == 2
    machine.time += 8
    assert clock.read() == 10


def test_it_never_stands_still_for_good() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.time += 10
    machine.queues[1] += 100
    assert clock.read() == 10 / SLOWEST


def test_linux_counts_the_time_in_the_queue() -> None:
    assert seconds_in_queue(os.getpid()) >= 0
    assert seconds_in_queue(2**22 + 1) == 0
