"""The host: a process that imports torch once; its lanes fork a child per rank and scenario.

Why a process of its own. A rank must start in milliseconds, not in the seconds that importing torch
takes, so it must be forked from a process that has imported already. That process cannot be pytest:
it has threads and plugins, and a fork keeps only one thread of them, with whatever locks the others
held. So the controller *executes* a host, which imports torch, torch.distributed and torch._dynamo
(the first ``DDP()`` of a process imports 829 modules of it otherwise) and nothing of the user's (``preload.py``),
runs no tensor operation, and is at exactly one thread when it forks, which it asserts.

Why lanes. A run is mostly waiting, and a subject may kill the process above it. So the host itself
runs nothing: for each run that is to go on at the same time it forks a lane, a process that serves
one connection. A lane that dies takes its one run with it, and its successor is a fork away.

Who watches whom. The controller watches the host and the lanes by their connections; the host says
how a lane ended; a lane watches its ranks (``supervise.py``). When the controller hangs up, lanes
kill their ranks and end, then the host removes the folder and ends.

The controller speaks to the host in packets (each asks for a lane, and brings its connection, or for a sign of life), and
to a lane in JSON lines; records go through files.

On several machines torchrun starts the hosts, as ``-m conformance.host``; the way to their controller is another (``nodes/slot.py``).
"""

import os
import socket
import sys
from pathlib import Path

# Started by path, with no folder of the user's on the path, so that none can shadow what is imported here.
if __name__ == "__main__" and (package := str(Path(__file__).resolve().parent.parent)) not in sys.path:
    sys.path.insert(0, package)

from conformance.hosts.local_host import serve_host


def main() -> None:
    """Run as ``python host.py FD FOLDER``: the controller's packets come from socket FD, runs are kept in FOLDER.

    torchrun runs it as ``-m conformance.host``, see ``nodes/slot.py``.
    """
    if len(sys.argv) != 3 or not sys.argv[1].isdecimal():
        from conformance.hosts.remote.host import serve_slot, start_anew

        return serve_slot(sys.argv[2:]) if sys.argv[1:2] == ["--slot"] else start_anew(sys.argv[1:])
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    serve_host(control, Path(sys.argv[2]))
    os._exit(0)


if __name__ == "__main__":
    main()
