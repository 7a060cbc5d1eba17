"""What a subject says of itself, parsed from one line of text.

    exact                         the mean over the group, in the bucket's dtype (the default)
    rounded(float16)              the mean of the values rounded to that dtype
    sum                           the sum over the group, not the mean
    world_only                    it takes no process group and always uses WORLD

Claims combine with commas: ``sum, rounded(bfloat16), world_only``. A claim changes which result is
right; it never switches a rule off without a rule that holds the claim itself to account.
"""

import ast
from dataclasses import dataclass

from conformance.errors import UsageError

ROUNDED_DTYPES = ("float16", "bfloat16")
LATER = ("compressed", "unbiased", "local", "fused", "like", "warmup", "poststep", "chained", "checkpointable")
KNOWN = "exact, rounded(float16), rounded(bfloat16), sum, world_only"


@dataclass(frozen=True)
class Claims:
    """The claims that choose the oracle.

    Attributes:
        rounded: the dtype that values are rounded to on the way, or None.
        sum: the result is the sum over the group instead of the mean.
        world_only: the group is always WORLD, whatever group the model lives on.
    """

    rounded: str | None = None
    sum: bool = False
    world_only: bool = False

    def __str__(self) -> str:
        parts = [f"rounded({self.rounded})" if self.rounded else "", "sum" if self.sum else ""]
        parts = [part for part in parts if part] or ["exact"]
        return ", ".join(parts + (["world_only"] if self.world_only else []))


def parse_claims(text: str) -> Claims:
    """Parse claims as written on the command line.

    Raises:
        UsageError: the text is not a list of known claims, or two of them contradict each other.
    """
    found: dict[str, str | bool] = {}
    for node in _expressions(text):
        name, args = _call(node, text)
        if name in LATER:
            raise UsageError(f"--claims: {name!r} is in the rule book's draft but not judged by this version; known: {KNOWN}")
        if name not in ("exact", "rounded", "sum", "world_only"):
            raise UsageError(f"--claims: {name!r} is not a claim; known: {KNOWN}")
        if name in found:
            raise UsageError(f"--claims: {name!r} is given twice in {text!r}")
        if name == "rounded":
            if len(args) != 1 or args[0] not in ROUNDED_DTYPES:
                raise UsageError("--claims: rounded takes one dtype: rounded(float16) or rounded(bfloat16)")
            found[name] = args[0]
        elif args:
            raise UsageError(f"--claims: {name!r} takes no arguments")
        else:
            found[name] = True
    if "exact" in found and ("rounded" in found or "sum" in found):
        raise UsageError(f"--claims: {text!r} contradicts itself: exact is the unrounded mean")
    return Claims(
        rounded=str(found["rounded"]) if "rounded" in found else None,
        sum="sum" in found,
        world_only="world_only" in found,
    )


def _expressions(text: str) -> list[ast.expr]:
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise UsageError(f"--claims: cannot read {text!r}; known: {KNOWN}") from None
    return body.elts if isinstance(body, ast.Tuple) else [body]


def _call(node: ast.expr, text: str) -> tuple[str, list[str]]:
    """Split ``name`` or ``name(a, b)`` into its name and arguments."""
    if isinstance(node, ast.Name):
        return node.id, []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return node.func.id, [ast.unparse(arg).strip("'\"").removeprefix("torch.") for arg in node.args]
    raise UsageError(f"--claims: cannot read {text!r}; known: {KNOWN}")
