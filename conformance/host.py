"""The host: a process that imports torch once; its lanes fork one child per rank of a run.

Why a host. A rank must start in milliseconds, and importing torch takes seconds, so a rank is
forked from a process that has imported torch already. That process cannot be pytest: pytest has
threads and plugins, and a fork copies only the thread that forks, together with the locks that the
other threads held. So the controller executes a host as a program of its own. The host imports
torch, torch.distributed and torch._dynamo and nothing of the user's (``hosts/preload.py``), runs no
tensor operation, and asserts that it has exactly one thread when it forks.

Why lanes. A run spends most of its time waiting, so several runs go on at the same time; and a
subject may kill the process above it. The host therefore runs nothing itself. For each concurrent
run it forks a lane, a process that serves one connection. A lane that dies takes only its own run
with it, and the host forks a new one.

Supervision. The controller watches the host and the lanes through their connections, the host
reports how a lane ended, and a lane watches its ranks (``hosts/supervisor.py``). When the
controller hangs up, the lanes kill their ranks and end; then the host removes the folder and ends.

The controller sends packets to the host. A packet requests a lane and carries the lane's
connection, or it requests a sign of life. Commands to a lane are lines of JSON. Records of runs go
through files.

On several machines torchrun starts the hosts, as ``-m conformance.host``, and a controller connects
to them over TCP (``hosts/remote/host.py``).
"""

import os
import socket
import sys
from pathlib import Path

# This file is run by path. It starts without any folder of the user's on the import path, so that
# none can shadow the kit's imports; only the folder of the package itself is added.
if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    # Python 3.10 puts the folder of this file first; later versions have the option -P.
    if sys.path[:1] == [str(folder)]:
        del sys.path[0]
    package = str(folder.parent)
    if package not in sys.path:
        sys.path.insert(0, package)

from conformance.hosts.local_host import serve_host

TORCHRUN_HOST = "--torchrun-host"


def main() -> None:
    """Run the host.

    A pool runs ``python host.py FD FOLDER``: packets of the controller arrive on the socket FD, and
    FOLDER holds the runs. torchrun runs ``python -m conformance.host``, and that process replaces
    itself by ``python host.py --torchrun-host``.
    """
    arguments = sys.argv[1:]
    if len(arguments) == 2 and arguments[0].isdecimal():
        control = socket.socket(fileno=int(arguments[0]))
        control.set_inheritable(False)
        serve_host(control, Path(arguments[1]))
        os._exit(0)
    from conformance.hosts.remote.host import execute_torchrun_host, serve_torchrun_host

    if arguments[:1] == [TORCHRUN_HOST]:
        serve_torchrun_host(arguments[1:])
    else:
        execute_torchrun_host(TORCHRUN_HOST, arguments)


if __name__ == "__main__":
    main()
