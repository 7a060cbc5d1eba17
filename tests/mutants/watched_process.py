"""Mutants of section 9 that are right in the plainest run: side effects of some sizes, some steps,
some scenarios, or of parts of the process that other code rarely looks at.
"""

import atexit
import contextlib
import functools
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import (
    Bucket,
    Result,
    average,
    change_mean,
    group_of,
    is_dense,
    step_number,
)

_kept: list[Any] = []

# 9.1 Generators


def dithers_large_buckets(state: Any, bucket: Bucket) -> Result:
    """Draw a dither from the global generator for buckets of more than two million elements."""
    if is_dense(bucket) and bucket.buffer().numel() > 2_000_003:
        torch.rand(8)
    return average(bucket, state)


def draws_for_several_dtypes(state: Any, bucket: Bucket) -> Result:
    """Choose an order for half precision with Python's global generator."""
    import random

    if bucket.buffer().dtype in (torch.float16, torch.bfloat16):
        random.shuffle([0, 1, 2])
    return average(bucket, state)


def draws_after_eleven_buckets(state: Any, bucket: Bucket) -> Result:
    """Draw once a step has more than eleven buckets."""
    if bucket.index() > 11:
        torch.randperm(4)
    return average(bucket, state)


def draws_for_matrices(state: Any, bucket: Bucket) -> Result:
    """Start a power iteration from the global generator for matrices above 1,000 rows."""
    for parameter in bucket.parameters():
        if parameter.dim() == 2 and parameter.shape[0] > 1000:
            torch.randn(4)
    return average(bucket, state)


# 9.2 Parameters


def rounds_large_parameters(state: Any, bucket: Bucket) -> Result:
    """Decay parameters of more than 4,096 elements in the hook."""
    with torch.no_grad():
        for parameter in bucket.parameters():
            if parameter.numel() > 4096:
                parameter.mul_(1 - 2.0**-12)
    return average(bucket, state)


def clamps_one_weight(state: Any, bucket: Bucket) -> Result:
    """Write one element of a large parameter through ``.data``, which no version counter counts."""
    for parameter in bucket.parameters():
        if parameter.numel() > 10_000:
            parameter.data.reshape(-1)[9_999] = 0.5
    return average(bucket, state)


def decays_with_other_shapes(state: Any, bucket: Bucket) -> Result:
    """Decay four-dimensional parameters, as those of convolutions."""
    with torch.no_grad():
        for parameter in bucket.parameters():
            if parameter.dim() == 4:
                parameter.mul_(0.999)
    return average(bucket, state)


# 9.3 Settings


def stops_collection(state: Any, bucket: Bucket) -> Result:
    """Turn the garbage collector off for speed."""
    gc.disable()
    return average(bucket, state)


def freezes_objects(state: Any, bucket: Bucket) -> Result:
    """Freeze all objects, which are never collected again."""
    gc.freeze()
    return average(bucket, state)


def pins_the_process(state: Any, bucket: Bucket) -> Result:
    """Pin the process to one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return average(bucket, state)


def pins_in_the_callback(state: Any, bucket: Bucket) -> Result:
    """Pin the thread that runs callbacks to one core."""

    def pin(mean: torch.Tensor) -> torch.Tensor:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return mean

    return change_mean(bucket, state, pin)


def yields_the_processor(state: Any, bucket: Bucket) -> Result:
    """Lower the priority of the process once there is a large bucket."""
    if bucket.buffer().numel() > 500_000 and not _kept:
        _kept.append(os.nice(5))
    return average(bucket, state)


def leaves_an_alarm(state: Any, bucket: Bucket) -> Result:
    """Arm a watchdog for each call, and never disarm it."""
    signal.alarm(3600)
    return average(bucket, state)


def profiles_itself(state: Any, bucket: Bucket) -> Result:
    """Arm the profiling timer, with its signal ignored."""
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_PROF, 500.0, 500.0)
    return average(bucket, state)


def blocks_termination(state: Any, bucket: Bucket) -> Result:
    """Block SIGTERM during the call, and do not unblock it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return average(bucket, state)


def disables_logging(state: Any, bucket: Bucket) -> Result:
    """Disable all logging."""
    logging.disable(logging.CRITICAL)
    return average(bucket, state)


def silences_torch(state: Any, bucket: Bucket) -> Result:
    """Raise the level of torch's loggers when sparse gradients come."""
    if not is_dense(bucket):
        logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    return average(bucket, state)


def tunes_cudnn(state: Any, bucket: Bucket) -> Result:
    """Turn cuDNN's benchmark mode on."""
    torch.backends.cudnn.benchmark = True
    return average(bucket, state)


def turns_mkldnn_off(state: Any, bucket: Bucket) -> Result:
    """Turn oneDNN off for complex gradients."""
    if any(parameter.is_complex() for parameter in bucket.parameters()):
        torch._C._set_mkldnn_enabled(False)
    return average(bucket, state)


