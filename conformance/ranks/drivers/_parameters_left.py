"""Notes the parameters that an averager changes while its state is saved or loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from conformance.ranks.drivers._equal_states import changed_values, copies
from conformance.records.recorder import Recorder


@contextmanager
def parameters_left(
    recorder: Recorder, call: str, params: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Record the parameters whose values a block changes: the model is the trainer's to load.

    Args:
        recorder: receives the event ``changed_by_state``, if some have changed.
        call: the call that is made in the block, for people.
        params: the model's.
    """
    before = copies(params)
    yield
    if changed := changed_values(params, before):
        recorder.event("changed_by_state", call=call, parameters=changed)
