"""The precision of products is another one for a block, and leaves no trace behind it."""

import torch

from conformance.ranks.instruments.matmul_precision import matmul_precision, settle_precision
from conformance.ranks.instruments.process_settings import settings


def test_a_block_has_another_precision_and_leaves_no_trace() -> None:
    settle_precision()
    before = settings()
    with matmul_precision("medium"):
        assert torch.get_float32_matmul_precision() == "medium"
        with matmul_precision(""):
            assert torch.get_float32_matmul_precision() == "medium"
    assert settings() == before
