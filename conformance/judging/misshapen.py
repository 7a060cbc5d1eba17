"""Tensors on record that do not have the shape of their parameter.

A subject can give a parameter other storage. The arithmetic of a rule then fails on its shape, and
this module names the tensor. It is asked only then: a rule may read such a record, and refuse it by
its values.
"""

import re
from collections.abc import Iterable

from conformance.records.run import Run

_OF_PARAMETER = re.compile(r"(?:^|/)(?:grad|parameter|result|dropped|applied)/p(\d+)(?:\.weight)?$")


def misshapen(runs: Iterable[Run]) -> tuple[str, str] | None:
    """Return the right shape of the first tensor that has another, and a sentence; None if all
    tensors of parameters have their shapes.
    """
    for run in runs:
        for rank in run.ranks:
            for name, tensor in rank.tensors.items():
                found = _OF_PARAMETER.search(name)
                if found is None or int(found[1]) >= len(run.scenario.params):
                    continue
                spec = run.scenario.params[int(found[1])]
                shape = list(spec.shape)
                if spec.dtype.startswith("complex"):
                    shape.append(2)
                if list(tensor.shape) != shape:
                    return (
                        f"{name} of shape {shape}",
                        f"rank {rank.rank}, {run.name}: {name} has shape {list(tensor.shape)}",
                    )
    return None
