"""Digests of tensors, which compare bits and take little room in a record."""

import hashlib

import torch

LARGEST = 4096
"""Digests before and after every step are taken only of smaller tensors than this."""


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of the bits of a tensor's elements."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return digest(tensor.indices()) + digest(tensor.values())
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.blake2b(flat.numpy(), digest_size=8).hexdigest()
