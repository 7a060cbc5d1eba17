"""Right quantized collectives: one for complex tensors, uneven lists and any groups, and one that
makes a process group of its own.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right.quantized_collectives import Arriving

Tensor = torch.Tensor


def _parts(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor in float32, flat; of complex ones both parts."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"expected real or complex numbers, got {tensor.dtype}")
    given = tensor.detach().contiguous()
    reals = torch.view_as_real(given.resolve_conj()) if given.is_complex() else given
    return reals.reshape(-1).float()


class ByModulus:
    """An all_gather of bytes, with one scale for each message: its largest magnitude over 127.

    The magnitude of a complex element is its modulus. Codes are as long as the longest of the list.
    """

    def __call__(
        self,
        tensor_list: list[Tensor],
        tensor: Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            warnings.warn("all_gather on a rank outside of the group", stacklevel=2)
            return None
        counts = [_parts(output).numel() for output in tensor_list]
        code = self._code(tensor, max(counts))
        codes = [torch.empty_like(code) for _ in tensor_list]
        work = dist.all_gather(codes, code, group, async_op=True)

        of_ranks = list(zip(tensor_list, counts, codes, strict=True))

        def finish() -> None:
            for output, count, one in of_ranks:
                scale = one[:4].clone().view(torch.float32)
                values = one[4 : 4 + count].view(torch.int8).float() * scale
                if output.is_complex():
                    values = torch.view_as_complex(values.view(-1, 2))
                output.copy_(values.view(output.shape))

        arriving = Arriving(work, finish)
        return arriving if async_op else arriving.wait()

    def _code(self, tensor: Tensor, length: int) -> Tensor:
        values = _parts(tensor)
        # hypot() squares nothing: norm() gives zero for 1e-24.
        pairs = values.view(-1, 2).unbind(1) if tensor.is_complex() else ()
        moduli = torch.hypot(*pairs) if pairs else values.abs()
        scale = moduli.max() / 127 if moduli.numel() else values.new_zeros(())
        small = torch.where(scale == 0, 0.0, values / scale).round().nan_to_num().to(torch.int8)
        code = torch.zeros(4 + length, dtype=torch.uint8)
        code[:4] = scale.view(1).view(torch.uint8)
        code[4 : 4 + values.numel()] = small.view(torch.uint8)
        return code


def by_modulus() -> ByModulus:
    """Return the collective."""
    return ByModulus()


class OnItsOwnGroup:
    """An all_gather of float16 with error feedback. Calls on WORLD use a group that the object has
    made, so that its messages never meet those of the trainer.
    """

    def __init__(self) -> None:
        self.own = dist.new_group()
        self.errors: dict[tuple[Any, torch.Size], Tensor] = {}

    def __call__(self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None) -> None:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        if tensor.dtype != torch.float32:
            raise TypeError(f"expected float32, got {tensor.dtype}")
        if any(output.shape != tensor.shape for output in tensor_list):
            raise ValueError("expected tensors of one shape")
        if group is None or group is dist.group.WORLD:
            group = self.own
        fed = tensor.detach().contiguous() + self.errors.get((group, tensor.shape), 0.0)
        code = fed.half()
        lost = fed - code.float()
        self.errors[group, tensor.shape] = torch.where(lost.isfinite(), lost, 0.0)
        codes = [torch.empty_like(code) for _ in tensor_list]
        dist.all_gather(codes, code, group=group)
        for output, one in zip(tensor_list, codes, strict=True):
            output.copy_(one)


RIGHT = [
    Right("OnItsOwnGroup", "collective(all_gather), rounded(float16), feedback", kind="collective"),
    Right(
        "by_modulus",
        "collective(all_gather), bounded(relative=0.004, ratio=0.3)",
        kind="collective",
    ),
]
