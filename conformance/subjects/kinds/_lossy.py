"""The lossy claims of hooks: compressed, unbiased, local, and their warm-up."""

from typing import TYPE_CHECKING, Any

from conformance.subjects.arguments import write_call
from conformance.subjects.kinds._claim import Claim, Form, is_number

if TYPE_CHECKING:
    from conformance.subjects.claims import Claims

DEFAULT_DELTA = 0.1
ROUNDED_DTYPES = ("float16", "bfloat16")
LONGEST_WARMUP = 2_000  # steps
# Up to so many steps of a warm-up are on record in every run. Of a longer one only the last steps
# are, and the long run has all.
RECORDED_WARMUP = 50
STEPS_OF_LONG_WARMUP = 8
# The ways in which a result can differ from the mean: the values of Claims.lossy.
FEEDBACK = "feedback"
DIFFERENCE = "difference"
CONTRACTION = "contraction"
UNBIASED = "unbiased"
LOCAL = "local"
_COMPRESSED = {FEEDBACK: "", DIFFERENCE: "feedback=ef21", CONTRACTION: "feedback=False"}


def read_ratio(options: dict[str, Any]) -> dict[str, Any]:
    """Take the largest share of the gradients' bytes that a rank sends out of the options."""
    ratio = options.pop("ratio", None)
    if ratio is None:
        return {}
    if not is_number(ratio) or not 0 <= ratio <= 1:
        raise ValueError(f"takes ratio=, a number from 0 to 1; got {ratio!r}")
    return {"ratio": float(ratio)}


def write_ratio(claims: "Claims") -> str:
    return "" if claims.ratio is None else f"ratio={_write_number(claims.ratio)}"


