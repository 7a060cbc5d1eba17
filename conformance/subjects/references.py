"""The references behind claims such as ``like(powerSGD_hook, matrix_approximation_rank=2)``.

A reference that draws random numbers runs with several seeds. The distance between its own runs
bounds the distance of the subject from them.
"""

from typing import TYPE_CHECKING, Any

from conformance.subjects.kinds import KINDS
from conformance.subjects.spec import SubjectSpec, make_spec
from conformance.subjects.target import parse_target, write_target

if TYPE_CHECKING:
    from conformance.subjects.claims import Claims

SEEDS = (0, 1, 2)
# The factory below, as a target. Records and ranks hold this string.
_STATE = "conformance.subjects.references:state"
# States with a class of their own; every other reference is a compressor, under CompressionState.
_STATES = {
    "powerSGD_hook": "PowerSGDState",
    "batched_powerSGD_hook": "PowerSGDState",
    "gossip_grad_hook": "GossipGraDState",
}
# The options of CompressionState; the other options are the compressor's.
_OPTIONS_OF_STATE = ("memory", "momentum", "start_iter")
_UNBIASED_COMPRESSORS = ("QSGD", "TernGrad")


def claimed_references(claims: "Claims") -> list[SubjectSpec]:
    """Return the reference that a subject claims to be like, once for each of its seeds.

    A reference that draws no random numbers is returned once.
    """
    name, _, _ = claims.reference.partition(",")
    options = parse_target(f"hooks_ref:{claims.reference}", "--claims like").kwargs
    reference = KINDS[claims.kind].references[name]
    settings = [options]
    if reference.seed:
        settings = [{**options, reference.seed: seed} for seed in SEEDS]
    if not reference.has_state:
        return [
            make_spec(claims.kind, write_target(reference.target, setting)) for setting in settings
        ]
    states = [write_target(_STATE, {"reference": name, **setting}) for setting in settings]
    return [make_spec(claims.kind, reference.target, state) for state in states]


def state(process_group: Any, reference: str, **options: Any) -> Any:
    """Make the state of a reference, in a rank."""
    import hooks_ref

    if reference in _STATES:
        make_state = getattr(hooks_ref, _STATES[reference])
        return make_state(process_group, **options)
    of_state = {name: options.pop(name) for name in _OPTIONS_OF_STATE if name in options}
    if reference in _UNBIASED_COMPRESSORS:
        of_state.setdefault("memory", "none")  # an unbiased result needs no error feedback
    compressor = getattr(hooks_ref, reference)(**options)
    return hooks_ref.CompressionState(process_group, compressor, **of_state)
