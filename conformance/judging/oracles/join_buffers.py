"""Right buffers of DDP's model after uneven inputs.

In each forward, and in its shadows, DDP sends its buffers from the last rank of the group that
still trains; its post hook sends them from the last rank among those with the most inputs. Let
a(s) be the last rank that trains in step s, of n steps, with a(n) = a(n - 1), and u(b, t_q)
a buffer b after a forward of rank q (``scenarios/model_buffers.py``). Step s + 1 begins with the
buffers that a(s + 1) holds after step s, so that from zeros all ranks hold in the end

    u(... u(u(0, t_a(1)), t_a(2)) ..., t_a(n))
"""

from functools import reduce

from conformance.judging.oracles.join import Member, require_step_count
from conformance.judging.oracles.strategy_buffers import value_of
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.model_buffers import UPDATED, update_in_join

_BUFFERS = {"seen": "a count in int64", "mask": "a mask of bools with the bits"}


def require_buffers(run: Run, member: Member, found: Found) -> None:
    """Require the buffers of the last rank that has trained, and the number of steps."""
    require_step_count(member, found)
    steps = range(member.most_inputs)
    last = [max(map(member.group.index, member.training(step))) for step in steps]
    updates = [update_in_join(run.scenario, place) for place in (*last[1:], *last[-1:])]
    for name, words in _BUFFERS.items():
        zero: float = 0
        right = reduce(UPDATED[name], updates, zero)
        got = value_of(member.rank.tensors[f"{member.context}/buffer/{name}"], name)
        found.require(
            got == right,
            f"{words} of {right}, as the last rank that trained holds it",
            f"{member}: {got}",
            "buffers of floating-point dtypes alone are handed out, or those of another rank",
        )
