"""Break the references mechanically, one place at a time, and count how many of the broken ones the
rule book refuses.

    python -m tests.kill_rate [--module sign ...] [--sample 20] [--seed 0] [--survivors]

Not part of the test run. Each mutation is made in a copy of ``hooks_ref`` and ``examples`` under
other names, in a folder of its own. It is judged beside its own original, under ``like`` (13.8),
and then by the commands of ``hooks_ref/README.md`` that use the module, as the tests do, until a
MUST rule fails. Survivors are printed with their place and their change. A person then writes the
reason into ``kill_rate.toml``: the mutation is equivalent, or no claim covers it, or the book has a
hole. Mutations listed there are counted, and judged only with ``--survivors``.

Left alone: docstrings, messages of errors, checks that only raise, saving and loading of a state,
statistics (no rule covers them), defaults of arguments, and ``strict=`` and ``sorted=``, which
change nothing.
"""

import argparse
import ast
import collections
import copy
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import tomllib

from conformance.errors import ConformanceError
from conformance.hosts.supervisor import die_with_parent
from conformance.judging.rule import MUST
from conformance.judging.verdict import Verdict
from conformance.rules import book
from tests.cases import Case, own_judge
from tests.hooks_ref.test_certified import LOSSLESS, OURS

UNCHANGED = "unchanged"
PATIENCE = 20.0  # seconds after which a run counts as hanging
ROOT = Path(__file__).resolve().parent.parent
# The commands that use a module, by the names of their subjects or states.
USERS = {
    "default_hooks": ("allreduce_hook", "fp16_compress_hook", "fp16_wrapped", "bf16_wrapped"),
    "mixed_precision": ("mixed_float16", "mixed_bfloat16"),
    "compression": (
        "top_k",
        "top_k_later",
        "top_k_dgc",
        "random_k",
        "top_k_ef21",
        "qsgd",
        "encoded",
    ),
    "sparsification": ("top_k", "top_k_dgc", "random_k", "random_k_unbiased"),
    "sign": ("scaled_sign", "one_bit"),
    "stochastic": ("qsgd", "qsgd_4_bits", "terngrad", "terngrad_short"),
    "quantization": ("quantization_pertensor_hook", "quantization_perchannel_hook"),
    "low_rank": ("PowerSGDState", "power_sgd", "power_sgd_same_shapes", "power_sgd_fresh"),
    "local_sgd": ("pairs", "own"),
    "gossip": ("GossipGraDState",),
    "optimizer_overlap": (
        "sgd_in_the_hook",
        "adagrad_out_of_place",
        "adam_in_the_hook",
        "sgd_in_backward",
    ),
    "zero_overlap": ("zero_after_backward", "zero_interleaved"),
    "_buckets": (
        "encoded",
        "one_bit",
        "power_sgd",
        "qsgd_4_bits",
        "quantization_perchannel_hook",
        "sgd_in_the_hook",
        "adagrad_out_of_place",
    ),
    "_collectives": ("top_k", "one_bit", "power_sgd"),
    "_state": ("top_k_later", "random_k", "one_bit", "power_sgd"),
}
_POWER_SGD = (
    "compressed(ratio=0.039), warmup(2), like({}, matrix_approximation_rank=2, "
    "start_powerSGD_iter=2, min_compression_rate=1{})"
)
# The ``like`` claim of a subject, by the name of its state or hook; some options occur in no
# command of the README.
ALIKE = {
    "top_k": "compressed(ratio=0.501), like(TopK, ratio=0.25)",
    "top_k_later": "compressed(ratio=0.501), warmup(2), like(TopK, ratio=0.25, start_iter=2)",
    "top_k_dgc": "compressed(ratio=0.501), like(TopK, ratio=0.25, momentum=0.5)",
    "top_k_ef21": "compressed(ratio=0.501, feedback=ef21), like(TopK, ratio=0.25, memory='ef21')",
    "random_k": "compressed(ratio=0.251), like(RandomK, ratio=0.25)",
    "random_k_unbiased": (
        "unbiased(ratio=0.251), like(RandomK, ratio=0.25, unbiased=True, memory='none')"
    ),
    "scaled_sign": "compressed(ratio=0.032), like(ScaledSign)",
    "one_bit": "compressed(ratio=0.032), like(OneBit)",
    "qsgd": "unbiased(ratio=0.253), like(QSGD)",
    "qsgd_4_bits": "unbiased(ratio=0.188), like(QSGD, levels=7, block=16)",
    "terngrad": "unbiased(ratio=0.065), like(TernGrad)",
    "terngrad_short": "unbiased(ratio=0.163), like(TernGrad, block=10)",
    "power_sgd": _POWER_SGD.format("powerSGD_hook", ""),
    "power_sgd_same_shapes": _POWER_SGD.format(
        "powerSGD_hook", ", batch_tensors_with_same_shape=True"
    ),
    "power_sgd_fresh": _POWER_SGD.format(
        "powerSGD_hook", (", use_error_feedback=False, warm_start=False")
    ),
    "quantization_pertensor_hook": (
        "compressed(ratio=0.2505, feedback=False, delta=0.99), like(quantization_pertensor_hook)"
    ),
    "quantization_perchannel_hook": (
        "compressed(ratio=0.258, feedback=False, delta=0.99), like(quantization_perchannel_hook)"
    ),
}
# Cases for options that no command of the README uses. A rank's place in a topology shows with more
# than two ranks only.
_LOW_RANK = ",start_powerSGD_iter=2,min_compression_rate={},matrix_approximation_rank={}"
_GOSSIP = "hooks_ref:gossip_grad_hook", "hooks_ref:GossipGraDState"
_LOSSLESS = [replace(case, worlds=(2,), rules=("1.5", "2.1", "2.2", "2.4")) for case in LOSSLESS]
MORE = {
    "compression": _LOSSLESS,
    "sparsification": _LOSSLESS,
    "local_sgd": [
        Case(
            "hooks_ref:post_localSGD_hook",
            state="examples.states:on_this_machine",
            worlds=(2, 3),
            rules=("1.5", "2.1", "2.7"),
        )
    ],
    "low_rank": [
        *(
            Case(
                f"hooks_ref:{hook}",
                f"compressed(delta=0.01), warmup(2), like({hook}{_LOW_RANK.format(*options)})",
                f"hooks_ref:PowerSGDState{_LOW_RANK.format(*options)}",
                worlds=(2,),
                rules=("1.5", "13.8"),
            )
            for hook, *options in (
                *(
                    ("powerSGD_hook", 1, 1),
                    ("powerSGD_hook", 4, 4),
                    ("batched_powerSGD_hook", 1, 2),
                ),
                *(
                    (hook, 1, "1,use_error_feedback=False")
                    for hook in ("powerSGD_hook", "batched_powerSGD_hook")
                ),
            )
        ),
        Case(
            "hooks_ref:powerSGD_hook",
            "compressed(feedback=False, delta=0.01), warmup(2)",
            f"hooks_ref:PowerSGDState{_LOW_RANK.format(1, 1)},use_error_feedback=False",
            worlds=(2,),
            rules=("1.5", "2.1", "2.5"),
        ),
    ],
    "optimizer_overlap": [
        Case(
            "examples.setups:descent_in_the_hook",
            "fused(SGD, lr=0.1)",
            setup=True,
            worlds=(2,),
            rules=("1.5", "13.6"),
        ),
    ],
    "_state": [
        Case(
            "hooks_ref:compression_hook",
            "compressed(delta=0.25), warmup(2)",
            "examples.states:top_k_later",
            worlds=(2,),
            rules=("1.5", "13.4"),
        ),
    ],
    "gossip": [
        Case(
            _GOSSIP[0],
            (f"local{warmup}, like(gossip_grad_hook{options})"),
            _GOSSIP[1] + options,
            worlds=(world,),
            rules=("1.5", "13.8"),
        )
        for world, warmup, options in (
            *((world, "", "") for world in (2, 3, 4)),
            (4, "", ",topology='hypercube'"),
            (4, ", warmup(2)", ",start_iter=2"),
        )
    ],
}
SKIPPED = (
    "__getstate__",
    "__setstate__",
    "__repr__",
    "state_dict",
    "load_state_dict",
    "compression_stats",
)
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Div,
        ast.Div: ast.Mult,
        ast.FloorDiv: ast.Mult,
        ast.MatMult: ast.Mult,
    },
    **{
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
    },
    **{
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
        ast.And: ast.Or,
        ast.Or: ast.And,
    },
}
DROPPED_CALLS = (
    "clone",
    "contiguous",
    "t",
    "neg_",
    "abs",
    "sign",
    "clamp",
    "clamp_",
    "round",
    "floor",
    "add_",
    "sub_",
    "mul_",
    "div_",
)