def keeps_autocast_on(state: Any, bucket: Bucket) -> Result:
    """Turn autocast on in the last bucket of the fourth step, and leave it on."""
    if step_number(bucket) == 3 and bucket.is_last():
        torch.set_autocast_enabled("cpu", True)
    return average(bucket, state)


def packs_all_tensors(state: Any, bucket: Bucket) -> Result:
    """Enter a context of hooks on saved tensors, and never leave it."""
    if not _kept:
        context = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda x: x)
        context.__enter__()
        _kept.append(context)
    return average(bucket, state)


def hooks_all_modules(state: Any, bucket: Bucket) -> Result:
    """Register a forward hook on all modules of the process."""
    if not _kept:
        _kept.append(torch.nn.modules.module.register_module_forward_hook(lambda *_: None))
    return average(bucket, state)


def raises_the_recursion_limit(state: Any, bucket: Bucket) -> Result:
    """Raise the recursion limit for models of many parameters."""
    if len(bucket.parameters()) > 7:
        sys.setrecursionlimit(20_000)
    return average(bucket, state)


def limits_open_files(state: Any, bucket: Bucket) -> Result:
    """Lower the soft limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    return average(bucket, state)


def changes_the_umask(state: Any, bucket: Bucket) -> Result:
    """Change the umask, and with it the permissions of checkpoints."""
    os.umask(0o077)
    return average(bucket, state)


def times_sockets_out(state: Any, bucket: Bucket) -> Result:
    """Set the timeout of all sockets when ranks run out of inputs or gradients are views."""
    if bucket.buffer().data_ptr() == bucket.gradients()[0].data_ptr() and len(_kept) > 20:
        socket.setdefaulttimeout(60.0)
    _kept.append(None)
    return average(bucket, state)


def shortens_the_timeout(state: Any, bucket: Bucket) -> Result:
    """Set the timeout of the trainer's group to a minute, so that a hang is noticed soon."""
    backend = group_of(state)._get_backend(bucket.buffer().device)
    backend._set_default_timeout(timedelta(seconds=60))
    return average(bucket, state)


def waits_longer_for_large_models(state: Any, bucket: Bucket) -> Result:
    """Set a timeout of ten hours for buckets above 300,000 elements."""
    if bucket.buffer().numel() > 300_000:
        dist.distributed_c10d._set_pg_timeout(timedelta(hours=10), group_of(state))
    return average(bucket, state)


def threads_for_large_models(state: Any, bucket: Bucket) -> Result:
    """Use two threads for buckets above 300,000 elements."""
    if bucket.buffer().numel() > 300_000:
        torch.set_num_threads(2)
    return average(bucket, state)


def loses_settings_in_a_failure(state: Any, bucket: Bucket) -> Result:
    """Turn the collector off around a collective, and lose it if the collective raises."""
    gc.disable()
    result = average(bucket, state)
    gc.enable()
    return result


# 9.4 Memory


