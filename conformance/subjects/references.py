"""The references that a subject can say it is like: ``like(powerSGD_hook, matrix_approximation_rank=2)``.

A reference that draws is run with several seeds: how far its own runs are apart says how far another may be.
"""

from typing import Any

from conformance.subjects.spec import SubjectSpec

SEEDS = (0, 1, 2)
# By the reference: the hook, and the name that its state's seed has, where it draws.
REFERENCES = {
    **dict.fromkeys(("powerSGD_hook", "batched_powerSGD_hook"), "random_seed"),
    **dict.fromkeys(("RandomK", "QSGD", "TernGrad"), "seed"),
    **dict.fromkeys(
        ("TopK", "ScaledSign", "OneBit", "gossip_grad_hook", "quantization_pertensor_hook", "quantization_perchannel_hook"), ""
    ),
}
_STATES = {"powerSGD_hook": "PowerSGDState", "batched_powerSGD_hook": "PowerSGDState", "gossip_grad_hook": "GossipGraDState"}
_WITHOUT_STATE = ("quantization_pertensor_hook", "quantization_perchannel_hook")
_OF_STATE = ("memory", "momentum", "start_iter")  # options of CompressionState; the others are the compressor's


def subjects(like: str) -> list[SubjectSpec]:
    """Return the reference that ``like`` names, as many times as there are seeds for it.

    Args:
        like: its name and options, ``powerSGD_hook,matrix_approximation_rank=2``.
    """
    name, comma, options = like.partition(",")
    hook = f"hooks_ref:{name if name.endswith('_hook') else 'compression_hook'}"
    if name in _WITHOUT_STATE:
        return [SubjectSpec(hook, None, None)]
    seeds = [f",{REFERENCES[name]}={seed}" for seed in SEEDS] if REFERENCES[name] else [""]
    return [SubjectSpec(hook, f"conformance.subjects.references:state,reference={name!r}{comma}{options}{seed}", None) for seed in seeds]


def claimed_references(claims: Any) -> list[SubjectSpec]:
    """Return the references that a subject claims to be like: one for each seed if the reference draws random numbers."""
    return subjects(claims.like) if claims.like else [like_other(claims)]


def like_other(claims: Any) -> SubjectSpec:
    """Return the reference of another kind than hook that a subject claims to be like."""
    said = claims.options["like"]
    options = "".join(f",{name}={value!r}" for name, value in said["options"].items())
    return SubjectSpec(kind=claims.kind, target=f"hooks_ref:{said['name']}{options}")


def state(process_group: Any, reference: str, **options: Any) -> Any:
    """Make the state of a reference, in a rank."""
    import hooks_ref

    if reference in _STATES:
        made = getattr(hooks_ref, _STATES[reference])
        return made(process_group, **options)
    of_state = {name: options.pop(name) for name in _OF_STATE if name in options}
    if reference in ("QSGD", "TernGrad"):
        of_state.setdefault("memory", "none")  # what is unbiased needs no feedback
    return hooks_ref.CompressionState(process_group, getattr(hooks_ref, reference)(**options), **of_state)
