"""Tensors on record that do not have the shape of their parameter, and fields that are None.

A subject can give a parameter other storage, and keep the kit from finding out a value. A rule that
reads it then fails on the tensor's shape or on None, and this module names the tensor or the field.
It is called only then: a rule may read such a record, and refuse it by its values.
"""

import re
from collections.abc import Iterable

from conformance.records.run import Run

# The fields that are None on the records of right subjects.
_MAY_BE_NONE = {
    ("closure", "loss"),
    ("compared", "got"),
    ("compared", "wanted"),
    ("fault", "collective"),
    ("rest", "digest"),
    ("returned", "digest"),
    ("value", "digest"),
    ("value", "memory"),
}
_OF_PARAMETER = re.compile(
    r"(?:^|/)(?:grad|parameter|result|dropped|applied|twin)/p(\d+)(?:\.weight)?$"
)


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


def field_without_value(runs: Iterable[Run]) -> tuple[str, str] | None:
    """Return the first field that is None and that a record always has a value for, and a sentence;
    None if there is no such field.
    """
    for run in runs:
        for rank in run.ranks:
            for event in rank.events:
                name = event["event"]
                for field, value in event.items():
                    if value is None and (name, field) not in _MAY_BE_NONE:
                        return (
                            f"a value of {field!r} of the event {name!r} on record",
                            f"rank {rank.rank}, {run.name}: it is None in step {event['step']}",
                        )
    return None
