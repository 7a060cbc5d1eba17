"""The exchange of samples between ranks: on a process group of the kit's own, with a timeout.

The group is Gloo's, whatever the model's group is. Gloo takes CPU tensors and leaves the streams of
devices alone, and a collective that not all ranks join ends with an exception; NCCL's watchdog
would end the process. A collective that timed out does not name the missing ranks, so a store
holds the step at which each rank arrived, and the reason of a rank that left.
"""

import contextlib
import datetime
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from conformance.torch_versions.private import default_store

_LEFT = "left"


class ExchangeError(Exception):
    """The ranks did not meet at a step; ``str(error)`` is the reason as far as it is known."""


class Exchange:
    """A group of the kit's own, with the ranks of another group.

    It is made on all of these ranks at the same place. It is never destroyed by itself, but with
    the other groups of the process: a rank that closed its end would break the last exchange of
    ranks that are still reading.

    Args:
        group: the group whose ranks take part. Other ranks of WORLD need not make the exchange.
        seconds: until a rank that waits for the others goes on without them.

    Raises:
        ExchangeError: not all ranks have made it in time.

    Attributes:
        rank: this rank's number in the group.
        size: the number of ranks.
        ranks: the global rank of each rank in the group.
        model_group: the name of the group whose ranks take part.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.model_group = group.group_name
        self._group = dist.new_group(
            list(self.ranks),
            timeout=datetime.timedelta(seconds=seconds),
            backend="gloo",
            use_local_synchronization=True,
        )
        self.rank = dist.get_rank(self._group)
        self.size = len(self.ranks)
        self.name = self._group.group_name
        # A store may outlive a process group, and a later group may have the same name. A random
        # prefix hides the entries of earlier groups.
        own_prefix = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)
        prefix = bytes(self.gather(own_prefix)[0].numpy()).hex()
        self._store = dist.PrefixStore(f"conformance.watch/{prefix}", default_store())

    def arrive(self, step: int) -> None:
        """Announce that this rank has arrived at ``step``.

        Raises:
            ExchangeError: some rank has left, so that waiting for it is in vain.
        """
        with _as_exchange_error():
            if self._store.check([_LEFT]):
                raise ExchangeError(self._store.get(_LEFT).decode())
            self._store.set(str(self.rank), str(step))

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the one-dimensional CPU tensors of all ranks, ``[W, n]``.

        The tensors have the same size and dtype on all ranks.

        Raises:
            ExchangeError: a rank did not arrive in time, or is gone.
        """
        rows = mine.new_empty(self.size, mine.numel())
        with _as_exchange_error():
            dist.all_gather(list(rows.unbind()), mine.contiguous(), group=self._group)
        return rows

    def gather_text(self, mine: str) -> list[str]:
        """Return the texts of all ranks.

        Raises:
            ExchangeError: a rank did not arrive in time, or is gone.
        """
        # frombuffer takes no empty buffer.
        sent = torch.frombuffer(bytearray(mine.encode() or b" "), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([sent.numel()]))[:, 0].tolist()
        padding = sent.new_zeros(max(sizes) - sent.numel())
        rows = self.gather(torch.cat([sent, padding]))
        return [bytes(row[:size].numpy()).decode() for row, size in zip(rows, sizes, strict=True)]

    def describe_absent(self, step: int) -> str | None:
        """Return at which steps the ranks are that have not arrived at ``step``.

        None means that all have arrived, or that the store is gone.
        """
        with contextlib.suppress(RuntimeError, ValueError):
            return "; ".join(self._absent(step)) or None
        return None

    def _absent(self, step: int) -> list[str]:
        found = []
        for number, rank in enumerate(self.ranks):
            key = str(number)
            if not self._store.check([key]):
                found.append(f"rank {rank} never came to one")
                continue
            last = int(self._store.get(key))
            if last != step:
                found.append(f"rank {rank} was last at step {last}")
        return found

    def open_store(self) -> dist.Store:
        """Return the kit's store on a connection of its own, if it can have one.

        A connection is locked while an operation is under way. A thread with a connection of its
        own therefore never delays the training. Stores have no clone() before torch 2.8: there
        the threads share the training's connection, each time for one short operation.
        """
        with contextlib.suppress(AttributeError, RuntimeError):
            return self._store.clone()
        return self._store

    def leave(self, reason: str) -> None:
        """Announce that this rank arrives no more; do nothing if the store is gone."""
        with contextlib.suppress(RuntimeError, ValueError):
            if not self._store.check([_LEFT]):
                self._store.set(_LEFT, reason)


@contextlib.contextmanager
def _as_exchange_error() -> Iterator[None]:
    """Turn the errors of a backend or a store into ExchangeError.

    All of them are RuntimeErrors if a rank is late or gone.
    """
    try:
        yield
    except RuntimeError as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ExchangeError(f"{type(error).__name__}: {first_line}") from error
