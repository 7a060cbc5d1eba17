"""What a subject says of itself, parsed from one line of text.

    exact                         the mean over the group, in the bucket's dtype (the default)
    rounded(float16)              the mean of the values rounded to that dtype
    rounded(float16, ratio=0.5)   and what a rank sends is at most that share of the gradients' bytes
    sum                           the sum over the group, not the mean
    world_only                    it takes no process group and always uses WORLD
    compressed                    a lossy mean: what a step leaves out is added to later ones (error feedback)
    compressed(feedback=ef21)     a lossy mean: fed the same again and again, it comes to the mean itself
    compressed(feedback=False, delta=0.99)
                                  a lossy mean, with nothing added later
    compressed(ratio=0.3)         and what a rank sends is at most that share of the gradients' bytes; with every lossy claim
    unbiased                      a random result, of which the mean is the expectation
    local                         a weighted mean of some ranks' gradients: replicas drift apart
    warmup(k)                     exact in the first k steps; combines with the lossy ones
    like(powerSGD_hook, matrix_approximation_rank=2)
                                  step by step what that hook or compressor of hooks_ref gives under these options
    dtypes(float32)               it takes models whose parameters are all of these dtypes, and refuses others
    min_world_size(2)             it takes groups of as many ranks at least, and refuses smaller ones
    backends(nccl), devices(cuda) it takes these alone; it is not judged on others
    checkpointable                its state can be saved, and goes on in new processes where it was
    fused(SGD, lr=0.1, after=0)   the hook steps the parameters, as torch.optim.SGD would; not in the first ``after`` steps
    fused(SGD, lr=0.1, frees_gradients=True)
                                  and the gradients are None when backward is over
    poststep(call=flush)          the gradients are right after a call that the trainer makes when backward is over: of the
                                  state, the hook's object or its module; or, without ``call``, of the set-up's Case
    chained                       callbacks start collectives, which needs the order of a stream; Gloo has none, so each
                                  collective is over before the next begins

``delta``, in (0, 1], says how much of what it is given a compressor delivers at least: ||C(x) - x||**2 <= (1 - delta)
||x||**2. It says how fast held-back values have to come out; 0.1 unless it is given.

Claims combine with commas: ``sum, rounded(bfloat16), world_only``. A claim changes which result is
right; it never switches a rule off without a rule that holds the claim itself to account.

These are what hooks say. What a subject of another kind says of itself stands with its kind, in ``kinds``; min_world_size is
common to all.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.errors import UsageError
from conformance.subjects.kinds import HOOK, KINDS
from conformance.subjects.references import REFERENCES

ROUNDED_DTYPES = ("float16", "bfloat16")
AUTO = "auto"  # as --claims: propose some
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "NAdam", "RAdam")
DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64")
KNOWN = (
    "exact, rounded(float16), rounded(bfloat16), sum, world_only, compressed, compressed(feedback=ef21), "
    "compressed(feedback=False, delta=D), unbiased, local, warmup(K), fused(OPTIMIZER, ...), like(REFERENCE, ...), "
    "dtypes(float32, ...), min_world_size(N), backends(gloo, ...), devices(cpu, ...), checkpointable, poststep(call=NAME), chained"
)
FEEDBACK, DIFFERENCE, CONTRACTION, UNBIASED, LOCAL = "feedback", "difference", "contraction", "unbiased", "local"
_NAMES = (
    *("exact", "rounded", "sum", "world_only", "compressed", "unbiased", "local", "warmup", "fused", "like", "dtypes"),
    *("checkpointable", "poststep", "chained", "min_world_size", "backends", "devices"),
)


@dataclass(frozen=True)
class Claims:
    """The claims that choose what is right.

    Attributes:
        rounded: the dtype that values are rounded to on the way, or None.
        sum: the result is the sum over the group instead of the mean.
        world_only: the group is always WORLD, whatever group the model lives on.
        lossy: how the result differs from the mean: one of the five words above, or '' where it does not.
        delta: of a compressor, see above.
        checkpointable: the state can be saved and loaded.
        poststep: gradients are right only after a call that the trainer makes when backward is over.
        call: the name of that call, or '' where the set-up's Case has it.
        chained: callbacks start collectives.
        kind: of the subject.
        options: by the name of each claim of that kind, what it says; of a hook, nothing.
        ratio: the largest share of the gradients' bytes that a rank sends after the warm-up, or None.
        warmup: steps before the first lossy one.
        fused: the optimizer that the hook steps, as an expression ``SGD(lr=0.1)``, or ''.
        after: steps before the first that a fused hook steps its parameters in.
        frees_gradients: a fused hook leaves no gradients when backward is over.
        like: the reference that it gives the results of, with its options, as in ``like.subjects``; '' is none.
        dtypes: names of those that it takes; () is all.
        min_world_size: the smallest group that it takes; 0 is any.
        backends, devices: names of those that it takes; () is all.
    """

    rounded: str | None = None
    sum: bool = False
    world_only: bool = False
    lossy: str = ""
    delta: float = 0.1
    warmup: int = 0
    fused: str = ""
    after: int = 0
    frees_gradients: bool = False
    like: str = ""
    dtypes: tuple[str, ...] = ()
    min_world_size: int = 0
    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    ratio: float | None = None
    checkpointable: bool = False
    poststep: bool = False
    call: str = ""
    chained: bool = False
    kind: str = HOOK
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def has(self, name: str) -> bool:
        """Whether this is claimed."""
        return name in self.options or bool(getattr(self, name, False))

    def __str__(self) -> str:
        if self.kind != HOOK:
            return self._in_words()
        delta = "" if self.delta == Claims.delta else f"delta={self.delta:g}"
        ratio = "" if self.ratio is None else f"ratio={self.ratio:g}"
        compressed = {FEEDBACK: "", DIFFERENCE: "feedback=ef21", CONTRACTION: "feedback=False"}
        rounded = ", ".join(filter(None, (self.rounded, ratio)))
        parts = [f"rounded({rounded})" if self.rounded else "", "sum" if self.sum else ""]
        if self.lossy in compressed:
            inside = ", ".join(filter(None, (compressed[self.lossy], delta, ratio)))
            parts.append(f"compressed({inside})" if inside else "compressed")
        elif self.lossy:
            parts.append(f"{self.lossy}({ratio})" if ratio else self.lossy)
        parts = [part for part in parts if part] or ["exact"]
        if self.warmup:
            parts.append(f"warmup({self.warmup})")
        if self.fused:
            name, _, options = self.fused.removesuffix(")").partition("(")
            after, frees = f"after={self.after}" if self.after else "", "frees_gradients=True" if self.frees_gradients else ""
            inside = ", ".join(filter(None, (name, options, after, frees)))
            parts.append(f"fused({inside})")
        if self.like:
            parts.append(f"like({self.like.replace(',', ', ')})")
        if self.min_world_size:
            parts.append(f"min_world_size({self.min_world_size})")
        parts += [f"{name}({', '.join(names)})" for name in ("dtypes", "backends", "devices") if (names := getattr(self, name))]
        if self.poststep:
            parts.append(f"poststep(call={self.call})" if self.call else "poststep")
        return ", ".join(parts + [name for name in ("chained", "world_only", "checkpointable") if getattr(self, name)])

    def _in_words(self) -> str:
        """What a subject of another kind says, as one would write it."""
        parts = []
        for name, said in self.options.items():
            options = {**said, **said.get("options", {})}
            inside = [options.pop("name", ""), *(f"{key}={value!r}" for key, value in options.items() if key != "options")]
            parts.append(f"{name}({', '.join(filter(None, inside))})" if any(inside) else name)
        if self.min_world_size:
            parts.append(f"min_world_size({self.min_world_size})")
        return ", ".join(parts) or f"what every {self.kind} is"


def parse_claims(text: str, kind: str = HOOK) -> Claims:
    """Parse claims as written on the command line, of a subject of that kind.

    Raises:
        UsageError: the text is not a list of known claims, or two of them contradict each other.
    """
    if kind != HOOK:
        return _parse_others(text, kind)
    found: dict[str, dict[str, Any]] = {}
    for node in _expressions(text):
        name, args, options = _call(node, text)
        if name not in _NAMES:
            raise UsageError(f"--claims: {name!r} is not a claim; known: {KNOWN}")
        if name in found:
            raise UsageError(f"--claims: {name!r} is given twice in {text!r}")
        found[name] = _READERS.get(name, _read_flag)(name, args, options)
    if "exact" in found and found.keys() & {"rounded", "sum", "compressed", "unbiased", "local"}:
        raise UsageError(f"--claims: {text!r} contradicts itself: exact is the unrounded mean")
    lossy = found.keys() & {"compressed", "unbiased", "local"}
    if len(lossy) > 1 or (lossy and found.keys() & {"rounded", "sum"}):
        raise UsageError(f"--claims: {text!r} contradicts itself: {', '.join(sorted(lossy))} says by itself what the result is")
    if "like" in found and not lossy:
        raise UsageError(f"--claims: {text!r}: like says which lossy result it is; claim compressed, unbiased or local too")
    if {"poststep", "fused"} <= found.keys():
        raise UsageError(f"--claims: {text!r} contradicts itself: a fused hook has stepped the parameters when backward is over")
    if "warmup" in found and not lossy:
        raise UsageError(f"--claims: {text!r}: warmup says when a lossy claim begins; there is none")
    return Claims(**{name: value for read in found.values() for name, value in read.items()})


def default_claims(kind: str, arguments: Mapping[str, Any]) -> Claims:
    """Return the claims of a subject that nobody makes any for.

    Args:
        kind: the subject's.
        arguments: the arguments in its target.

    Raises:
        UsageError: its kind needs claims, and the arguments do not imply any.
    """
    try:
        text = KINDS[kind].default_claims(arguments)
    except ValueError as error:
        raise UsageError(f"--{kind}: {error}") from error
    return parse_claims(text, kind) if text else Claims(kind=kind)


def _parse_others(text: str, kind: str) -> Claims:
    if text == str(Claims(kind=kind)):  # as records have it
        return Claims(kind=kind)
    readers = KINDS[kind].claims
    said: dict[str, Mapping[str, Any]] = {}
    smallest = 0
    for node in _expressions(text):
        name, args, options = _call(node, text)
        if name in said or (name == "min_world_size" and smallest):
            raise UsageError(f"--claims: {name!r} is given twice in {text!r}")
        if name == "min_world_size":
            smallest = _read_min_world_size(name, args, options)[name]
        elif name in readers:
            try:
                said[name] = readers[name](args, options)
            except ValueError as error:
                raise UsageError(f"--claims: {name} {error}") from error
        else:
            known = ", ".join([*readers, "min_world_size"])
            raise UsageError(f"--claims: {name!r} is no claim of a subject of this kind ({kind}); known: {known}")
    if wrong := KINDS[kind].contradiction(said):
        raise UsageError(f"--claims: {text!r}: {wrong}")
    return Claims(kind=kind, options=said, min_world_size=smallest)


def _read_flag(name: str, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if args or options:
        raise UsageError(f"--claims: {name!r} takes no arguments")
    return {} if name == "exact" else {name: True}


def _read_lossy(name: str, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    read = {"lossy": name, **_read_ratio(name, options)}
    if args or options:
        raise UsageError(f"--claims: {name} takes ratio=, or nothing")
    return read


def _read_ratio(name: str, options: dict[str, Any]) -> dict[str, Any]:
    ratio = options.pop("ratio", None)
    if ratio is not None and not (isinstance(ratio, int | float) and not isinstance(ratio, bool) and 0 <= ratio <= 1):
        raise UsageError(f"--claims: {name}(ratio=...) is a number from 0 to 1, got {ratio!r}")
    return {} if ratio is None else {"ratio": float(ratio)}


def _read_rounded(name: str, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    ratio = _read_ratio(name, options)
    if len(args) != 1 or args[0] not in ROUNDED_DTYPES or options:
        raise UsageError("--claims: rounded takes one dtype, and ratio= if it likes: rounded(float16), rounded(bfloat16, ratio=0.5)")
    return {"rounded": args[0], **ratio}


def _read_compressed(name: str, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    kinds = {True: FEEDBACK, "ef21": DIFFERENCE, False: CONTRACTION}
    feedback, delta, ratio = options.pop("feedback", True), options.pop("delta", None), _read_ratio(name, options)
    if args or options or feedback not in kinds:
        raise UsageError("--claims: compressed takes feedback=True, ef21 or False, delta= and ratio=")
    if delta is not None and not (isinstance(delta, int | float) and not isinstance(delta, bool) and 0.01 <= delta <= 1):
        raise UsageError(
            f"--claims: compressed(delta=...) is a number from 0.01 to 1, got {delta!r}; try a stronger setting of the same hook"
        )
    if kinds[feedback] == CONTRACTION and delta is None:
        raise UsageError("--claims: compressed(feedback=False) needs delta=: ||C(x) - x||**2 <= (1 - delta) ||x||**2")
    return {"lossy": kinds[feedback], **ratio, **({} if delta is None else {"delta": float(delta)})}


def _read_warmup(name: str, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if len(args) != 1 or options or not args[0].isdigit() or not 1 <= int(args[0]) <= 50:
        raise UsageError("--claims: warmup takes a number of steps from 1 to 50; certify a hook with a longer one with a shorter one")
    return {"warmup": int(args[0])}


def _read_fused(name: str, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    after, frees = options.pop("after", 0), options.pop("frees_gradients", False)
    if len(args) != 1 or args[0].removeprefix("optim.") not in OPTIMIZERS:
        raise UsageError(
            f"--claims: fused takes the name of an optimizer and its options: fused(SGD, lr=0.1); one of {', '.join(OPTIMIZERS)}"
        )
    if not isinstance(after, int) or isinstance(after, bool) or not 0 <= after <= 4:
        raise UsageError(f"--claims: fused(after=...) is a number of steps from 0 to 4, got {after!r}")
    if not isinstance(frees, bool):
        raise UsageError(f"--claims: fused(frees_gradients=...) is True or False, got {frees!r}")
    inside = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return {"fused": f"{args[0].removeprefix('optim.')}({inside})", "after": after, "frees_gradients": frees}


def _read_like(name: str, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if len(args) != 1 or args[0] not in REFERENCES:
        raise UsageError(f"--claims: like takes a reference of hooks_ref, and its options: one of {', '.join(REFERENCES)}")
    return {"like": ",".join([args[0], *(f"{key}={value!r}" for key, value in options.items())])}


def _read_poststep(name: str, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    call = options.pop("call", "")
    if args or options or not (call == "" or (isinstance(call, str) and call.isidentifier())):
        raise UsageError("--claims: poststep takes call=, the name of a function or method, or nothing: poststep(call=flush)")
    return {"poststep": True, "call": call}


def _read_dtypes(name: str, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if "float32" not in args or options or not set(args) <= set(DTYPES) or len(set(args)) < len(args):
        raise UsageError(f"--claims: dtypes takes float32, and what else the hook takes of {', '.join(DTYPES[1:])}")
    return {"dtypes": tuple(args)}


def _read_min_world_size(name: str, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if len(args) != 1 or options or args[0] not in ("2", "3", "4"):
        raise UsageError("--claims: min_world_size takes a number of ranks from 2 to 4, which is as many as a certificate speaks of")
    return {"min_world_size": int(args[0])}


def _read_names(name: str, args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    if not args or options or not all(arg.isidentifier() for arg in args) or len(set(args)) < len(args):
        raise UsageError(f"--claims: {name} takes names: {name}({'gloo, nccl' if name == 'backends' else 'cpu, cuda'})")
    return {name: tuple(args)}


_READERS = {
    **{"rounded": _read_rounded, "compressed": _read_compressed, UNBIASED: _read_lossy, LOCAL: _read_lossy, "warmup": _read_warmup},
    **{"fused": _read_fused, "like": _read_like, "dtypes": _read_dtypes, "poststep": _read_poststep},
    **{"min_world_size": _read_min_world_size, "backends": _read_names, "devices": _read_names},
}


def _expressions(text: str) -> list[ast.expr]:
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise UsageError(f"--claims: cannot read {text!r}; known: {KNOWN}") from None
    return body.elts if isinstance(body, ast.Tuple) else [body]


def _call(node: ast.expr, text: str) -> tuple[str, list[str], dict[str, Any]]:
    """Split ``name`` or ``name(a, b=1)`` into its name, arguments and options."""
    if isinstance(node, ast.Name):
        return node.id, [], {}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and all(keyword.arg for keyword in node.keywords):
        args = [ast.unparse(arg).strip("'\"").removeprefix("torch.") for arg in node.args]
        return node.func.id, args, {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    raise UsageError(f"--claims: cannot read {text!r}; known: {KNOWN}")


def _value(node: ast.expr) -> Any:
    """Return a literal, or a bare word as text."""
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise UsageError(f"--claims: cannot read {ast.unparse(node)!r}: a number, a word, True or False") from None
