"""The modules that a host imports, so that its ranks need not: torch, the kit and the references.

A host imports nothing of the user's. The imports that are left to a rank take some 5 ms, and then
there is the subject. torch imports some of its modules only on first use. The host imports those
too if that costs a rank more than a host: the first ``DDP()`` of a process imports 829 modules of
torch._dynamo, and ``torch.distributed.optim`` compiles functions for a quarter of a second.
"""

import gc
import importlib
import importlib.machinery
import importlib.util
import random
import sys
import warnings

from conformance.hosts.memory import (
    fill_holes,
    fill_small_holes,
    restore_environment,
    use_huge_pages,
)
from conformance.ranks.instruments.forgotten_modules import note_modules
from conformance.ranks.instruments.source_files import note_last_module
from conformance.subjects.kinds import KINDS
from conformance.torch_versions.private import (
    IMPORTED_LATE,
    IN_SOME_VERSIONS,
    clear_caches_of_dynamo,
)

_MODULES = (
    "torch",
    *IMPORTED_LATE,
    "torch.distributed",
    "torch.profiler",
    "conformance.ranks.rank",
    "conformance.hosts.profile_check",
    "conformance.ranks.drivers._blocks",
    "hooks_ref",
    *(f"conformance.ranks.drivers.{kind}" for kind in KINDS),
)
_IN_SOME_VERSIONS = (*IN_SOME_VERSIONS, "numpy.ctypeslib")
_ON_FIRST_USE = (
    "torch.distributed.optim",
    "torch.distributed.algorithms.model_averaging.averagers",
)
# A seed that no subject uses: if a subject set the same seed, the change would not show (9.1).
# NumPy takes seeds up to 2**32.
_SEED = 2_654_435_769
# Bytes of each size class that lines of /proc/self/maps take at most.
_BYTES_OF_MAPS = 50_000


def preload() -> None:
    """Import everything that ranks need, and prepare this process to be forked."""
    restore_environment()
    # The objects that make up modules stay, so that collecting garbage during imports is wasted.
    gc.disable()
    for name in (*_MODULES, *filter(importlib.util.find_spec, _IN_SOME_VERSIONS)):
        importlib.import_module(name)
    with warnings.catch_warnings():
        # torch warns here about modules of its own that it has deprecated. Only these imports are
        # silenced: the filters that torch sets during the imports above are to stay.
        warnings.simplefilter("ignore")
        for name in _ON_FIRST_USE:
            importlib.import_module(name)
    # Once here, instead of in each rank.
    clear_caches_of_dynamo()
    note_modules("hooks_ref")
    note_last_module()
    _grow_table_of_interned_strings()
    # The collector never looks at the frozen objects again. It would write to each of them, and
    # every rank would copy their pages.
    gc.freeze()
    _inflate_old_generation()
    seed_generators()
    fill_holes()
    gc.enable()
    use_huge_pages()
    # The strings of /proc/self/maps that use_huge_pages() has read and freed left holes.
    fill_small_holes(_BYTES_OF_MAPS)


def seed_generators() -> None:
    """Seed the global generators of torch, Python and NumPy alike on every host.

    Without it each process is seeded from the system's entropy, and ranks of two hosts would draw
    different numbers.
    """
    torch = importlib.import_module("torch")
    # This includes CUDA's generators, as soon as a rank uses CUDA.
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(_SEED)


def _inflate_old_generation() -> None:
    """Inflate the garbage collector's old generation, so that no rank has a full collection.

    Python starts a full collection when the objects that are new since the last one exceed a
    quarter of its survivors. The survivors are counted at a full collection only, so the
    count stays large after the objects are gone. Over everything that the host has imported a full
    collection would take a quarter of a second; those objects are frozen before this function runs.
    """
    survivors: list[list[object]] = [[] for _ in range(100_000)]
    gc.collect()
    del survivors


def _grow_table_of_interned_strings() -> None:
    """Make Python's table of interned strings grow here if it would soon grow in a rank.

    To grow the table takes a rank longer than all of its imports. A table that grows gets room for
    as many strings as it holds, which is more than are added here.
    """
    for number in range(60_000):
        sys.intern(f"conformance {number}")
