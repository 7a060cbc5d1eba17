"""How much of the process's resources is in use, as numbers that grow if something is kept."""

import gc
import os
import sys

import torch.distributed as dist

from conformance.ranks.instruments import process_state
from conformance.torch_versions.private import default_store, known_groups


def counts() -> dict[str, int]:
    """Return the numbers after garbage has been collected.

    - ``descriptors``: open files, sockets and pipes;
    - ``tasks``: threads of any language;
    - ``groups``: process groups that torch.distributed has registered;
    - ``children``: processes that this one has started and not reaped;
    - ``files``: files in the temporary directory of the rank;
    - ``keys``: keys in the store of the default group, if that is a file, which no other run uses;
    - ``blocks``: small objects of Python's;
    - ``memory``: bytes in blocks of the C library.
    """
    # Twice: finalizers of the first collection may leave new garbage.
    gc.collect()
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # one is the listing's own
        "tasks": len(os.listdir("/proc/self/task")),
        "groups": len(known_groups().pg_map),
        "children": len(process_state.children()),
        "files": len(process_state.files_left()),
        "keys": _keys(),
        "blocks": sys.getallocatedblocks(),
        "memory": process_state.allocated(),
    }


def _keys() -> int:
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.num_keys() if isinstance(store, dist.FileStore) else 0