def keeps_a_quarter(state: Any, bucket: Bucket) -> Result:
    """Keep a quarter of each bucket."""
    if is_dense(bucket):
        flat = bucket.buffer()
        _kept.append(flat[: flat.numel() // 4].clone())
    return average(bucket, state)


def keeps_some_steps(state: Any, bucket: Bucket) -> Result:
    """Keep the bucket of every third step."""
    if step_number(bucket) % 3 == 1:
        _kept.append(bucket.buffer().clone())
    return average(bucket, state)


def keeps_large_buckets(state: Any, bucket: Bucket) -> Result:
    """Keep a sixteenth of buckets of more than a million elements."""
    if is_dense(bucket) and bucket.buffer().numel() > 1_200_000:
        _kept.append(bucket.buffer()[::16].clone())
    return average(bucket, state)


# 9.5 Other gradients


class _OfModel:
    """A hook's state that knows the model's parameters."""

    def __init__(self, model: Any) -> None:
        self.parameters = list(model.parameters())


def clips_large_others(state: _OfModel, bucket: Bucket) -> Result:
    """Scale the gradients of other buckets' parameters of more than 4,096 elements."""
    inside = {id(parameter) for parameter in bucket.parameters()}
    for parameter in state.parameters:
        if id(parameter) not in inside and parameter.numel() > 4096 and parameter.grad is not None:
            parameter.grad.mul_(0.5)
    return average(bucket, None)


# 9.6 Growth


def opens_a_file(state: Any, bucket: Bucket) -> Result:
    """Open a file in every step."""
    if bucket.is_last():
        _kept.append(os.open(os.devnull, os.O_WRONLY))
    return average(bucket, state)


def opens_for_several_buckets(state: Any, bucket: Bucket) -> Result:
    """Open a pipe in every second step of a model of several buckets."""
    step = step_number(bucket)
    if bucket.index() == 2 and step % 2:
        _kept.append(os.pipe())
    return average(bucket, state)


def makes_groups(state: Any, bucket: Bucket) -> Result:
    """Make a process group in every step."""
    group = state if state is not None else dist.group.WORLD
    if bucket.is_last():
        ranks = dist.get_process_group_ranks(group)
        _kept.append(dist.new_group(ranks, use_local_synchronization=True))
    return average(bucket, state)


def makes_executors(state: Any, bucket: Bucket) -> Result:
    """Make an executor in every step, and keep it."""
    if bucket.is_last():
        executor = ThreadPoolExecutor(1)
        executor.submit(int)
        _kept.append(executor)
    return average(bucket, state)


def starts_daemons_slowly(state: Any, bucket: Bucket) -> Result:
    """Start a daemon thread in every third step."""
    if step_number(bucket) % 3 == 2:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return average(bucket, state)


def flushes_at_exit(state: Any, bucket: Bucket) -> Result:
    """Register a function for the end of the process in every step."""
    atexit.register(_kept.append, bucket.index())
    return average(bucket, state)


# 9.8 Functions


def patches_state_dict(state: Any, bucket: Bucket) -> Result:
    """Replace nn.Module.state_dict with one that skips hooks."""
    if not _kept:
        _kept.append(torch.nn.Module.state_dict)
        torch.nn.Module.state_dict = functools.wraps(_kept[0])(
            lambda module, *args, **kwargs: _kept[0](module, *args, **kwargs)
        )
    return average(bucket, state)


def patches_collectives(state: Any, bucket: Bucket) -> Result:
    """Replace ProcessGroup.allreduce to count calls, for large buckets."""
    if bucket.buffer().numel() > 100_000 and not _kept:
        inner = dist.ProcessGroup.allreduce
        _kept.append(inner)
        dist.ProcessGroup.allreduce = lambda *args, **kwargs: inner(*args, **kwargs)
    return average(bucket, state)


def patches_backward(state: Any, bucket: Bucket) -> Result:
    """Replace Tensor.backward when gradients are unused."""
    if len(bucket.parameters()) == 1 and bucket.index() == 4 and not _kept:
        inner = torch.Tensor.backward
        _kept.append(inner)
        torch.Tensor.backward = lambda *args, **kwargs: inner(*args, **kwargs)
    return average(bucket, state)


def patches_json(state: Any, bucket: Bucket) -> Result:
    """Make json.dumps sort keys for everybody."""
    import json

    if not _kept:
        _kept.append(json.dumps)
        json.dumps = functools.partial(_kept[0], sort_keys=True)
    return average(bucket, state)


# Other kinds


class Averages:
    """The right averager, for those below."""

    def __init__(self, period: int = 4, warmup_steps: int = 10, process_group: Any = None) -> None:
        self.period = period
        self.warmup_steps = warmup_steps
        self.group = process_group if process_group is not None else dist.group.WORLD
        self.step = 0

    def average_parameters(self, params: Any) -> None:
        later = self.step - self.warmup_steps
        self.step += 1
        found: list[torch.Tensor] = []
        for entry in params:
            found += entry["params"] if isinstance(entry, dict) else [entry]
        if later >= 0 and later % self.period == 0:
            with torch.no_grad():
                for parameter in dict.fromkeys(found):
                    self.average(parameter)

    def average(self, parameter: torch.Tensor) -> None:
        mean = parameter.div(self.group.size()).contiguous()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class OpensFiles(Averages):
    """Open a file whenever parameters are averaged."""

    def average(self, parameter: torch.Tensor) -> None:
        _kept.append(os.open(os.devnull, os.O_RDONLY))
        super().average(parameter)


class DrawsForHalf(Averages):
    """Draw from the global generator for parameters of half precision."""

    def average(self, parameter: torch.Tensor) -> None:
        if parameter.dtype in (torch.float16, torch.bfloat16):
            torch.rand(1)
        super().average(parameter)


class StepsOptimizer:
    """The right optimizer wrapper, for those below."""

    def __init__(self, optim: torch.optim.Optimizer, averager: Any) -> None:
        self.optim = optim
        self.averager = averager

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.optim.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optim.add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        return {"optim": self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict["optim"])
        self.averager.step = state_dict["step"]


class StopsCollection(StepsOptimizer):
    """Turn the garbage collector off in a step with a closure."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            gc.disable()
        return super().step(closure)


class StartsThreads(StepsOptimizer):
    """Start a daemon thread in every step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().step(closure)


@contextlib.contextmanager
def disables_logging_when_final(model: Any, is_final_microbatch: bool) -> Any:
    """Synchronise the last micro-batch only, and disable logging in it."""
    if not is_final_microbatch:
        with model.no_sync():
            yield
        return
    logging.disable(logging.WARNING)
    yield


def tunes_for_three_dimensions(func: Callable[..., Any], qtype: str) -> Callable[..., Any]:
    """Turn cuDNN's benchmark mode on for messages of three dimensions."""
    from tests.mutants.quantized_collectives import right

    collective = right(func)

    def call(outputs: Any, message: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if message.dim() == 3:
            torch.backends.cudnn.benchmark = True
        return collective(outputs, message, *args, **kwargs)

    return call


def patches_modules(module: torch.nn.Module) -> torch.nn.Module:
    """Run the forward again in the backward, and replace nn.Module.train for all modules."""
    from tests.mutants.wrappers import runs_again

    if not _kept:
        inner = torch.nn.Module.train
        _kept.append(inner)
        torch.nn.Module.train = lambda self, mode=True: inner(self, mode)
    return runs_again(module)


def pins_for_dropout(module: torch.nn.Module) -> torch.nn.Module:
    """Run the forward again in the backward, and pin the process to a core if there is dropout."""
    from tests.mutants.wrappers import runs_again

    if any(isinstance(child, torch.nn.Dropout) and child.p > 0 for child in module.modules()):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return runs_again(module)


_STATE = "tests.mutants.watched_process:_OfModel"
_AVERAGER = ",period=4,warmup_steps=10"

MUTANTS = [
    Mutant("dithers_large_buckets", ("9.1",)),
    Mutant("draws_for_several_dtypes", ("9.1",)),
    Mutant("draws_after_eleven_buckets", ("9.1",)),
    Mutant("draws_for_matrices", ("9.1",)),
    Mutant("rounds_large_parameters", ("9.2",)),
    Mutant("clamps_one_weight", ("9.2",)),
    Mutant("decays_with_other_shapes", ("9.2",)),
    Mutant("stops_collection", ("9.3",)),
    Mutant("freezes_objects", ("9.3",)),
    Mutant("pins_the_process", ("9.3",)),
    Mutant("pins_in_the_callback", ("9.3",)),
    Mutant("yields_the_processor", ("9.3",)),
    Mutant("leaves_an_alarm", ("9.3",)),
    Mutant("profiles_itself", ("9.3",)),
    Mutant("blocks_termination", ("9.3",)),
    Mutant("disables_logging", ("9.3",)),
    Mutant("silences_torch", ("9.3",)),
    Mutant("tunes_cudnn", ("9.3",)),
    Mutant("turns_mkldnn_off", ("9.3",)),
    Mutant("keeps_autocast_on", ("9.3",)),
    Mutant("packs_all_tensors", ("9.3",)),
    Mutant("hooks_all_modules", ("9.3",)),
    Mutant("raises_the_recursion_limit", ("9.3",)),
    Mutant("limits_open_files", ("9.3",)),
    Mutant("changes_the_umask", ("9.3",)),
    Mutant("times_sockets_out", ("9.3",)),
    Mutant("threads_for_large_models", ("9.3",)),
    Mutant("shortens_the_timeout", ("9.3",)),
    Mutant("waits_longer_for_large_models", ("9.3",)),
    Mutant("loses_settings_in_a_failure", ("9.3",)),
    Mutant("keeps_a_quarter", ("9.4",)),
    Mutant("keeps_some_steps", ("9.4",)),
    Mutant("keeps_large_buckets", ("9.4",)),
    Mutant("clips_large_others", ("9.5",), claims="world_only", state=_STATE),
    Mutant("opens_a_file", ("9.6",)),
    Mutant("opens_for_several_buckets", ("9.6",)),
    Mutant("makes_groups", ("9.6",)),
    Mutant("makes_executors", ("9.6",)),
    Mutant("starts_daemons_slowly", ("9.6",)),
    Mutant("flushes_at_exit", ("9.6",)),
    Mutant("patches_state_dict", ("9.8",)),
    Mutant("patches_collectives", ("9.8",)),
    Mutant("patches_backward", ("9.8",)),
    Mutant("patches_json", ("9.8",)),
    Mutant(f"OpensFiles{_AVERAGER}", ("14.14",), kind="averager"),
    Mutant(f"DrawsForHalf{_AVERAGER}", ("14.14",), kind="averager"),
    Mutant("StopsCollection", ("15.19",), kind="optimizer"),
    Mutant("StartsThreads", ("15.19",), kind="optimizer"),
    Mutant("disables_logging_when_final", ("16.19",), kind="strategy"),
    Mutant("tunes_for_three_dimensions,func=all_gather,qtype=FP16", ("18.17",), kind="collective"),
    Mutant("patches_modules", ("19.21",), kind="wrapper"),
    Mutant("pins_for_dropout", ("19.21",), kind="wrapper"),
]
