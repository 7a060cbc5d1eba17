"""The parameters of a bucket, as views of its buffer.

``GradBucket.gradients()`` makes C-contiguous views, but DDP lays a gradient out in its parameter's
own strides, and a complex one as pairs of reals: for channels_last, transposed and complex
parameters its views hold the wrong elements (seen on torch 2.13.0). The views made here hold the
right ones.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def pieces(bucket: dist.GradBucket, flat: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return one flat view per parameter, in memory order.

    Args:
        bucket: a dense bucket.
        flat: the tensor to split, of the buffer's shape ``[numel]``; None is the buffer itself.

    Returns:
        Views of shape ``[n]``, where ``n`` is the number of the parameter's elements, or twice that
        number for a complex parameter.
    """
    whole = bucket.buffer() if flat is None else flat
    if whole.is_complex():
        # In torch 2.9 the buffer of complex parameters is itself complex.
        whole = torch.view_as_real(whole).view(-1)
    return list(
        whole.split([p.numel() * (2 if p.is_complex() else 1) for p in bucket.parameters()])
    )


def gradient(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a piece of a bucket as the gradient of its parameter: a view in its shape and layout.

    Args:
        piece: the parameter's piece of a bucket, by :func:`pieces`.
        parameter: real or complex.
    """
    return shaped(
        torch.view_as_complex(piece.view(-1, 2)) if parameter.is_complex() else piece, parameter
    )


def used(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return for each gradient whether some element is not zero, shape ``[len(gradients)]``.

    The gradient of a parameter that this rank has not used is all zeros.
    """
    return torch.stack([gradient.any() for gradient in gradients])


def clear_unused(values: Sequence[torch.Tensor], flags: torch.Tensor) -> None:
    """Set the values of each parameter to zero that this rank has not used.

    Args:
        values: a tensor for each parameter, finite if the parameter is not used.
        flags: whether it is used, by :func:`used`.
    """
    # On a device, to read the flags would be a wait.
    if flags.device.type == "cpu" and bool(flags.all()):
        return
    for value, flag in zip(values, flags, strict=True):
        value.mul_(flag)


def in_rows(flat: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``flat``, shape ``[n]``, in rows of ``min(width, n)`` elements.

    The last row is padded with zeros.
    """
    width = max(1, min(width, flat.numel()))
    return torch.nn.functional.pad(flat, (0, -flat.numel() % width)).view(-1, width)


def shaped(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a piece of a real parameter as a view in the parameter's shape and strides.

    Args:
        piece: the flat values in memory order, shape ``[n]``.
        parameter: the parameter, of ``n`` elements.
    """
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return piece.as_strided(parameter.size(), parameter.stride())
    return piece.view(parameter.size())