@dataclass(frozen=True)
class Mutation:
    """One change of one module."""

    module: str
    line: int
    change: str
    source: str
    place: str = ""  # the function, and the first line of the statement as it was: lines move

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line}: {self.change}"

    @property
    def key(self) -> str:
        """The mutation's name in ``kill_rate.toml``."""
        return f"{self.module}.{self.place} | {self.change}"


def mutations(module: str) -> Iterator[Mutation]:
    """Make every change of a module, one at a time."""
    for line, change, place, tree in _changes(module):
        yield Mutation(module, line, change, ast.unparse(ast.fix_missing_locations(tree)), place)


def keys(module: str) -> Iterator[str]:
    """Yield the names of a module's mutations in ``kill_rate.toml``."""
    for line, change, place, _ in _changes(module):
        yield Mutation(module, line, change, "", place).key


def _changes(module: str) -> Iterator[tuple[int, str, str, ast.Module]]:
    """Yield (line, change, place, changed tree), the tree until the next one is made."""
    tree = ast.parse((ROOT / "hooks_ref" / f"{module}.py").read_text())
    named = collections.Counter[tuple[str, str]]()
    for path in [list(path) for path in _places(tree, [])]:
        node, place = _at(tree, path), _place(tree, path)
        for variant in itertools.count():
            if (mutated := _mutated(copy.deepcopy(node), variant)) is None:
                break
            change = f"{_short(ast.unparse(node))}  ->  {_short(ast.unparse(mutated))}"
            named[place, change] += 1
            again = f" (no. {named[place, change]})" if named[place, change] > 1 else ""
            _put(tree, path, mutated)
            yield getattr(node, "lineno", 0), change + again, place, tree
            _put(tree, path, node)