def _write_number(value: float) -> str:
    """Return a number in the shortest text that parses to it."""
    # Certificates hold the short form, so it is kept for every number that it can hold.
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _read_compressed(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    feedback = options.pop("feedback", True)
    delta = options.pop("delta", None)
    ratio = read_ratio(options)
    # Compared one by one, since a value such as a list cannot be looked up in a dict.
    kinds = ((True, FEEDBACK), ("ef21", DIFFERENCE), (False, CONTRACTION))
    lossy = next((kind for value, kind in kinds if feedback == value), None)
    if args or options or lossy is None:
        raise ValueError("takes feedback=True, ef21 or False, delta= and ratio=")
    if delta is None and lossy == CONTRACTION:
        raise ValueError(
            "needs delta= with feedback=False: ||C(x) - x||**2 <= (1 - delta) ||x||**2"
        )
    values = {"lossy": lossy, **ratio}
    if delta is not None:
        if not is_number(delta) or not 0.01 <= delta <= 1:
            raise ValueError(
                f"takes delta=, a number from 0.01 to 1; got {delta!r}; "
                "try a stronger setting of the same hook"
            )
        values["delta"] = float(delta)
    return values


def _write_compressed(claims: "Claims") -> str | None:
    if claims.lossy not in _COMPRESSED:
        return None
    delta = "" if claims.delta == DEFAULT_DELTA else f"delta={_write_number(claims.delta)}"
    return write_call("compressed", _COMPRESSED[claims.lossy], delta, write_ratio(claims))


COMPRESSED = Claim(
    "compressed",
    (
        Form(
            "compressed",
            "The result is a lossy mean with error feedback: later steps add the values that a "
            "step leaves out.",
            "13.1, 13.10, 22.4; it loses something: 2.10",
        ),
        Form(
            "compressed(feedback=ef21)",
            "The result is a lossy mean that converges to the mean when all steps feed the same "
            "gradients.",
            "13.1, 13.10, 22.4; it loses something: 2.10",
        ),
        Form(
            "compressed(feedback=False, delta=0.99)",
            "The result is a lossy mean without feedback: its distance from the mean is at most "
            "sqrt(1 - delta) times the mean norm of the ranks' gradients.",
            "13.2, 13.10; it loses something: 2.10",
        ),
        Form(
            "compressed(delta=0.25)",
            "In each step the compressor delivers at least the share delta of its input (default: "
            "0.1); the number of steps of a run follows from delta.",
            "13.1, 13.2, 13.17",
        ),
        Form(
            "compressed(ratio=0.3)",
            "A rank also sends at most that share of its gradients' bytes; every lossy claim "
            "takes ratio=.",
            "13.7, 23.9",
        ),
    ),
    _read_compressed,
    _write_compressed,
    sets_fields=True,
)


def _read_unbiased(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    values = {"lossy": UNBIASED, **read_ratio(options)}
    noise = options.pop("noise", None)
    ranks = options.pop("ranks", None)
    if args or options:
        raise ValueError("takes ratio= and noise=, or nothing")
    if ranks is not None and (noise is None or ranks is True or ranks != 1):
        raise ValueError(f"takes ranks=1 beside noise=, if one rank adds it; got {ranks!r}")
    if noise is None:
        return values
    if not is_number(noise) or not 0 < noise <= 16:
        raise ValueError(f"takes noise=, a number above 0, and 16 at most; got {noise!r}")
    return {**values, "noise": float(noise), "noise_of_one": ranks == 1}


def _write_unbiased(claims: "Claims") -> str | None:
    if claims.lossy != UNBIASED:
        return None
    noise = f"noise={_write_number(claims.noise)}" if claims.noise else ""
    ranks = "ranks=1" if claims.noise_of_one else ""
    return write_call(UNBIASED, noise, ranks, write_ratio(claims))


UNBIASED_RESULT = Claim(
    UNBIASED,
    (
        Form(
            "unbiased",
            "The result is random, and its expectation is the mean.",
            "13.3, 13.10, 13.13, 13.16, 13.18, 23.3; it varies: 2.10; SHOULD: 13.14, 13.15, 23.4",
        ),
        Form(
            "unbiased(noise=0.5)",
            "Each rank adds noise of that deviation to every element, also to zeros, as for "
            "differential privacy.",
            "8.3",
        ),
        Form(
            "unbiased(noise=0.5, ranks=1)",
            "One rank alone adds that noise, before the gradients are divided by the number of "
            "ranks.",
            "8.3",
        ),
    ),
    _read_unbiased,
    _write_unbiased,
    sets_fields=True,
)


def _read_local(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    values = {"lossy": LOCAL, **read_ratio(options)}
    mixing = options.pop("mixing", True)
    period = options.pop("period", None)
    if args or options or not isinstance(mixing, bool):
        raise ValueError("takes ratio=, mixing=False and period=, or nothing")
    if period is not None:
        # A run has to be a few periods long.
        if not isinstance(period, int) or isinstance(period, bool) or not 2 <= period <= 8:
            raise ValueError(
                f"takes period=, a number of steps from 2 to 8; got {period!r}; "
                "certify a hook that has a longer period with a shorter one"
            )
        if not mixing or values.get("ratio") == 0:
            raise ValueError(
                "cannot take period= beside mixing=False or ratio=0: ranks then never meet"
            )
        values["period"] = period
    return {**values, "mixing": mixing}


def _write_local(claims: "Claims") -> str | None:
    if claims.lossy != LOCAL:
        return None
    mixing = "" if claims.mixing else "mixing=False"
    period = f"period={claims.period}" if claims.period else ""
    return write_call(LOCAL, mixing, period, write_ratio(claims))


LOCAL_RESULT = Claim(
    LOCAL,
    (
        Form(
            "local",
            "The result is a weighted mean of some ranks' gradients, so replicas drift apart; "
            "within 24 steps the gradients of every rank reach every other one, directly or "
            "through others.",
            "13.5, 13.10, 13.11, 23.5; replicas differ: 2.10",
        ),
        Form(
            "local(period=4)",
            "In one of four steps the result is the mean over all ranks.",
            "13.12",
        ),
        Form(
            "local(mixing=False)",
            "Some ranks' gradients never meet, such as those of two machines: the trainer averages "
            "the parameters.",
            "they never meet: 2.10",
        ),
        Form(
            "local(ratio=0)",
            "The hook sends nothing: the trainer averages the parameters.",
            "13.7, 23.9",
        ),
    ),
    _read_local,
    _write_local,
    sets_fields=True,
)


def _read_warmup(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if "rounded" in options:
        dtype = options.pop("rounded")
        if dtype not in ROUNDED_DTYPES:
            raise ValueError(f"takes rounded=, float16 or bfloat16; got {dtype!r}")
        values["warmup_rounded"] = dtype
    # Every run is longer by the warm-up, so a very long one would make them slow.
    is_number = len(args) == 1 and not options and args[0].isdigit()
    if not is_number or not 1 <= int(args[0]) <= LONGEST_WARMUP:
        raise ValueError(
            f"takes a number of steps from 1 to {LONGEST_WARMUP}; "
            "certify a hook that has a longer warm-up with a shorter one"
        )
    steps = int(args[0])
    if steps > RECORDED_WARMUP:
        return {"warmup": STEPS_OF_LONG_WARMUP, "long_warmup": steps, **values}
    return {"warmup": steps, **values}


def _write_warmup(claims: "Claims") -> str | None:
    if not claims.warmup:
        return None
    rounded = f"rounded={claims.warmup_rounded}" if claims.warmup_rounded else ""
    return write_call("warmup", str(claims.steps_of_warmup), rounded)


WARMUP = Claim(
    "warmup",
    (
        Form(
            "warmup(2)",
            "The result is exact in the first two steps; combines with a lossy claim.",
            "13.4",
        ),
        Form(
            "warmup(2, rounded=bfloat16)",
            "In the first two steps the result is the mean of the values rounded to that dtype: "
            "the hook sends half precision until it compresses.",
            "13.4",
        ),
    ),
    _read_warmup,
    _write_warmup,
    sets_fields=True,
)
