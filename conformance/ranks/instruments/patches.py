"""The functions of torch, of Python and of their classes that a subject has replaced."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import torch

from conformance.torch_versions.private import (
    SHARED_CLASSES,
    SHARED_MODULES,
    WRAPPING_FILES,
    wrapped_by_dynamo,
)

# Modules whose functions all code shares. Those that are not imported yet are left out.
_MODULES = (
    "torch",
    "torch.amp",
    "torch.autograd",
    "torch.autograd.graph",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.distributed.algorithms.join",
    "torch.fft",
    "torch.futures",
    "torch.jit",
    "torch.linalg",
    "torch.multiprocessing",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.nn.modules.module",
    "torch.nn.parallel.distributed",
    "torch.nn.utils",
    "torch.nn.utils.clip_grad",
    "torch.optim.optimizer",
    "torch.random",
    "torch.serialization",
    "torch.utils.checkpoint",
    "torch.utils.data",
    *SHARED_MODULES,
    "numpy",
    "numpy.random",
    "atexit",
    "builtins",
    "contextlib",
    "copy",
    "functools",
    "gc",
    "io",
    "itertools",
    "json",
    "logging",
    "math",
    "operator",
    "os",
    "os.path",
    "pickle",
    "random",
    "shutil",
    "signal",
    "socket",
    "struct",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "traceback",
    "warnings",
    "weakref",
)
_CLASSES = (
    "torch.Tensor",
    "torch.Generator",
    "torch.Size",
    "torch.nn.Module",
    "torch.nn.Parameter",
    "torch.nn.ParameterList",
    "torch.nn.Linear",
    "torch.nn.Conv2d",
    "torch.nn.BatchNorm1d",
    "torch.nn.BatchNorm2d",
    "torch.nn.Embedding",
    "torch.nn.LayerNorm",
    "torch.nn.Sequential",
    "torch.nn.Dropout",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "torch.amp.GradScaler",
    "torch.amp.autocast",
    "torch.autograd.Function",
    "torch.autograd.graph.saved_tensors_hooks",
    "torch.distributed.ProcessGroup",
    "torch.distributed.Work",
    "torch.distributed.Store",
    "torch.distributed.GradBucket",
    "torch.distributed.Reducer",
    "torch.distributed.algorithms.Join",
    "torch.futures.Future",
    *SHARED_CLASSES,
    "torch.cuda.Stream",
    "torch.cuda.Event",
    "torch.no_grad",
    "torch.utils.data.DataLoader",
    "json.JSONEncoder",
    "json.JSONDecoder",
    "logging.Logger",
    "logging.Handler",
    "logging.StreamHandler",
    "pickle.Pickler",
    "random.Random",
    "subprocess.Popen",
    "threading.Thread",
    "threading.Event",
    "warnings.catch_warnings",
)
_DESCRIPTORS = (
    property,
    staticmethod,
    classmethod,
    GetSetDescriptorType,
    MemberDescriptorType,
)


class Patches:
    """The functions that have been replaced since this object was made.

    A replaced function is one that its owner had, or that a class inherited, and that is another
    object now. Functions that are added under a new name do not count. Descriptors of classes, such
    as properties, count as functions.

    There are some thousand functions, and a forked process copies each page of memory in which one
    lies as soon as it touches the function. The host therefore makes the first object, and ranks
    look only at owners that have changed since.
    """

    def __init__(self) -> None:
        self._owners = dict(_owners())
        self._before = {name: dict(vars(owner)) for name, owner in self._owners.items()}
        self._tables = {name: id(_table_of(owner)) for name, owner in self._owners.items()}
        self._versions = self._current_versions()

    def renew(self) -> None:
        """Take all functions as they are now for those that were there before."""
        known = self._versions
        now = self._current_versions()
        for name, owner in _owners():
            if name not in self._owners:
                self._owners[name] = owner
                self._tables[name] = id(_table_of(owner))
                now[name] = _version(self._tables[name])
            if now[name] is None or now[name] != known.get(name):
                self._before[name] = dict(vars(owner))
        self._versions = now

    def found(self) -> list[str]:
        """Return the name and the new module of each function that was replaced."""
        found: list[str] = []
        now = self._current_versions()
        for name, owner in self._owners.items():
            if now[name] is None or now[name] != self._versions[name]:
                found += self._replaced(name, owner)
        return found

    def _current_versions(self) -> dict[str, int | None]:
        return {name: _version(table) for name, table in self._tables.items()}

    def _replaced(self, name: str, owner: Any) -> Iterator[str]:
        before = self._before[name]
        after = dict(vars(owner))
        for key, value in after.items():
            old = before[key] if key in before else _inherited(owner, key)
            if value is not old and _is_function(old) and _is_replaced(old, value):
                yield f"{name}.{key} (now from {_source(value)})"
        # A class from which a method is removed uses the one that it inherits, or none.
        for key in before.keys() - after.keys():
            if _is_function(before[key]):
                yield f"{name}.{key} (now gone)"


def _table_of(owner: Any) -> dict[str, Any]:
    """Return the dictionary of a module, or the one behind the read-only view of a class."""
    if isinstance(owner, ModuleType):
        return vars(owner)
    table: dict[str, Any] = gc.get_referents(vars(owner))[0]
    return table


def _version(table: int) -> int | None:
    """Return the number that a dictionary gets at each change; None if this Python has none.

    It is the fourth word of the object, ``ma_version_tag``. No two states of any dictionaries share
    a number. To read it touches no object.
    """
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in ((3, 11), (3, 12)):
        return None
    return ctypes.c_uint64.from_address(table + 3 * ctypes.sizeof(ctypes.c_void_p)).value


def _owners() -> Iterator[tuple[str, Any]]:
    for name in (*_MODULES, *_CLASSES):
        owner = sys.modules.get(name) or _attribute(name)
        if isinstance(owner, (type, ModuleType)):
            yield name, owner


def _attribute(name: str) -> Any:
    """Return the object of a dotted name, or None; nothing is imported for it."""
    first, *rest = name.split(".")
    owner: Any = sys.modules.get(first)
    path = first
    for part in rest:
        path = f"{path}.{part}"
        # Not getattr() on a module: some import on demand.
        owner = vars(owner).get(part, sys.modules.get(path)) if owner is not None else None
    return owner


def _inherited(owner: Any, key: str) -> Any:
    """Return the attribute that a class would have had from its bases; None for a module."""
    if not isinstance(owner, type) or key.startswith("__"):
        return None
    for base in owner.__mro__[1:-1]:
        if key in vars(base):
            return vars(base)[key]
    return None


def _is_function(value: Any) -> bool:
    if isinstance(value, _DESCRIPTORS):
        return True
    # torch rebinds some classes itself.
    return callable(value) and not isinstance(value, type)


def _is_replaced(old: Any, value: Any) -> bool:
    # Bound methods of one object are made anew at each access.
    return value is not old and bool(value != old) and not _is_wrapped_by_torch(old, value)


def _is_wrapped_by_torch(old: Any, value: Any) -> bool:
    """Whether torch has wrapped its own function, as it does when an optimizer is first made.

    Dynamo does the same with ``torch.manual_seed`` when it is first imported.
    """
    wraps = getattr(value, "__wrapped__", None) is old
    inner = wrapped_by_dynamo(value) is old
    if not isinstance(value, FunctionType) or not (wraps or inner):
        return False
    folder = str(torch.__path__[0])
    file = value.__code__.co_filename
    return file.startswith(folder) and file.endswith(WRAPPING_FILES)


def _source(value: Any) -> str:
    function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    code = getattr(function, "__code__", None)
    module = getattr(function, "__module__", None)
    # functools.wraps() copies the module's name, the code object has the true file.
    globals_ = getattr(function, "__globals__", None)
    if code is not None and globals_ is not None:
        module = globals_.get("__name__", module)
    return module or type(value).__name__
