"""Communication hooks, registered with ``DistributedDataParallel.register_comm_hook``.

Claims combine with commas: ``sum, rounded(bfloat16), world_only``. A claim changes which result is
right. It never switches a rule off unless another rule holds the subject to the claim itself.

``delta``, in (0, 1], is the share of its input that a compressor delivers at least:

    ||C(x) - x||**2  <=  (1 - delta) ||x||**2

With error feedback it bounds how fast held-back values have to come out, and so determines the
number of steps of a run. It is 0.1 unless it is given.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from conformance.scenarios import (
    evidence,
    failing_models,
    late_steps,
    later_failures,
    process,
    reused_states,
    surroundings,
    training_sizes,
)
from conformance.scenarios.clusters import CLUSTERS
from conformance.scenarios.dust import OF_DUST
from conformance.scenarios.hook import ALL
from conformance.scenarios.impulses import IMPULSES
from conformance.scenarios.long_runs import ENDURANCE
from conformance.scenarios.probes import OF_HOOKS, PROBE
from conformance.scenarios.values import VALUES_IN_TRAINING
from conformance.subjects.arguments import write_call
from conformance.subjects.kinds._claim import (
    Claim,
    Form,
    Reader,
    Reference,
    Writer,
    field_flag,
    min_world_size,
    no_arguments,
    read_reference,
    table,
    write_reference,
)
from conformance.subjects.kinds._fused import FUSED
from conformance.subjects.kinds._kind import Kind
from conformance.subjects.kinds._lossy import (
    COMPRESSED,
    LOCAL_RESULT,
    RECORDED_WARMUP,
    ROUNDED_DTYPES,
    UNBIASED_RESULT,
    WARMUP,
    read_ratio,
    write_ratio,
)

if TYPE_CHECKING:
    from conformance.subjects.claims import Claims

DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64")


# ---- exact, rounded, sum


def _write_exact(claims: "Claims") -> str | None:
    is_less = claims.rounded or claims.sum or claims.scaled or claims.lossy
    return None if is_less else "exact"


EXACT = Claim(
    "exact",
    (
        Form(
            "exact",
            "The result is the mean over the group, in the bucket's dtype; the default.",
            "2.1, 2.2",
        ),
    ),
    no_arguments,
    _write_exact,
    sets_fields=True,
)


def _read_rounded(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    ratio = read_ratio(options)
    if len(args) == 1 and args[0] not in ROUNDED_DTYPES:
        raise ValueError(f"takes {' or '.join(ROUNDED_DTYPES)}, not {args[0]}")
    if len(args) != 1 or options:
        raise ValueError(
            "takes one dtype, and ratio= if bytes are limited: "
            "rounded(float16), rounded(bfloat16, ratio=0.5)"
        )
    return {"rounded": args[0], **ratio}


def _write_rounded(claims: "Claims") -> str | None:
    if not claims.rounded:
        return None
    return write_call("rounded", claims.rounded, write_ratio(claims))


ROUNDED = Claim(
    "rounded",
    (
        Form(
            "rounded(float16)",
            "The result is the mean of the values rounded to float16.",
            "2.1, 2.2; it rounds: 2.10",
        ),
        Form(
            "rounded(bfloat16)",
            "The result is the mean of the values rounded to bfloat16.",
            "2.1, 2.2; it rounds: 2.10",
        ),
        Form(
            "rounded(float16, ratio=0.5)",
            "A rank also sends at most half the bytes of its gradients.",
            "13.7, 23.9",
        ),
    ),
    _read_rounded,
    _write_rounded,
    sets_fields=True,
)
SUM = field_flag(
    "sum",
    "The result is the sum over the group, and the trainer divides it.",
    "2.1, 2.2; it is not the mean: 2.10",
)


SCALED = field_flag(
    "scaled",
    "Factors that no float holds, such as 1 / sqrt(world_size), come before and after the sum: the "
    "result is the mean within the bound of a sum, and not bit for bit.",
    "2.1, 2.2; it is not exact: 2.10",
)


# ---- like

_POWER_SGD_SEED = "random_seed"
# The compressors are options of one hook; the state draws their random numbers.
_COMPRESSOR = Reference("hooks_ref:compression_hook", has_state=True)
_RANDOM_COMPRESSOR = Reference("hooks_ref:compression_hook", seed="seed", has_state=True)
REFERENCES = {
    "powerSGD_hook": Reference("hooks_ref:powerSGD_hook", _POWER_SGD_SEED, has_state=True),
    "batched_powerSGD_hook": Reference(
        "hooks_ref:batched_powerSGD_hook", _POWER_SGD_SEED, has_state=True
    ),
    "RandomK": _RANDOM_COMPRESSOR,
    "QSGD": _RANDOM_COMPRESSOR,
    "TernGrad": _RANDOM_COMPRESSOR,
    "TopK": _COMPRESSOR,
    "ScaledSign": _COMPRESSOR,
    "OneBit": _COMPRESSOR,
    "gossip_grad_hook": Reference("hooks_ref:gossip_grad_hook", has_state=True),
    "quantization_pertensor_hook": Reference("hooks_ref:quantization_pertensor_hook"),
    "quantization_perchannel_hook": Reference("hooks_ref:quantization_perchannel_hook"),
}
_read_like_text = read_reference(REFERENCES)


def _read_like(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    return {"like": _read_like_text(args, options)}


def _write_like(claims: "Claims") -> str | None:
    return write_reference(claims.like) if claims.like else None


LIKE = Claim(
    "like",
    (
        Form(
            "like(powerSGD_hook, matrix_approximation_rank=2)",
            "Every step gives the result of that hook or compressor of hooks_ref, made with these "
            "options; combines with a lossy claim.",
            "13.8",
        ),
    ),
    _read_like,
    _write_like,
    sets_fields=True,
)


# ---- Restrictions


def _read_dtypes(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    repeated = len(set(args)) < len(args)
    # Nearly all scenarios have parameters of float32 alone.
    if "float32" not in args or options or not set(args) <= set(DTYPES) or repeated:
        raise ValueError(
            f"takes float32, and any of {', '.join(DTYPES[1:])}: dtypes(float32, float64)"
        )
    return {"dtypes": tuple(args)}


def _names_writer(name: str) -> Writer:
    """Return the writer of a claim that lists names in the field of its name."""

    def write(claims: "Claims") -> str | None:
        names = getattr(claims, name)
        return write_call(name, *names) if names else None

    return write


_TAKEN_DTYPES = Claim(
    "dtypes",
    (
        Form(
            "dtypes(float32)",
            "The hook takes models whose parameters all have these dtypes, and refuses other "
            "models with an error.",
            "2.4",
        ),
    ),
    _read_dtypes,
    _names_writer("dtypes"),
    sets_fields=True,
)


def _names_reader(name: str, example: str) -> Reader:
    def read(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
        repeated = len(set(args)) < len(args)
        if not args or options or repeated or not all(arg.isidentifier() for arg in args):
            raise ValueError(f"takes names: {example}")
        return {name: tuple(args)}

    return read


def _restriction(name: str, text: str, meaning: str, example: str) -> Claim:
    """Return a claim that lists the only profiles on which the hook is judged."""
    forms = (Form(text, meaning, None),)
    return Claim(name, forms, _names_reader(name, example), _names_writer(name), sets_fields=True)


BACKENDS = _restriction(
    "backends",
    "backends(nccl)",
    "The hook takes these backends alone; on a profile with another one it is not judged.",
    "backends(gloo, nccl)",
)
DEVICES = _restriction(
    "devices",
    "devices(cuda)",
    "The hook takes these devices alone; on a profile with another one it is not judged.",
    "devices(cpu, cuda)",
)
WORLD_ONLY = field_flag(
    "world_only",
    "The hook takes no process group and always uses WORLD; a factory's world_size and rank "
    "are those of WORLD.",
    "2.7",
)


# ---- The life of a hook


def _read_poststep(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    call = options.pop("call", "")
    if args or options or not isinstance(call, str) or (call and not call.isidentifier()):
        raise ValueError(
            "takes call=, the name of a function or method, or nothing: poststep(call=flush)"
        )
    return {"poststep": True, "call": call}


def _write_poststep(claims: "Claims") -> str | None:
    if not claims.poststep:
        return None
    return write_call("poststep", f"call={claims.call}" if claims.call else "")


POSTSTEP = Claim(
    "poststep",
    (
        Form(
            "poststep(call=flush)",
            "The gradients are correct only once the trainer has called this function, after "
            "backward; the function belongs to the state, to the hook's object or to its module. "
            "There is no call after a backward under no_sync.",
            "not before that call: 1.12",
        ),
        Form(
            "poststep",
            "The gradients are correct only once the after_backward of the set-up's Case has "
            "returned. There is no call after a backward under no_sync.",
            "not before that call: 1.12",
        ),
    ),
    _read_poststep,
    _write_poststep,
    sets_fields=True,
)
CHAINED = field_flag(
    "chained",
    # Gloo does not run collectives in the order of a stream.
    "Callbacks start collectives, which needs the order of a stream; on Gloo each collective is "
    "over before the next one begins, and the certificate names that.",
    "callbacks start collectives: 10.4; without that order: 10.5",
)
CHECKPOINTABLE = field_flag(
    "checkpointable",
    "The state can be saved, and continues in new processes from that step; with a set-up, the "
    "saved of its Case counts as the state.",
    "11.2, 11.3, 11.8; SHOULD: 11.4",
)


KEEPS_UNUSED = field_flag(
    "keeps_unused",
    "With compressed: what is held back of a parameter that no rank has used in a step is kept, "
    "since DDP drops its result. All backwards of a step but the last one are under no_sync.",
    "11.5",
)


def _read_rescaled(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    call = options.pop("call", "")
    if args or options or not isinstance(call, str) or not call.isidentifier():
        raise ValueError("takes call=, the name of a function or method: rescaled(call=rescale)")
    return {"rescaled": call}


def _write_rescaled(claims: "Claims") -> str | None:
    return f"rescaled(call={claims.rescaled})" if claims.rescaled else None


RESCALED = Claim(
    "rescaled",
    (
        Form(
            "rescaled(call=rescale)",
            "With compressed: the trainer calls this function with the new loss scale as a "
            "multiple of the old one, whenever it changes; it belongs to the state, to the hook's "
            "object or to its module.",
            "11.6",
        ),
    ),
    _read_rescaled,
    _write_rescaled,
    sets_fields=True,
)


def _contradiction(claimed: Mapping[str, Any]) -> str | None:
    lossy = sorted(claimed.keys() & {"compressed", "unbiased", "local"})
    inexact = sorted(claimed.keys() & {"rounded", "sum", "scaled"})
    if "exact" in claimed and (lossy or inexact):
        others = ", ".join([*lossy, *inexact])
        return f"exact contradicts {others}: it is the mean without rounding"
    if "sum" in claimed and "scaled" in claimed:
        return "scaled contradicts sum: a sum has no factors"
    if len(lossy) > 1 or (lossy and inexact):
        return f"{' contradicts '.join([*lossy, *inexact])}: claim one of them"
    if "like" in claimed and not lossy:
        return "like needs a lossy claim beside it: compressed, unbiased or local"
    of_feedback = sorted(claimed.keys() & {"keeps_unused", "rescaled"})
    if of_feedback and "compressed" not in claimed:
        return f"{of_feedback[0]} needs compressed beside it: nothing else is held back"
    if "warmup" in claimed and not lossy:
        return "warmup needs a lossy claim beside it: compressed, unbiased or local"
    if "fused" in claimed and claimed.get("warmup", {}).get("long_warmup"):
        return f"fused needs a warmup of at most {RECORDED_WARMUP} steps, which are all followed"
    if "poststep" in claimed and "fused" in claimed:
        return "poststep contradicts fused: a fused hook steps parameters before backward is over"
    return None


def _default(arguments: Mapping[str, Any]) -> str:
    return "exact"


HOOK = Kind(
    "hook",
    "a communication hook",
    (*map(str, range(1, 14)), *map(str, range(20, 26))),
    reference="hooks_ref:allreduce_hook",
    scenarios=(
        *ALL,
        *evidence.SCENARIOS,
        *later_failures.SCENARIOS,
        *failing_models.SCENARIOS,
        *VALUES_IN_TRAINING,
        IMPULSES,
        OF_DUST,
        *surroundings.ALL,
        *reused_states.ALL,
        *process.ALL,
        *training_sizes.ALL,
        ENDURANCE,
        *late_steps.ALL,
        *CLUSTERS,
        PROBE,
    ),
    claims=table(
        EXACT,
        ROUNDED,
        SUM,
        SCALED,
        COMPRESSED,
        UNBIASED_RESULT,
        LOCAL_RESULT,
        WARMUP,
        FUSED,
        LIKE,
        min_world_size("2.11"),
        _TAKEN_DTYPES,
        BACKENDS,
        DEVICES,
        POSTSTEP,
        CHAINED,
        WORLD_ONLY,
        CHECKPOINTABLE,
        KEEPS_UNUSED,
        RESCALED,
    ),
    default_claims=_default,
    probes=OF_HOOKS,
    contradiction=_contradiction,
    references=REFERENCES,
    default_reason="nobody: exact is the default",
    searches_claims=True,
)