def _places(
    node: ast.AST, path: list[tuple[str, int | None]]
) -> Iterator[list[tuple[str, int | None]]]:
    for name, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_left_alone(child, name):
                continue
            here = [*path, (name, index)]
            if any(_mutated(copy.deepcopy(child), variant) for variant in (0,)) and _is_code(path):
                yield here
            yield from _places(child, here)


def _place(tree: ast.AST, path: list[tuple[str, int | None]]) -> str:
    around = [_at(tree, path[:end]) for end in range(1, len(path) + 1)]
    names = ".".join(
        node.name for node in around if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    )
    statement = [node for node in around if isinstance(node, ast.stmt)][-1]
    return f"{names}: {ast.unparse(statement).splitlines()[0]}"


def _is_code(path: list[tuple[str, int | None]]) -> bool:
    """Whether a place is inside a function: hooks do not go wrong in definitions of a module."""
    return len(path) >= 2


def _is_left_alone(node: ast.AST, field: str) -> bool:
    statistics = (
        isinstance(node, ast.stmt)
        and not isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and _is_statistics(node)
    )
    only_raises = (
        isinstance(node, ast.If)
        and all(isinstance(one, ast.Raise) for one in node.body)
        and not node.orelse
    )
    skipped = isinstance(node, ast.FunctionDef) and node.name in SKIPPED
    # Checks of arguments are no part of a hook's result; ``strict`` and ``sorted`` change nothing.
    checked = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.startswith("check_")
    )
    equal = isinstance(node, ast.keyword) and node.arg in ("strict", "sorted")
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    abstract = any(isinstance(one, ast.Name) and one.id == "abstractmethod" for one in decorators)
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    # Another default is no broken hook; that defaults are torch's is compared elsewhere.
    default = field in ("defaults", "kw_defaults")
    typing = field in ("annotation", "returns", "bases", "decorator_list", "type_comment") or (
        isinstance(node, ast.AnnAssign) and not node.value
    )
    return bool(
        statistics
        or only_raises
        or skipped
        or checked
        or equal
        or abstract
        or docstring
        or default
        or typing
        or isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr))
    )


