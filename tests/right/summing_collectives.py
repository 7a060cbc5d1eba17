"""Right quantized collectives that sum, each in another way than the references."""

from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right

Tensor = torch.Tensor
SUM = dist.ReduceOp.SUM


class _Later:
    """A pending call, which does its last part in wait()."""

    def __init__(self, work: Any, finish: Any) -> None:
        self.work = work
        self.finish = finish

    def wait(self) -> None:
        self.work.wait()
        if self.finish:
            finish, self.finish = self.finish, None
            finish()


def _require_float32(*tensors: Tensor) -> None:
    if not all(tensor.dtype == torch.float32 for tensor in tensors):
        raise TypeError("expected float32 tensors")


def half_all_reduce(
    tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Sum in float16: one all_reduce of that dtype, which rounds each partial sum."""
    _require_float32(tensor)
    code = tensor.contiguous().half()
    if op == dist.ReduceOp.AVG:
        code /= dist.get_world_size(group)
        op = SUM
    later = _Later(dist.all_reduce(code, op, group, async_op=True), lambda: tensor.copy_(code))
    return later if async_op else later.wait()


class SharedLevels:
    """Sum integers of a scale that all ranks share, in blocks; no rank divides by another scale."""

    def __init__(self, levels: int = 127) -> None:
        self.levels = levels

    def __call__(
        self, output: Tensor, input_list: list[Tensor], op: Any = SUM, group: Any = None
    ) -> None:
        _require_float32(output, *input_list)
        if op != SUM or group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("sums only, and on members of the group")
        given = torch.stack([tensor.reshape(-1) for tensor in input_list])
        # The largest of Gloo may lose a NaN, and keeps an infinity.
        largest = given.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        scale = largest.max().view(1) if given.numel() else torch.zeros(1)
        dist.all_reduce(scale, dist.ReduceOp.MAX, group)
        codes = (given * (self.levels / scale)).nan_to_num().round().to(torch.int8)
        received = torch.empty_like(codes)
        dist.all_to_all_single(received, codes, group=group)
        # NaN and infinities of any rank are in the scale.
        total = received.sum(0, dtype=torch.int32) * (scale / self.levels)
        output.copy_(total.view(output.shape))


def ring_reduce_scatter(output: Tensor, input: Tensor, op: Any = SUM, group: Any = None) -> None:
    """Send partial sums in bfloat16 around a ring; each rank adds its own part to what it gets."""
    _require_float32(output, input)
    if op not in (SUM, dist.ReduceOp.AVG):
        raise ValueError("sums and averages only")
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    size = len(ranks)
    me = ranks.index(dist.get_rank())
    parts = input.contiguous().view(size, -1)
    partial = parts[me - 1]
    for hop in range(1, size):
        sent = partial.bfloat16().view(torch.uint8)
        arriving = torch.empty_like(sent)
        if sent.numel():
            work = dist.isend(sent, ranks[(me + 1) % size], group)
            dist.recv(arriving, ranks[me - 1], group)
            work.wait()
        partial = arriving.view(torch.bfloat16).float() + parts[(me - 1 - hop) % size]
    divisor = size if op == dist.ReduceOp.AVG else 1
    output.copy_((partial / divisor).view(output.shape))


def half_if_plain(
    tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
) -> _Later | None:
    """Take averages and any memory layout, but neither of them with async_op=True."""
    _require_float32(tensor)
    if op not in (SUM, dist.ReduceOp.AVG):
        raise ValueError("sums and averages only")
    if async_op and op != SUM:
        raise NotImplementedError("async_op=True gives sums only")
    if async_op and not tensor.is_contiguous():
        raise ValueError("async_op=True needs a contiguous tensor")
    if dist.get_rank(group) < 0:
        return None
    code = tensor.contiguous().half()
    if op != SUM:
        code /= dist.get_world_size(group)
    later = _Later(dist.all_reduce(code, group=group, async_op=True), lambda: tensor.copy_(code))
    return later if async_op else later.wait()


class _Promised:
    """A pending call that is complete when its future is, without a wait()."""

    def __init__(self, future: torch.futures.Future[list[Tensor]]) -> None:
        self.get_future = lambda: future
        self.is_completed = future.done
        self.wait = future.wait


def promised_gather(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Decode in a callback of the collective's future."""
    _require_float32(output_tensor, input_tensor)
    code = input_tensor.reshape(-1).half()
    received = torch.empty(output_tensor.numel(), dtype=torch.float16)
    work = dist.all_gather_into_tensor(received, code, group, async_op=True)

    def decode(done: torch.futures.Future[Any]) -> list[Tensor]:
        done.value()
        return [output_tensor.copy_(received.view(output_tensor.shape))]

    promised = _Promised(work.get_future().then(decode))
    return promised if async_op else promised.wait() and None


RIGHT = [
    Right(
        "promised_gather", "collective(all_gather_into_tensor), rounded(float16)", kind="collective"
    ),
    Right("half_all_reduce", "collective(all_reduce), rounded(float16)", kind="collective"),
    Right("half_if_plain", "collective(all_reduce), rounded(float16)", kind="collective"),
    Right(
        "SharedLevels",
        "collective(reduce_scatter), bounded(relative=0.02, ratio=0.3)",
        kind="collective",
    ),
    Right(
        "ring_reduce_scatter",
        "collective(reduce_scatter_tensor), rounded(bfloat16)",
        kind="collective",
    ),
]
