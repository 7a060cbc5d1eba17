"""Mutants of section 9: hooks that average right, and have side effects."""

import builtins
import ctypes
import importlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, average_hook, change_mean

# 9.1 Random states


def draws_torch(state: Any, bucket: Bucket) -> Result:
    """Draw from torch's global generator."""
    torch.rand(1)
    return average(bucket, state)


def seeds_torch(state: Any, bucket: Bucket) -> Result:
    """Seed torch's global generator."""
    torch.manual_seed(0)
    return average(bucket, state)


def draws_python(state: Any, bucket: Bucket) -> Result:
    """Draw from Python's global generator."""
    random.random()
    return average(bucket, state)


def draws_numpy(state: Any, bucket: Bucket) -> Result:
    """Draw from NumPy's global generator."""
    import numpy

    numpy.random.rand()
    return average(bucket, state)


def draws_in_callback(state: Any, bucket: Bucket) -> Result:
    """Draw from torch's global generator in the callback, on another thread."""
    return average(bucket, state).then(lambda fut: (fut.value(), torch.rand(1))[0])


def seeds_at_setup(process_group: Any) -> tuple[Any, Any]:
    """Seed torch's global generator in the set-up."""
    torch.manual_seed(0)
    return process_group, average_hook


# 9.2 Parameters


def nudges_parameters(state: Any, bucket: Bucket) -> Result:
    """Add a little to the first parameter of each bucket."""
    with torch.no_grad():
        bucket.parameters()[0].add_(1e-3)
    return average(bucket, state)