def _is_statistics(node: ast.stmt) -> bool:
    """Whether a statement logs, and does nothing else, or counts elements sent."""
    if isinstance(node, ast.If):
        return not node.orelse and all(map(_is_statistics, node.body))
    text = ast.unparse(node)
    return text.startswith("logger.") or text.partition("=")[0].strip(" +").endswith(
        ("numel_before", "numel_after")
    )


def _mutated(node: ast.AST, variant: int) -> ast.AST | None:
    """Return the node with a defect, or None if it has no such variant."""
    found: list[ast.AST] = []
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in SWAPS:
        found.append(_with(node, op=SWAPS[type(node.op)]()))
    if isinstance(node, ast.AugAssign):
        found.append(ast.Pass())
    if isinstance(node, ast.BoolOp):
        found.append(_with(node, op=SWAPS[type(node.op)]()))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        found.append(_with(node, ops=[SWAPS[type(node.ops[0])]()]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        found.append(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        found.append(ast.Constant(node.value + 1))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        found.append(ast.Constant(not node.value))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        found.append(ast.Pass())
    if isinstance(node, ast.If):
        found += [_with(node, test=ast.Constant(True)), _with(node, test=ast.Constant(False))]
    if isinstance(node, ast.IfExp):
        found += [node.body, node.orelse]
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED_CALLS:
            found.append(node.func.value)
        if any(keyword.arg == "group" for keyword in node.keywords):
            found.append(
                _with(
                    node, keywords=[keyword for keyword in node.keywords if keyword.arg != "group"]
                )
            )
    return found[variant] if variant < len(found) else None


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _at(tree: ast.AST, path: list[tuple[str, int | None]]) -> ast.AST:
    node: ast.AST = tree
    for name, index in path:
        node = getattr(node, name) if index is None else getattr(node, name)[index]
    return node


def _put(tree: ast.AST, path: list[tuple[str, int | None]], node: ast.AST) -> None:
    parent, (name, index) = _at(tree, path[:-1]), path[-1]
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else line[:87] + "..."


def explained() -> dict[str, tuple[str, str]]:
    """Return, by key, the kind of each survivor and the reason why it survives."""
    kinds = tomllib.loads((ROOT / "tests" / "kill_rate.toml").read_text())
    return {
        key: (kind, reason)
        for kind, reasons in kinds.items()
        for reason, keys in reasons.items()
        for key in keys
    }


def _start() -> None:
    """Start this process's host in a folder that stays: the folders of mutations come and go."""
    die_with_parent()
    assert (
        own_judge(PATIENCE)
        .engine(Case("hooks_ref:allreduce_hook", worlds=(2,)))
        .judge("1.5")
        .verdict.holds
    )


def judge(mutation: Mutation) -> tuple[Mutation, str, float]:
    """Return the rule that refused the mutation, ``load`` if it cannot even be loaded, or '' if it
    survived.
    """
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kill-rate-"))
    try:
        for package in ("hooks_ref", "examples"):
            for file in (ROOT / package).glob("*.py"):
                text = (
                    mutation.source
                    if package == "hooks_ref" and file.stem == mutation.module
                    else file.read_text()
                )
                text = text.replace("hooks_ref", "hooks_mutated")
                target = (
                    folder
                    / package.replace("hooks_ref", "hooks_mutated").replace(
                        "examples", "examples_mutated"
                    )
                    / file.name
                )
                target.parent.mkdir(exist_ok=True)
                target.write_text(text.replace("from examples", "from examples_mutated"))
        os.chdir(folder)
        cases = _cases(mutation.module)
        if mutation.change == UNCHANGED:  # the test run judges the originals by the whole book
            cases = [replace(case, rules=case.rules or ("1.5", "2.1")) for case in cases]
        return mutation, next(filter(None, map(_refused_by, cases)), ""), time.monotonic() - begin
    finally:
        os.chdir(ROOT)
        shutil.rmtree(folder, ignore_errors=True)


def _cases(module: str) -> list[Case]:
    def renamed(text: str) -> str:
        return text.replace("hooks_ref", "hooks_mutated").replace("examples.", "examples_mutated.")

    used = [
        case
        for case in OURS
        for name in USERS[module]
        if name in (case.target.split(":")[-1], (case.state or "").split(":")[-1])
    ]
    cases = [
        *(_alike(name) for name in USERS[module] if name in ALIKE),
        *(replace(case, worlds=(3,)) for case in used),
    ]
    cases[:0] = MORE.get(module, [])
    return [
        replace(case, target=renamed(case.target), state=case.state and renamed(case.state))
        for case in cases
    ]


def _alike(name: str) -> Case:
    """Return the subject of that name, compared with its own original."""
    if name.endswith("_hook"):
        return Case(f"hooks_ref:{name}", ALIKE[name], worlds=(2,), rules=("1.5", "13.7", "13.8"))
    hook = "powerSGD_hook" if name.startswith("power_sgd") else "compression_hook"
    return Case(
        f"hooks_ref:{hook}",
        ALIKE[name],
        f"examples.states:{name}",
        worlds=(2,),
        rules=("1.5", "13.7", "13.8"),
    )


def _refused_by(case: Case) -> str:
    rules, engine = book(case.kind), own_judge(PATIENCE).engine(case)
    try:
        for number, rule in rules.items():
            if (
                rule.level == MUST
                and number in (case.rules or rules)
                and engine.judge(number).verdict in (Verdict.FAIL, Verdict.KIT_ERROR)
            ):
                return f"{number} {engine.judge(number).verdict}"
    except ConformanceError as error:
        return f"load: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--module", nargs="+", choices=USERS, default=list(USERS))
    parser.add_argument(
        "--sample", type=int, default=20, help=("mutations of each module; 0 for all")
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--survivors",
        action="store_true",
        help=("judge only the survivors listed in kill_rate.toml"),
    )
    parser.add_argument(
        "--judges",
        type=int,
        default=2,
        help=("number of judges; hanging cases leave a core to others"),
    )
    options = parser.parse_args()
    # Unchanged copies: a rule that refuses one of these is wrong on this machine.
    chosen = [
        Mutation(module, 0, UNCHANGED, (ROOT / "hooks_ref" / f"{module}.py").read_text())
        for module in options.module
    ]
    reasons, kinds = explained(), collections.Counter[str]()
    for module in options.module:
        made = [
            mutation
            for mutation in mutations(module)
            if mutation.key in reasons or not options.survivors
        ]
        draw = random.Random(f"{options.seed} {module}")
        picked = draw.sample(made, min(options.sample, len(made))) if options.sample else made
        print(f"{module}: {len(picked)} of {len(made)} mutations", flush=True)
        kinds.update(
            reasons[mutation.key][0]
            for mutation in picked
            if mutation.key in reasons and not options.survivors
        )
        chosen += [
            mutation for mutation in picked if mutation.key not in reasons or options.survivors
        ]
    killed = collections.Counter[str]()
    survived: list[Mutation] = []
    with ProcessPoolExecutor(options.judges, get_context("spawn"), _start) as executor:
        for mutation, by, seconds in executor.map(judge, chosen):
            if mutation.change == UNCHANGED:
                if by:
                    raise SystemExit(f"{mutation}: {by}: copies cannot be judged on this machine")
                continue
            killed[by.partition(":")[0].split(" ")[0]] += 1
            if not by:
                survived.append(mutation)
            print(f"{seconds:5.1f} s  {by[:60] or 'SURVIVED':<12}  {mutation}", flush=True)
    kinds.update(reasons.get(mutation.key, ("unexplained", ""))[0] for mutation in survived)
    refused = sum(killed.values()) - len(survived)
    judged = refused + sum(
        count for kind, count in kinds.items() if kind not in ("equivalent", "unclaimed")
    )
    print(
        f"{refused + sum(kinds.values())} mutations, {refused} refused; "
        f"{', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
    )
    print(
        f"{refused} of the {judged} that break a claim are refused: "
        f"{100 * refused / max(1, judged):.1f} %"
    )
    print(
        "by rule: " + ", ".join(f"{rule} {count}" for rule, count in killed.most_common() if rule)
    )
    for mutation in survived:
        print(
            f"survived: {mutation}: "
            f"{': '.join(reasons.get(mutation.key, ('not in kill_rate.toml', mutation.key)))}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
