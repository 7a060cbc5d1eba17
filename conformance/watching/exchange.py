"""What ranks of a training run tell each other: on a process group of the kit's own, and never for longer than its timeout.

The group is Gloo's, whatever the model's is: it takes CPU tensors, leaves the devices' streams alone, and a collective that
not all ranks come to ends with an exception, where NCCL's watchdog would end the process. A store says who came and who has
left, since a collective that timed out cannot.
"""

import contextlib
import datetime
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist


class NotMet(Exception):
    """The ranks do not come together at a step; ``str(error)`` says what is known of it."""


class Exchange:
    """The kit's own group of the ranks of another; made on all of them at the same place.

    It is never destroyed by itself: a rank that closed its end would break the last exchange of those who are still reading. It
    goes with the process's other groups.

    Args:
        group: whose ranks take part. Those of WORLD that are not in it need not call this.
        seconds: until one who waits for the others goes on without them.

    Raises:
        NotMet: not all ranks have made it in time.

    Attributes:
        rank, size: this rank's place in the group, and how many there are.
        ranks: by place, the ranks in WORLD.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        limit = datetime.timedelta(seconds=seconds)
        self._group = dist.new_group(list(self.ranks), timeout=limit, backend="gloo", use_local_synchronization=True)
        self.rank, self.size, self.seconds = dist.get_rank(self._group), len(self.ranks), seconds
        self.name = self._group.group_name
        # A store may outlive a process group whose name comes again: what was left in it is not to be found.
        drawn = self.gather(torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8))[0]
        self._store = dist.PrefixStore(f"conformance.watch/{bytes(drawn.numpy()).hex()}", dist.distributed_c10d._get_default_store())

    def come(self, step: int) -> None:
        """Say that this rank has come to ``step``.

        Raises:
            NotMet: some rank has left, so that there is no use in waiting for all.
        """
        with _as_not_met():
            if self._store.check(["left"]):
                raise NotMet(self._store.get("left").decode())
            self._store.set(str(self.rank), str(step))

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the one-dimensional CPU tensors of all ranks, ``[W, n]``: they have the same size and dtype.

        Raises:
            NotMet: a rank did not come in time, or is gone.
        """
        rows = mine.new_empty(self.size, mine.numel())
        with _as_not_met():
            dist.all_gather(list(rows.unbind()), mine.contiguous(), group=self._group)
        return rows

    def gather_text(self, mine: str) -> list[str]:
        """Return the texts of all ranks.

        Raises:
            NotMet: a rank did not come in time, or is gone.
        """
        sent = torch.frombuffer(bytearray(mine.encode() or b" "), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([sent.numel()]))[:, 0].tolist()
        rows = self.gather(torch.cat([sent, sent.new_zeros(max(sizes) - sent.numel())]))
        return [bytes(row[:size].numpy()).decode() for row, size in zip(rows, sizes, strict=True)]

    def absent(self, step: int) -> str:
        """Return where the others are who have not come to ``step``, in words; '' where none is absent, or the store is gone."""
        with contextlib.suppress(RuntimeError, ValueError):
            return "; ".join(self._absent(step))
        return ""

    def _absent(self, step: int) -> list[str]:
        found = []
        for place in range(self.size):
            key = str(place)
            came = int(self._store.get(key)) if self._store.check([key]) else None
            if came != step:
                found.append(f"rank {self.ranks[place]} " + ("never came to one" if came is None else f"was last at step {came}"))
        return found

    def leave(self, why: str) -> None:
        """Tell those who come later that this rank comes no more. Says nothing where the store is gone."""
        with contextlib.suppress(RuntimeError, ValueError):
            if not self._store.check(["left"]):
                self._store.set("left", why)


@contextlib.contextmanager
def _as_not_met() -> Iterator[None]:
    """Whatever a backend or a store raises where a rank is late, or gone, is a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise NotMet(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
