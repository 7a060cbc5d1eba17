"""The bytes that quantized collectives pass to torch's own, against those that a claim allows."""

from collections import defaultdict

import torch

from conformance.judging.oracles import collective_bounds as bounds
from conformance.judging.oracles.collective import Call, calls, group_of
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios import collective_messages as messages
from conformance.subjects.claims import Claims


def require_fewer_bytes(run: Run, claims: Claims, found: Found) -> None:
    """Require that calls send no more bytes than their format needs, and fewer than float32.

    Calls with async_op=True begin before others of the step have ended: all bytes of such a step
    are counted together. Calls that are refused count nothing. Nor do those of a rank that is alone
    in its group, which has nobody to send to, and those that come together on groups of two sizes:
    nobody tells which of them a collective belongs to.
    """
    together: dict[tuple[int, int, int], list[Call]] = defaultdict(list)
    indices = range(len(run.scenario.params))
    for call in calls(run):
        is_alone = not any(
            messages.is_asynchronous(run.scenario, call.step, index) for index in indices
        )
        if not call.refused:
            together[call.rank, call.step, call.index if is_alone else -1].append(call)
    if not together:
        found.leaves_out("it refuses these calls")
        return
    sent = []
    for some in together.values():
        sizes = {len(group_of(run, call)) for call in some}
        if len(sizes) == 1 and max(sizes) > 1:
            sent.append(_require_of_calls(run, claims, found, some, max(sizes)))
    if not any(sent):
        found.checks = 0
        found.does_not_apply(
            "it passes nothing to torch's collectives: its bytes are not seen here"
        )


def _require_of_calls(run: Run, claims: Claims, found: Found, some: list[Call], size: int) -> int:
    """Require the bytes of some calls together on groups of one size, and return them."""
    sizes = [torch.Size(run.scenario.params[call.index].shape).numel() for call in some]
    numel = sum(sizes)
    unquantized = bounds.FLOAT32 * size * numel
    sent = 0
    for call in some:
        for name, number in call.event["sent"]:
            sent += number * bounds.times_sent(name, run.scenario.options[0], size)
    if sent:
        found.sends(sent, unquantized)
    limit = sum(bounds.byte_limit(claims, size, size * one) for one in sizes)
    is_wide = sent >= unquantized
    is_fewer = sent <= limit
    # Without a claimed ratio all that is known is that something has to be saved.
    if claims.has("bounded") and bounds.largest_share(claims) == 1:
        is_fewer = not is_wide
    found.require(
        is_fewer,
        f"at most {limit / size:.0f} bytes for each message, as {claims} allows",
        f"{some[0]}: {sent / size:.0f} bytes for {numel} elements",
        "as many bytes as in float32: rounded values are sent in a wide dtype" if is_wide else "",
    )
    return sent
