"""The process groups of a rank."""

import subprocess
import sys

import pytest

# A callback holds the last reference to a group, and ends on the group's own thread.
HELD_BY_ITS_CALLBACK = '''
import os, threading
import torch, torch.distributed as dist
from conformance.ranks.process_groups import end_groups

class Holder:
    def __init__(self):
        self.group = dist.new_group([0])

    def __del__(self):
        del self.group
        over.set()

def start():
    """Return whether a callback runs on the group's thread.

    It runs on this thread if the collective is over before the callback is attached.
    """
    holder, here = Holder(), []

    def callback(future, holder=holder):
        if threading.current_thread() is threading.main_thread():
            here.append(True)
        else:
            goes_on.wait()

    dist.all_reduce(torch.ones(1), group=holder.group, async_op=True).get_future().then(callback)
    return not here

goes_on, over = threading.Event(), threading.Event()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
while not start():
    over.clear()
end_groups()
goes_on.set()
over.wait()
os._exit(0)
'''


@pytest.mark.ranks
def test_a_group_held_only_by_its_own_callback_aborts_no_rank() -> None:
    command = [sys.executable, "-c", HELD_BY_ITS_CALLBACK]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
