"""What ranks of a training run tell each other: on a process group of the kit's own, and never for longer than its timeout.

The group is Gloo's, whatever the model's is: it takes CPU tensors, leaves the devices' streams alone, and a collective that
not all ranks come to ends with an exception, where NCCL's watchdog would end the process. A store says who came and who has
left, since a collective that timed out cannot.
"""

import contextlib
import datetime

import torch
import torch.distributed as dist


class Exchange:
    """The kit's own group of the ranks of another; made on all of them at the same place.

    Args:
        group: whose ranks take part. Those of WORLD that are not in it need not call this.
        seconds: until one who waits for the others goes on without them.

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
        self._store = dist.PrefixStore(f"conformance.watch/{self.name}", dist.distributed_c10d._get_default_store())

    def come(self, step: int) -> str:
        """Say that this rank has come to ``step``; return why there is nobody to wait for, or ''."""
        if self._store.check(["left"]):
            return self._store.get("left").decode()
        self._store.set(str(self.rank), str(step))
        return ""

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the one-dimensional CPU tensors of all ranks, ``[W, n]``: they have the same size and dtype.

        Raises:
            RuntimeError: a rank did not come in time, or is gone.
        """
        rows = mine.new_empty(self.size, mine.numel())
        dist.all_gather(list(rows.unbind()), mine.contiguous(), group=self._group)
        return rows

    def gather_text(self, mine: str) -> list[str]:
        """Return the texts of all ranks.

        Raises:
            RuntimeError: a rank did not come in time, or is gone.
        """
        sent = torch.frombuffer(bytearray(mine.encode() or b" "), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([sent.numel()]))[:, 0].tolist()
        rows = self.gather(torch.cat([sent, sent.new_zeros(max(sizes) - sent.numel())]))
        return [bytes(row[:size].numpy()).decode() for row, size in zip(rows, sizes, strict=True)]

    def absent(self, step: int) -> list[str]:
        """Return where the others are who have not come to ``step``, in words."""
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

    def close(self) -> None:
        """Give the group up, unless the whole process has done so already."""
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group(self._group)
