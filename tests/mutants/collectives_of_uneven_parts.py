"""Mutants of rule 18.24 that send parts of different sizes right in some of their calls alone.

They send float16, and are made with ``func`` and ``qtype``.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.collectives_in_training import even_lists
from tests.mutants.collectives_on_other_paths import exchanged
from tests.mutants.quantized_collectives import Made, Pending, Tensor, half


def even_lists_if_asynchronous(func: Made, qtype: str) -> Made:
    """Cut what arrives into equal parts, in calls with async_op=True alone."""
    even = even_lists(func, qtype)

    def exchange(
        outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False
    ) -> Any:
        return (even if async_op else exchanged)(outputs, inputs, group, async_op)

    return exchange


class PlansByShape:
    """Keep the numbers of elements of all parts by the shapes of the tensors.

    The rows of a rank may be divided among its peers in another way, and be as many as before.
    """

    def __init__(self, func: Made, qtype: str) -> None:
        self.plans: dict[Any, tuple[list[int] | None, list[int] | None]] = {}

    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        key = (group, output.shape, input.shape, output_split_sizes is None)
        if key not in self.plans:
            sizes = (output_split_sizes, input_split_sizes)
            width = max(tensor[:1].numel() for tensor in (output, input))
            self.plans[key] = tuple(rows and [n * width for n in rows] for rows in sizes)
        code = half(input).reshape(-1)
        received = torch.empty(output.numel(), dtype=torch.float16)
        work = dist.all_to_all_single(received, code, *self.plans[key], group, async_op=True)
        pending = Pending(work, lambda: output.copy_(received.view(output.shape)))
        return pending if async_op else pending.wait()


class SizesByOwnShape:
    """Gather the sizes of peers once for each shape of the rank's own tensor, and keep them."""

    def __init__(self, func: Made, qtype: str) -> None:
        self.sizes: dict[Any, list[int]] = {}

    def __call__(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        given = [output.numel() for output in tensor_list]
        longest = max(given)
        sizes = self.sizes.setdefault((group, tensor.shape), given)
        code = torch.zeros(longest, dtype=torch.float16)
        code[: tensor.numel()] = half(tensor).reshape(-1)
        codes = [torch.empty_like(code) for _ in sizes]
        work = dist.all_gather(codes, code, group, async_op=True)

        of_ranks = list(zip(tensor_list, codes, sizes, strict=True))

        def finish() -> None:
            for output, received, size in of_ranks:
                whole = torch.zeros(output.numel())
                part = received[:size][: len(whole)]
                whole[: len(part)] = part
                output.copy_(whole.view(output.shape))

        pending = Pending(work, finish)
        return pending if async_op else pending.wait()


def _named(name: str, func: str, worlds: tuple[int, ...] = (2,)) -> Mutant:
    named = f"{name},func={func},qtype=FP16"
    return Mutant(named, ("18.24",), worlds=worlds, kind="collective")


MUTANTS = [
    _named("even_lists_if_asynchronous", "all_to_all"),
    _named("PlansByShape", "all_to_all_single"),
    _named("SizesByOwnShape", "all_gather", (3,)),
]
