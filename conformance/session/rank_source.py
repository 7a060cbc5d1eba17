"""The source of ranks: this machine, or the hosts that torchrun has started. Imports no torch."""

from conformance.hosts.pool import Pool
from conformance.hosts.ranks_protocol import Ranks
from conformance.hosts.remote.pool import AttachedPool
from conformance.session.options import Options


def ranks_for(options: Options) -> Ranks:
    """Return the ranks that the options name."""
    if options.attach:
        return AttachedPool(options.attach, options.deadline, options.attach_wait)
    return Pool(options.deadline)
