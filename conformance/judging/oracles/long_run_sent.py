"""Judge whether compression without feedback ever sends each element of a long run.

Elements that are among the largest of a gradient are sent by a compressor that selects, by one that
quantizes, by one of signs and by one of a low rank; one that draws elements, or takes them in turn,
sends each of them in its share of the steps, whatever their sizes are. In two rounds an element is
among the largest of the model on all ranks (``scenarios/turns.py``, which says how many there may
be). So it is other than zero in two rounds of a thousand or more. If 1 of n elements is drawn, on
each of W ranks, the expectation is 1200 W / n: with n = 100 and W = 2 fewer than two come with a
probability below 1e-9.

``delta`` alone does not require it. A hook may leave out the same quarter of all elements in every
step, and keep its delta in each; these elements are hardly trained.
"""

import torch

from conformance.judging.oracles.long_runs import LongRecord
from conformance.judging.verdict import Found
from conformance.scenarios.turns import large_elements

NOTHING = 2.0**-40  # of a mean; results are compared in float64


def require_all_sent(record: LongRecord, found: Found) -> bool:
    """Require each element to be sent in as many rounds as it is among the largest in."""
    for index in record.indices:
        among_largest = _rounds_among_largest(record, index)
        right = record.means[index][record.places].abs()
        for rank, rows in record.different_ranks(index):
            sent = (rows.abs() > NOTHING * right)[record.warm_up :].sum(0)
            lost = sent < among_largest
            at = int(lost.double().argmax())
            name = record.run.parameter_name(index)
            holds = found.require(
                not lost.any(),
                "each element sent in as many steps as it is among the largest: this one in at "
                f"least {int(among_largest[at])} of {record.feed.rounds - record.warm_up}",
                f"rank {rank}, parameter {name}: element {at} is sent in {int(sent[at])} steps; "
                f"{int(lost.sum())} elements are sent in too few steps",
                "elements that are seldom or never sent: a seed that does not depend on the step, "
                "or blocks that leave out their ends"
                if lost.any()
                else "",
            )
            if not holds:
                return False
            found.checked(rows.numel())
    return True


def _rounds_among_largest(record: LongRecord, index: int) -> torch.Tensor:
    """Return for each element of a parameter the number of rounds in which it is large."""
    counts = torch.zeros(record.means[index].size(1), dtype=torch.int64)
    for place in record.feed.places[record.warm_up :]:
        large = large_elements(record.feed.keys[place][0], len(counts), index)
        if large is not None:
            counts[list(large)] += 1
    return counts
