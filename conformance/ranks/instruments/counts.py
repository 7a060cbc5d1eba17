"""How much of the process's resources is in use, as numbers that grow if something is kept."""

import gc
import os
import sys

from conformance.ranks.instruments import process_state
from conformance.torch_versions.private import known_groups


def counts() -> dict[str, int]:
    """Return the numbers after garbage has been collected.

    - ``descriptors``: open files, sockets and pipes;
    - ``tasks``: threads of any language;
    - ``groups``: process groups that torch.distributed has registered;
    - ``children``: processes that this one has started and not reaped;
    - ``files``: files in the temporary directory of the rank;
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
        "blocks": sys.getallocatedblocks(),
        "memory": process_state.allocated(),
    }
