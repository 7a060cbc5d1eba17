"""The bytes that quantized collectives pass to torch's own, against those that a claim allows."""

import torch

from conformance.judging.oracles import collective_bounds as bounds
from conformance.judging.oracles.collective import calls
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.collective import ORDERED
from conformance.subjects.claims import Claims


def require_fewer_bytes(run: Run, claims: Claims, found: Found) -> None:
    """Require that each call sends no more bytes than its format needs, and fewer than float32.

    Without a claimed ratio all that is known is that something has to be saved. In runs of many
    sizes this is not required of messages that are no longer than a header may be.
    """
    size = run.world
    is_seen = False
    has_ratio = not (claims.has("bounded") and bounds.largest_share(claims) == 1)
    for call in calls(run):
        numel = torch.Size(run.scenario.params[call.index].shape).numel()
        unquantized = bounds.FLOAT32 * size * numel
        sent = 0
        for name, number in call.event["sent"]:
            sent += number * bounds.times_sent(name, run.scenario.options[0], size)
        if sent:
            is_seen = True
            found.sends(sent, unquantized)
        is_small = bounds.FLOAT32 * numel <= bounds.HEADER and run.scenario.name != ORDERED.name
        if is_small and not has_ratio:
            continue
        limit = bounds.byte_limit(claims, size, size * numel)
        is_wide = sent >= unquantized
        found.require(
            sent <= limit if has_ratio else not is_wide,
            f"at most {limit / size:.0f} bytes a message, by {claims}",
            f"{call}: {sent / size:.0f} bytes for {numel} elements",
            "as many bytes as in float32: rounded values are sent in a wide dtype"
            if is_wide
            else "",
        )
    if not is_seen:
        found.checks = 0
        found.does_not_apply(
            "it passes nothing to torch's collectives: its bytes are not seen here"
        )