def steps_parameters(state: Any, bucket: Bucket) -> Result:
    """Step the parameters in the hook without claiming to be fused."""

    def step(mean: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if not parameter.is_complex():
                    parameter.sub_(0.1 * grad)
        return mean

    return change_mean(bucket, state, step)


# 9.3 Settings of the process


def sets_default_dtype(state: Any, bucket: Bucket) -> Result:
    """Set torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    return average(bucket, state)


def sets_anomaly_mode(state: Any, bucket: Bucket) -> Result:
    """Turn anomaly detection on."""
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    return average(bucket, state)


def sets_threads(state: Any, bucket: Bucket) -> Result:
    """Set torch's number of threads."""
    torch.set_num_threads(2)
    return average(bucket, state)


def sets_deterministic(state: Any, bucket: Bucket) -> Result:
    """Turn deterministic algorithms on."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return average(bucket, state)


def sets_matmul_precision(state: Any, bucket: Bucket) -> Result:
    """Lower the process's precision of matrix products."""
    torch.set_float32_matmul_precision("medium")
    return average(bucket, state)


def sets_flush_denormal(state: Any, bucket: Bucket) -> Result:
    """Make the processor flush subnormal values to zero."""
    torch.set_flush_denormal(True)
    return average(bucket, state)


def silences_warnings(state: Any, bucket: Bucket) -> Result:
    """Silence the warnings of the whole process."""
    warnings.simplefilter("ignore")
    return average(bucket, state)


def ignores_interrupts(state: Any, bucket: Bucket) -> Result:
    """Ignore SIGINT, so that Ctrl-C ends nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return average(bucket, state)


def replaces_excepthook(state: Any, bucket: Bucket) -> Result:
    """Replace sys.excepthook."""
    sys.excepthook = lambda *args: None
    return average(bucket, state)


def sets_environment(state: Any, bucket: Bucket) -> Result:
    """Set an environment variable, which child processes inherit."""
    os.environ["OMP_NUM_THREADS"] = "2"
    return average(bucket, state)


def changes_directory(state: Any, bucket: Bucket) -> Result:
    """Change the working directory."""
    os.chdir("/")
    return average(bucket, state)


# 9.4 Memory

_kept: list[Any] = []
_scratch: dict[Any, torch.Tensor] = {}


def keeps_buffers(state: Any, bucket: Bucket) -> Result:
    """Keep a copy of every bucket."""
    _kept.append(bucket.buffer().clone())
    return average(bucket, state)


def keeps_futures(state: Any, bucket: Bucket) -> Result:
    """Keep every future, together with its result."""
    _kept.append(change_mean(bucket, state, lambda mean: mean.clone()))
    return _kept[-1]


def scratch_by_bound_method(state: Any, bucket: Bucket) -> Result:
    """Key the scratch buffer by bucket.index, a new bound method in every call."""
    _scratch[bucket.index] = bucket.buffer().clone()
    return average(bucket, state)


def scratch_by_id(state: Any, bucket: Bucket) -> Result:
    """Key the scratch buffer by id(bucket), and keep the bucket, so that every id is new."""
    _scratch[id(bucket)] = bucket.buffer().clone()
    _kept.append(bucket)
    return average(bucket, state)


def leaks_in_c(state: Any, bucket: Bucket) -> Result:
    """Allocate the size of a bucket outside Python, and never free it."""
    ctypes.CDLL(None).malloc(
        ctypes.c_size_t(bucket.buffer().numel() * bucket.buffer().element_size() + 16)
    )
    return average(bucket, state)


# 9.9 The model


class Knows:
    """A hook that holds the DDP module, which holds the hook."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def hook(self, state: Any, bucket: Bucket) -> Result:
        return average(bucket, self.model.process_group)


def knows_the_model(model: Any) -> Any:
    """Keep the model alive for good."""
    return None, Knows(model).hook


# 9.5 Gradients of other buckets


class _WithModel:
    """A hook's state that knows the model's parameters and buffers."""

    def __init__(self, model: Any) -> None:
        self.parameters = list(model.parameters())
        self.buffers = list(model.buffers())

    def outside(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the dense gradients of the parameters outside the bucket."""
        inside = {id(parameter) for parameter in bucket.parameters()}
        outside = [p.grad for p in self.parameters if id(p) not in inside and p.grad is not None]
        return [grad for grad in outside if grad.layout == torch.strided]


def clears_other_gradients(state: _WithModel, bucket: Bucket) -> Result:
    """Clear the gradients of other buckets to save memory."""
    for grad in state.outside(bucket):
        grad.zero_()
    return average(bucket, None)


def clips_other_gradients(state: _WithModel, bucket: Bucket) -> Result:
    """Clip the gradients of the whole model in the last bucket's call."""
    if bucket.is_last():
        for grad in state.outside(bucket):
            grad.mul_(0.5)
    return average(bucket, None)


# 9.2 Buffers


def decays_buffers(state: _WithModel, bucket: Bucket) -> Result:
    """Halve all that the model's state_dict() has beside its parameters, once in a step."""
    if bucket.is_last():
        for buffer in state.buffers:
            if buffer.is_floating_point():
                buffer.mul_(0.5)
    return average(bucket, None)


def repairs_buffers(state: _WithModel, bucket: Bucket) -> Result:
    """Replace NaN and infinities of buffers by 0, as after a step that overflowed."""
    result = average(bucket, None)
    for buffer in state.buffers if bucket.is_last() else ():
        if buffer.is_floating_point():
            buffer.nan_to_num_(0.0, 0.0, 0.0)
    return result


def keeps_buffers_in_half(state: _WithModel, bucket: Bucket) -> Result:
    """Clamp all buffers to the range of float16."""
    result = average(bucket, None)
    largest = torch.finfo(torch.float16).max
    for buffer in state.buffers if bucket.is_last() else ():
        if buffer.is_floating_point():
            buffer.clamp_(-largest, largest)
    return result


def flushes_buffers(state: _WithModel, bucket: Bucket) -> Result:
    """Set the smallest values of buffers to 0, so that nothing is slow."""
    result = average(bucket, None)
    for buffer in state.buffers if bucket.is_last() else ():
        if buffer.is_floating_point():
            buffer.masked_fill_(buffer.abs() < 1e-20, 0.0)
    return result


def averages_buffers(state: _WithModel, bucket: Bucket) -> Result:
    """Average the running statistics of the model, once in a step."""
    if bucket.is_last():
        for buffer in state.buffers:
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(dist.get_world_size())
    return average(bucket, None)


def counts_two_batches(state: _WithModel, bucket: Bucket) -> Result:
    """Keep the number of batches that a BatchNorm has seen at two, for a cumulative average."""
    for buffer in state.buffers:
        if buffer.dtype == torch.int64:
            buffer.clamp_(max=2)
    return average(bucket, None)


# 9.6 Leftovers


def leaves_threads(state: Any, bucket: Bucket) -> Result:
    """Start a thread per call that waits for ever."""
    threading.Thread(target=threading.Event().wait).start()
    return average(bucket, state)


def leaves_daemons(state: Any, bucket: Bucket) -> Result:
    """Start a daemon thread per call that waits for ever."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return average(bucket, state)


def leaves_process(state: Any, bucket: Bucket) -> Result:
    """Start a process, and never end it."""
    if not _kept:
        _kept.append(subprocess.Popen(["sleep", "600"]))
    return average(bucket, state)


def leaves_orphan(state: Any, bucket: Bucket) -> Result:
    """Start a process through a shell that ends at once, so that it has another parent."""
    if not _kept:
        _kept.append(subprocess.run("sleep 600 > /dev/null 2>&1 &", shell=True, check=True))
    return average(bucket, state)


def leaves_file(state: Any, bucket: Bucket) -> Result:
    """Write each bucket to a temporary file, and never delete it."""
    with tempfile.NamedTemporaryFile(suffix=".pt", delete=False) as file:
        torch.save(bucket.buffer(), file)
    return average(bucket, state)


# 9.7 Output


def prints_buckets(state: Any, bucket: Bucket) -> Result:
    """Print a hundred kilobytes per call."""
    print("x" * 100_000)
    return average(bucket, state)


def logs_to_stderr(state: Any, bucket: Bucket) -> Result:
    """Write a hundred kilobytes per call to stderr in the callback."""
    return average(bucket, state).then(
        lambda fut: (fut.value(), sys.stderr.write("x" * 100_000))[0]
    )


# 9.8 Replaced functions


def patches_equal(state: Any, bucket: Bucket) -> Result:
    """Replace torch.equal with a function that always returns True."""
    torch.equal = lambda *args: True
    return average(bucket, state)


def patches_tensor(state: Any, bucket: Bucket) -> Result:
    """Replace Tensor.allclose with a function that always returns True."""
    torch.Tensor.allclose = lambda *args, **kwargs: True
    return average(bucket, state)


def patches_all_reduce(state: Any, bucket: Bucket) -> Result:
    """Wrap torch.distributed.all_reduce."""
    if not _kept:
        _kept.append(dist.all_reduce)
        dist.all_reduce = lambda *args, **kwargs: _kept[0](*args, **kwargs)
    return average(bucket, state)


def patches_builtins(state: Any, bucket: Bucket) -> Result:
    """Replace the built-in all with a function that always returns True."""
    builtins.all = lambda items: True
    return average(bucket, state)


def patches_clock(state: Any, bucket: Bucket) -> Result:
    """Replace time.perf_counter with a function that always returns 0."""
    time.perf_counter = lambda: 0.0
    return average(bucket, state)


def imports_patches(state: Any, bucket: Bucket) -> Result:
    """Import a module that replaces torch.allclose on import."""
    importlib.import_module("tests.mutants._patches_at_import")
    return average(bucket, state)


_MODEL = "tests.mutants.interference:_WithModel"

_left = dict.fromkeys(
    ("4.1", "5.1"), "gradients of earlier buckets or micro-batches are there to be cleared"
)

MUTANTS = [
    Mutant("draws_torch", ("9.1",)),
    Mutant("seeds_torch", ("9.1",)),
    Mutant("draws_python", ("9.1",)),
    Mutant("draws_numpy", ("9.1",)),
    Mutant("draws_in_callback", ("9.1",)),
    Mutant("seeds_at_setup", ("9.1",), setup=True),
    Mutant("nudges_parameters", ("9.2",)),
    Mutant("steps_parameters", ("9.2",)),
    *(
        Mutant(name, ("9.2",), claims="world_only", state=_MODEL)
        for name in (
            "decays_buffers",
            "averages_buffers",
            "counts_two_batches",
            "repairs_buffers",
            "keeps_buffers_in_half",
            "flushes_buffers",
        )
    ),
    Mutant("sets_default_dtype", ("9.3",)),
    Mutant("sets_anomaly_mode", ("9.3",)),
    Mutant("sets_threads", ("9.3",)),
    Mutant("sets_deterministic", ("9.3",)),
    Mutant("sets_matmul_precision", ("9.3",)),
    Mutant(
        "sets_flush_denormal",
        ("9.3", "8.5"),
        because={"8.5": "the processor then flushes the subnormals of the reduction"},
    ),
    Mutant("silences_warnings", ("9.3",)),
    Mutant("ignores_interrupts", ("9.3",)),
    Mutant("replaces_excepthook", ("9.3",)),
    Mutant("sets_environment", ("9.3",)),
    Mutant("changes_directory", ("9.3",)),
    Mutant("keeps_buffers", ("9.4",)),
    Mutant("keeps_futures", ("9.4",)),
    Mutant("scratch_by_bound_method", ("9.4",)),
    Mutant("scratch_by_id", ("9.4",)),
    Mutant("leaks_in_c", ("9.4",)),
    Mutant("knows_the_model", ("9.9",), setup=True),
    Mutant("clears_other_gradients", ("9.5",), claims="world_only", state=_MODEL, because=_left),
    Mutant("clips_other_gradients", ("9.5",), claims="world_only", state=_MODEL),
    Mutant("leaves_threads", ("9.6",)),
    Mutant("leaves_daemons", ("9.6",)),
    Mutant("leaves_process", ("9.6",)),
    Mutant("leaves_orphan", ("9.6",)),
    Mutant("leaves_file", ("9.6",)),
    Mutant("prints_buckets", ("9.7",)),
    Mutant("logs_to_stderr", ("9.7",)),
    Mutant("patches_equal", ("9.8",)),
    Mutant("patches_tensor", ("9.8",)),
    Mutant("patches_all_reduce", ("9.8",)),
    Mutant("patches_builtins", ("9.8",)),
    Mutant("patches_clock", ("9.8",)),
    Mutant("imports_patches", ("9.8",)),
]
