"""Quantized collectives, called as one of torch.distributed's collectives; they send fewer bits.

A target makes one: ``auto_quantize,func=all_gather,qtype=FP16``; or it is one, a function of the
collective's own arguments.

A subject has to claim which collective it is, and how it loses precision: by one of rounded, blocks
and bounded. These claims follow from the arguments of the target if they have torch's names:
``func``, ``qtype`` (FP16, BFP16; and INT8 and FP8 as in hooks_ref), ``quant_loss``,
``error_feedback``.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from conformance.scenarios.collective import (
    BLOCK,
    CALLED,
    COLLECTIVES,
    FORMS,
    ORDERED,
    PLAIN,
    REPEATED,
    SPECIAL,
    SUBGROUPS,
    WAITED,
    with_forms,
)
from conformance.scenarios.collective_conditions import MIXED, MIXED_CALLS, without_poison
from conformance.scenarios.collective_training import ALL as TRAINING
from conformance.scenarios.collective_training import LONG
from conformance.scenarios.conditions_together import COLLECTIVE as TOGETHER
from conformance.scenarios.failing_collectives import ASYNCHRONOUS
from conformance.scenarios.failing_collectives import COLLECTIVE as FAILING
from conformance.scenarios.kinds_in_clusters import COLLECTIVE as CLUSTERS
from conformance.scenarios.kinds_under_default_dtypes import COLLECTIVE as DEFAULT_DTYPES
from conformance.scenarios.kinds_under_default_dtypes import COLLECTIVE_UNDER_AUTOCAST
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.probes_of_kinds import COLLECTIVE as PROBE
from conformance.scenarios.probes_of_kinds import maker_for
from conformance.subjects.kinds._claim import (
    Form,
    is_number,
    min_world_size,
    option_claim,
    option_flag,
    read_name,
    table,
    whole_number,
)
from conformance.subjects.kinds._kind import Kind

ROUNDED = ("float16", "bfloat16")
# Of a narrow dtype: its largest value, half of its relative step, and half of its smallest step.
NARROW = {
    "int8": (127.0, 0.0, 0.5),
    "float8_e4m3fn": (448.0, 2.0**-4, 2.0**-10),
    "float8_e5m2": (57344.0, 2.0**-3, 2.0**-17),
}
_QTYPES = {
    "FP16": "rounded(float16)",
    "BFP16": "rounded(bfloat16)",
    "INT8": "blocks(int8)",
    "FP8": "blocks(float8_e4m3fn)",
}
_LOSSES = ("rounded", "blocks", "bounded")


# ---- Claims

COLLECTIVE_NAME = option_claim(
    "collective",
    Form(
        "collective(all_gather)",
        "The collective that the subject stands for; or all_gather_into_tensor, all_to_all, "
        "all_to_all_single, scatter, reduce_scatter, reduce_scatter_tensor, all_reduce.",
        "18.1",
    ),
    read=read_name(COLLECTIVES),
)
ROUNDED_VALUES = option_claim(
    "rounded",
    Form(
        "rounded(float16)",
        "Every value arrives rounded to the nearest of float16, ties to even; beyond 65504 it is "
        "65504 or infinite.",
        "18.2, 18.14",
    ),
    Form(
        "rounded(bfloat16)",
        "Every value arrives as one of the two neighbouring values of bfloat16.",
        "18.2, 18.14",
    ),
    read=read_name(ROUNDED),
)


def _read_blocks(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if len(args) != 1 or args[0] not in NARROW or not options.keys() <= {"size"}:
        raise ValueError(f"takes one of {', '.join(NARROW)}, and size=: blocks(int8, size=128)")
    return {"name": args[0], "size": whole_number("size=", options.get("size", BLOCK), 1)}


BLOCKS = option_claim(
    "blocks",
    Form(
        "blocks(int8, size=128)",
        "The message from one rank to another is divided into blocks of that many elements; each "
        "block is divided by a scale, which is its largest element divided by int8's 127, and "
        "rounded to the nearest; likewise float8_e4m3fn and float8_e5m2.",
        "18.2, 18.15",
    ),
    read=_read_blocks,
)


def _read_bounded(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if args or not {"relative"} <= options.keys() <= {"relative", "block", "ratio"}:
        raise ValueError(
            "takes relative=, and block= and ratio= if there are any: bounded(relative=0.004)"
        )
    values: dict[str, Any] = {
        "relative": _read_share("relative=", options["relative"]),
        "ratio": _read_share("ratio=", options.get("ratio", 1.0)),
    }
    if "block" in options:
        values["block"] = whole_number("block=", options["block"], 1)
    return values


def _read_share(name: str, value: Any) -> float:
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(f"takes {name}, a number above 0 and up to 1; got {value!r}")
    return float(value)


BOUNDED = option_claim(
    "bounded",
    Form(
        "bounded(relative=0.004, block=128, ratio=0.5)",
        "The error is at most that share of the largest magnitude in its block of a message; "
        "without block=, of all that a rank sends in a call; ratio= is the share of the bytes "
        "that it sends.",
        "18.2, 18.15",
    ),
    read=_read_bounded,
)


def _read_divided(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    reason = "takes one number, which is not 0: divided(2.0)"
    given = [*args, *map(repr, options.values())]
    if len(given) != 1 or not options.keys() <= {"loss"}:
        raise ValueError(reason)
    try:
        # By position the number is text; a string in quotes is refused as a value with a name.
        loss = float(given[0])
    except ValueError:
        raise ValueError(reason) from None
    if not loss or not math.isfinite(loss):
        raise ValueError(reason)
    return {"loss": loss}


DIVIDED = option_claim(
    "divided",
    Form("divided(2.0)", "The values that arrive are divided by that number.", "18.3"),
    read=_read_divided,
)


def _read_dimensions(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if len(args) != 1 or options or args[0] not in ("1", "2"):
        raise ValueError("takes 1 or 2: dimensions(2)")
    return {"name": args[0]}


DIMENSIONS = option_claim(
    "dimensions",
    Form(
        "dimensions(2)",
        "The subject takes tensors of so many dimensions alone, and refuses others with an error.",
        "18.4",
    ),
    read=_read_dimensions,
)


def _contradiction(claimed: Mapping[str, Any]) -> str | None:
    if "collective" not in claimed:
        return (
            "claim which collective it is, e.g. collective(all_gather); "
            f"one of {', '.join(COLLECTIVES)}"
        )
    losses = [name for name in _LOSSES if name in claimed]
    if len(losses) != 1:
        return "claim how it loses precision, by one of rounded(...), blocks(...) and bounded(...)"
    return None


def _default(arguments: Mapping[str, Any]) -> str:
    func = arguments.get("func")
    qtype = arguments.get("qtype")
    if func not in COLLECTIVES or qtype not in _QTYPES:
        raise ValueError(
            f"no claims follow from func={func!r} and qtype={qtype!r}; "
            f"give one of {', '.join(COLLECTIVES)} and one of {', '.join(_QTYPES)}, "
            "or claims, e.g. --claims 'collective(all_gather), rounded(float16)'"
        )
    claims = [f"collective({func})", _QTYPES[qtype]]
    loss = arguments.get("quant_loss")
    if loss is not None:
        claims.append(f"divided({loss!r})")
    if arguments.get("error_feedback"):
        claims.append("feedback")
    return ", ".join(claims)


# ---- Scenarios


def _adapt(scenario: Scenario, options: Mapping[str, Any]) -> Scenario:
    """Return the scenario with the collective to call, and whether calls depend on earlier ones.

    If a subject takes some numbers of dimensions alone, all scenarios keep to them, except those
    with the tensors of ``FORMS``.
    """
    name = options["collective"]["name"]
    if scenario.name == CALLED.name:
        scenario = with_forms(scenario, name)
    if "dimensions" in options and scenario.params != FORMS.params:
        dimensions = int(options["dimensions"]["name"])
        params = tuple(_with_dimensions(spec, dimensions) for spec in scenario.params)
        scenario = replace(scenario, params=params)
    if "feedback" in options and scenario.variant == LONG.variant:
        # An error is kept for the next call of the same shape: one object has one shape.
        largest = max(scenario.params, key=lambda param: math.prod(param.shape))
        scenario = replace(scenario, params=(largest,))
    if "feedback" in options and scenario.variant == MIXED:
        scenario = without_poison(scenario)
    fed_back = ("feedback",) if "feedback" in options else ()
    return replace(scenario, options=(name, *fed_back, *scenario.options))


def _with_dimensions(spec: Param, dimensions: int) -> Param:
    """Return a parameter of two dimensions as it is, or flattened to one; one of more as a
    transposed matrix, or flattened.
    """
    if dimensions == 2 and len(spec.shape) > 2:
        shape = (spec.shape[0], math.prod(spec.shape[1:]))
        return replace(spec, shape=shape, layout="transposed")
    if dimensions == 2:
        return spec
    return replace(spec, shape=(math.prod(spec.shape),), layout="contiguous", output_layout="")


COLLECTIVE = Kind(
    "collective",
    "a quantized collective, called as one of torch.distributed's",
    ("18",),
    reference="hooks_ref:auto_quantize,func=all_gather,qtype=FP16",
    scenarios=(
        *(PLAIN, FORMS, SUBGROUPS, CALLED, ORDERED, WAITED, SPECIAL, REPEATED),
        *TRAINING,
        MIXED_CALLS,
        *FAILING,
        *CLUSTERS,
        DEFAULT_DTYPES,
        COLLECTIVE_UNDER_AUTOCAST,
        *ASYNCHRONOUS,
        *TOGETHER,
        PROBE,
    ),
    claims=table(
        COLLECTIVE_NAME,
        ROUNDED_VALUES,
        BLOCKS,
        BOUNDED,
        DIVIDED,
        option_flag(
            "feedback",
            "The next call with the same shapes makes up for the values that a call loses.",
            "18.16",
        ),
        DIMENSIONS,
        min_world_size("18.18"),
    ),
    default_claims=_default,
    probes=maker_for("collective", "18.35"),
    contradiction=_contradiction,
    adapt=_adapt,
)
