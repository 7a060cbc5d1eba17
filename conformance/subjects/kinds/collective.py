"""Quantized collectives: what is called as one of torch.distributed's collectives is, and sends fewer bits.

A target makes one: ``auto_quantize,func=all_gather,qtype=FP16``; or it is one, a function of the collective's own arguments.

    collective(all_gather)      which it is; or all_to_all, all_to_all_single, scatter
    rounded(float16)            every value arrives rounded to the nearest, ties to even; beyond 65504 it is that or infinite
    rounded(bfloat16)           every value arrives as one of the two of bfloat16 beside it
    blocks(int8, size=128)      of each message, which is what one rank sends another, so many elements at a time are divided
                                by a scale, the largest of them by int8's 127, and rounded to the nearest; likewise
                                blocks(float8_e4m3fn), blocks(float8_e5m2)
    bounded(relative=0.004, block=128, ratio=0.5)
                                an error of at most that share of the largest magnitude in a block of a message; without
                                ``block`` of all that a rank sends in a call; ``ratio`` says how many of the bytes it sends
    divided(2.0)                what arrives is divided by that
    feedback                    what a call loses, the next one of the same shapes makes up for
    dimensions(2)               it takes tensors of so many dimensions alone, and refuses others

One of rounded, blocks and bounded has to be claimed. Without claims it is what the arguments of the target say, if they are
called as torch's: ``func``, ``qtype`` (FP16, BFP16; and INT8 and FP8 as hooks_ref has them), ``quant_loss``, ``error_feedback``.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from conformance.scenarios.collective import BLOCK, CALLED, COLLECTIVES, FORMS, ORDERED, PLAIN, REPEATED, SPECIAL, SUBGROUPS, WAITED
from conformance.scenarios.model import Scenario
from conformance.subjects.kinds._kind import Kind, flag, whole

ROUNDED = ("float16", "bfloat16")
# Of a narrow dtype: its largest value, half of its relative step, and half of its smallest step.
NARROW = {"int8": (127.0, 0.0, 0.5), "float8_e4m3fn": (448.0, 2.0**-4, 2.0**-10), "float8_e5m2": (57344.0, 2.0**-3, 2.0**-17)}
_QTYPES = {"FP16": "rounded(float16)", "BFP16": "rounded(bfloat16)", "INT8": "blocks(int8)", "FP8": "blocks(float8_e4m3fn)"}


def _named(known: tuple[str, ...]) -> Any:
    def read(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
        if len(args) != 1 or args[0] not in known or options:
            raise ValueError(f"takes one of {', '.join(known)}")
        return {"name": args[0]}

    return read


def _blocks(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if len(args) != 1 or args[0] not in NARROW or not options.keys() <= {"size"}:
        raise ValueError(f"takes one of {', '.join(NARROW)}, and size=")
    return {"name": args[0], "size": whole("size=", options.get("size", BLOCK), 1)}


def _bounded(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if args or not {"relative"} <= options.keys() <= {"relative", "block", "ratio"}:
        raise ValueError("takes relative=, and block= and ratio= if it likes")
    read = {name: _share(f"{name}=", options.get(name, 1.0)) for name in ("relative", "ratio")}
    return {**read, **({"block": whole("block=", options["block"], 1)} if "block" in options else {})}


def _share(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise ValueError(f"takes {name}, a number above 0 and up to 1; got {value!r}")
    return float(value)


def _divided(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    text = [*args, *map(repr, options.values())]
    try:
        loss = float(text[0]) if len(text) == 1 and options.keys() <= {"loss"} else 0.0
    except ValueError:
        loss = 0.0
    if not loss or not math.isfinite(loss):
        raise ValueError("takes one number, which is not 0: divided(2.0)")
    return {"loss": loss}


def _dimensions(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if len(args) != 1 or options or args[0] not in ("1", "2"):
        raise ValueError("takes 1 or 2")
    return {"name": args[0]}


def _wrong(said: Mapping[str, Any]) -> str:
    if "collective" not in said:
        return f"it has to say which collective it is, e.g. collective(all_gather); one of {', '.join(COLLECTIVES)}"
    lost = [name for name in ("rounded", "blocks", "bounded") if name in said]
    return "" if len(lost) == 1 else "it has to say what is lost, by one of rounded(...), blocks(...) and bounded(...)"


def _under(scenario: Scenario, said: Mapping[str, Any]) -> Scenario:
    """Ranks have to know which collective they call, and whether calls depend on those before them.

    Where only some numbers of dimensions are taken, the other scenarios keep to these.
    """
    if "dimensions" in said and scenario.name != FORMS.name:
        dimensions = int(said["dimensions"]["name"])
        flat = tuple(replace(spec, shape=spec.shape if dimensions == 2 else (math.prod(spec.shape),)) for spec in scenario.params)
        scenario = replace(scenario, params=flat)
    return replace(scenario, options=(said["collective"]["name"], *(["feedback"] if "feedback" in said else [])))


def _default(arguments: Mapping[str, Any]) -> str:
    func, qtype = arguments.get("func"), arguments.get("qtype")
    if func not in COLLECTIVES or qtype not in _QTYPES:
        raise ValueError(
            f"its target does not say by func= and qtype= what it is (func={func!r}, qtype={qtype!r}); name one of "
            f"{', '.join(COLLECTIVES)} and one of {', '.join(_QTYPES)}, or give --claims, e.g. 'collective(all_gather), rounded(float16)'"
        )
    loss = arguments.get("quant_loss")
    divided = "" if loss is None else f"divided({loss!r})"
    return ", ".join(filter(None, (f"collective({func})", _QTYPES[qtype], divided, "feedback" * bool(arguments.get("error_feedback")))))


COLLECTIVE = Kind(
    "collective",
    "a quantized collective, called as one of torch.distributed's",
    ("18",),
    reference="hooks_ref:auto_quantize,func=all_gather,qtype=FP16",
    scenarios=(PLAIN, FORMS, SUBGROUPS, CALLED, ORDERED, WAITED, SPECIAL, REPEATED),
    claims={
        **{"collective": _named(COLLECTIVES), "rounded": _named(ROUNDED), "blocks": _blocks, "bounded": _bounded},
        **{"divided": _divided, "feedback": flag, "dimensions": _dimensions},
    },
    default_claims=_default,
    contradiction=_wrong,
    adapt=_under,
)
