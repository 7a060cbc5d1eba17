"""The claim of hooks that step parameters with an optimizer of torch."""

from typing import TYPE_CHECKING, Any

from conformance.subjects.arguments import write_call, write_named
from conformance.subjects.kinds._claim import Claim, Form

if TYPE_CHECKING:
    from conformance.subjects.claims import Claims

OPTIMIZERS = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "RMSprop",
    "Rprop",
    "NAdam",
    "RAdam",
)


# The option of ``fused`` that names the parameters without weight decay.
NO_DECAY = "no_decay"


def _read_fused(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    after = options.pop("after", 0)
    frees = options.pop("frees_gradients", False)
    name = args[0].removeprefix("optim.") if len(args) == 1 else ""
    if name not in OPTIMIZERS:
        raise ValueError(
            "takes the name of an optimizer, and its options: fused(SGD, lr=0.1); "
            f"one of {', '.join(OPTIMIZERS)}"
        )
    # Runs have few steps, and some of them must step the parameters.
    if not isinstance(after, int) or isinstance(after, bool) or not 0 <= after <= 4:
        raise ValueError(f"takes after=, a number of steps from 0 to 4; got {after!r}")
    if not isinstance(frees, bool):
        raise ValueError(f"takes frees_gradients=, which is True or False; got {frees!r}")
    if options.get(NO_DECAY, "vectors") != "vectors":
        raise ValueError(f"takes {NO_DECAY}=vectors; got {options[NO_DECAY]!r}")
    if NO_DECAY in options and not options.get("weight_decay"):
        raise ValueError(f"needs weight_decay= beside {NO_DECAY}=vectors")
    inside = ", ".join(write_named(options.items()))
    return {"fused": f"{name}({inside})", "after": after, "frees_gradients": frees}


def _write_fused(claims: "Claims") -> str | None:
    if not claims.fused:
        return None
    name, _, options = claims.fused.removesuffix(")").partition("(")
    after = f"after={claims.after}" if claims.after else ""
    frees = "frees_gradients=True" if claims.frees_gradients else ""
    return write_call("fused", name, options, after, frees)


FUSED = Claim(
    "fused",
    (
        Form(
            "fused(SGD, lr=0.1)",
            "The hook steps the parameters as torch.optim.SGD would; combines with any result.",
            "13.6, 23.6 in place of 9.2; it moves parameters: 2.10",
        ),
        Form(
            "fused(AdamW, lr=0.1, weight_decay=0.01, no_decay=vectors)",
            "Parameters of fewer than two dimensions, such as biases and weights of norms, have no "
            "weight decay.",
            "13.6, 23.6",
        ),
        Form(
            "fused(SGD, lr=0.1, after=2)",
            "The hook steps no parameters in the first two steps.",
            "13.6",
        ),
        Form(
            "fused(SGD, lr=0.1, frees_gradients=True)",
            "The gradients are None when backward is over.",
            "13.9",
        ),
    ),
    _read_fused,
    _write_fused,
    sets_fields=True,
)
