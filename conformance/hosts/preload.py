"""What a host imports, so that its ranks need not: torch, the kit's own modules for ranks, the references; nothing of the user's.

A rank imports what is left in some 5 ms, and the subject. Modules that torch imports only when they are asked for are asked for
here where a rank would spend more on them than a host: ``torch.distributed.optim`` compiles functions for a quarter of a second.
"""

import gc
import importlib
import importlib.machinery
import importlib.util
import random
import sys
import warnings

from conformance.hosts.memory import as_the_caller_has_it, fill_holes, use_huge_pages
from conformance.subjects.kinds import KINDS

_MODULES = (
    *("torch", "torch._dynamo", "torch._dynamo.trace_rules", "torch._dynamo.utils", "torch.distributed", "torch.profiler"),
    *("conformance.ranks.rank", "conformance.hosts.profile_check", "conformance.ranks.drivers._blocks", "hooks_ref"),
    *(f"conformance.ranks.drivers.{kind}" for kind in KINDS),
)
_IN_SOME_VERSIONS = ("torch.profiler._cupti_monitor", "numpy.ctypeslib")
_SEED = 2_654_435_769  # one that no subject sets: to set that would not show (9.1); NumPy takes up to 2**32
_ASKED_FOR = ("torch.distributed.optim", "torch.distributed.algorithms.model_averaging.averagers")


def preload() -> None:
    """Import it, and leave it to the collector of garbage never to look at it again."""
    as_the_caller_has_it()
    gc.disable()  # what modules are made of stays
    for name in (*_MODULES, *filter(importlib.util.find_spec, _IN_SOME_VERSIONS)):
        importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch deprecates of its own; filters that torch itself sets are to stay
        for name in _ASKED_FOR:
            importlib.import_module(name)
    _clear_what_ranks_would_clear()
    _make_room_for_names()
    gc.freeze()
    _have_much_that_is_old()
    seed_generators()
    fill_holes()
    gc.enable()
    use_huge_pages()


def seed_generators() -> None:
    """Have the global generators of every host's ranks begin alike: torch, Python and NumPy seed each process from the system's entropy."""
    torch = importlib.import_module("torch")
    torch.manual_seed(_SEED)  # of CUDA too, once a rank begins to use it
    random.seed(_SEED)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(_SEED)


def _clear_what_ranks_would_clear() -> None:
    """``init_process_group()`` clears these caches: here once, for all ranks."""
    clear = getattr(sys.modules["torch._dynamo.trace_rules"], "clear_lru_cache", None)
    if clear:
        clear()


def _have_much_that_is_old() -> None:
    """Have the collector of garbage know of much that is old: it looks at all again when that has grown by a quarter, in no rank.

    It counts when it has looked at all, which would take a quarter of a second of what was imported; that those it counted are
    gone it notices only when it counts again.
    """
    old: list[list[object]] = [[] for _ in range(100_000)]
    gc.collect()
    del old


def _make_room_for_names() -> None:
    """Have Python's table of interned strings grow here, where it is to grow soon: it takes a rank longer than all that it imports.

    A table that grows has room for as many strings as it holds, of which there are more than this.
    """
    for number in range(60_000):
        sys.intern(f"conformance {number}")
