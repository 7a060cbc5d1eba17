"""The subjects that ``tests/versions.py`` judges with each version of torch.

They are a reference of each kind, torch's own subjects, and mutants of all sections of the book but
those of devices. The mutants' runs do not take long (``tests/cases.py``); a section in which all
runs take long has one mutant. The small subset takes some minutes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from conformance.judging.rule import MUST, Rule, with_needed
from conformance.rules import book
from conformance.subjects.kinds import HOOK, KINDS
from tests.cases import COSTLY_SECTIONS, Case, is_costly
from tests.mutants import Mutant, catalogue

GROUPS = ("references", "torch's own", "mutants")
WORLDS = (2,)
RULES = book()
OF_A_SECTION = 2
"""How many mutants of each section the small subset has; they break different rules."""

_DDP = "torch.distributed.algorithms.ddp_comm_hooks"
_AVERAGERS = "torch.distributed.algorithms.model_averaging"

REFERENCES = (
    Case("hooks_ref:allreduce_hook"),
    Case("hooks_ref:fp16_compress_hook", "rounded(float16)"),
    *(
        Case(str(kind.reference), kind=name, claims="exact")
        for name, kind in KINDS.items()
        if name != "hook"
    ),
)
TORCHS = (
    # It hangs, and is judged while others are.
    Case(
        f"{_DDP}.powerSGD_hook:powerSGD_hook",
        "compressed",
        state=f"{_DDP}.powerSGD_hook:PowerSGDState,matrix_approximation_rank=2,start_powerSGD_iter=2",
    ),
    Case(f"{_DDP}.default_hooks:allreduce_hook"),
    Case(f"{_DDP}.default_hooks:fp16_compress_hook", "rounded(float16)"),
    Case("tests.peers:torch_bf16", "rounded(bfloat16)"),
    Case("tests.peers:torch_fp16_wrapped", "rounded(float16)"),
    Case(f"{_DDP}:DDPCommHookType.ALLREDUCE", setup=True),
    Case(f"{_DDP}:DDPCommHookType.FP16_COMPRESS", "rounded(float16)", setup=True),
    Case(f"{_AVERAGERS}.averagers:PeriodicModelAverager,period=4,warmup_steps=10", kind="averager"),
    Case("torch.distributed.optim:PostLocalSGDOptimizer", kind="optimizer"),
    Case("torch.distributed.optim:ZeroRedundancyOptimizer", kind="optimizer"),
    Case("torch.distributed.algorithms.join:Join", kind="joinable"),
    Case(
        "torch.distributed.algorithms._quantization.quantization:auto_quantize,func=all_gather,"
        "qtype=FP16",
        kind="collective",
    ),
    Case(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper",
        kind="wrapper",
    ),
    Case(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:offload_wrapper",
        kind="wrapper",
    ),
)


@dataclass(frozen=True)
class Broken:
    """A mutant.

    Attributes:
        case: judged by ``breaks`` and the rules that they build on.
        breaks: the rules that must refuse it.
        may: further rules that may refuse it.
    """

    case: Case
    breaks: tuple[str, ...]
    may: frozenset[str]


def references() -> list[Case]:
    """Return the reference of each kind, and of hooks that round."""
    return [_by_its_rules(case) for case in REFERENCES]


def torchs_own(small: bool = False) -> list[Case]:
    """Return torch's own subjects.

    Args:
        small: leave out hooks that are built in or wrapped, and all but the first of each other
            kind.
    """
    if not small:
        return [_by_its_rules(case) for case in TORCHS]
    chosen: dict[str, Case] = {}
    for case in TORCHS:
        if not case.setup and "wrapped" not in case.target:
            chosen.setdefault(str(case) if case.kind == HOOK else case.kind, case)
    return [_by_its_rules(case) for case in chosen.values()]


def mutants(small: bool = False) -> list[Broken]:
    """Return mutants of all sections but those of devices.

    The first ones are of sections in which all runs take long, one of each section. The others are
    mutants whose runs do not take long.

    Args:
        small: return two of each other section, those with the fewest scenarios, instead of the
            first of each section and the first of each module.
    """
    found: dict[str, Broken] = {}
    long = _fewest_scenarios(_in_costly_sections(), 1)
    short = _fewest_scenarios(_fitting(), OF_A_SECTION) if small else _firsts()
    for module, mutant in (*long, *short):
        one = _broken(module, mutant)
        found.setdefault(str(one.case), one)
    return list(found.values())


def _firsts() -> Iterator[tuple[str, Mutant]]:
    seen = set()
    for module, mutant in _fitting():
        keys = {module, RULES[mutant.breaks[0]].section}
        if not keys <= seen:
            yield module, mutant
        seen |= keys


def _fewest_scenarios(
    mutants: Iterable[tuple[str, Mutant]], of_a_section: int
) -> Iterator[tuple[str, Mutant]]:
    """Yield the mutants of each section that have the fewest scenarios and break different rules.

    Args:
        mutants: with their modules.
        of_a_section: how many of a section, at most.
    """
    broken: dict[str, set[str]] = {}
    for module, mutant in sorted(mutants, key=_number_of_scenarios):
        rules = broken.setdefault(RULES[mutant.breaks[0]].section, set())
        if len(rules) < of_a_section and mutant.breaks[0] not in rules:
            rules.add(mutant.breaks[0])
            yield module, mutant


def _fitting() -> Iterator[tuple[str, Mutant]]:
    """Yield modules and mutants whose runs do not take long."""
    for module, mutant in _refused_on_two_ranks():
        if not is_costly(RULES[mutant.breaks[0]]):
            yield module, mutant


def _in_costly_sections() -> Iterator[tuple[str, Mutant]]:
    """Yield modules and mutants of sections in which all runs take long."""
    for module, mutant in _refused_on_two_ranks():
        if RULES[mutant.breaks[0]].section in COSTLY_SECTIONS:
            yield module, mutant


def _refused_on_two_ranks() -> Iterator[tuple[str, Mutant]]:
    """Yield modules and mutants that are refused on two ranks of a CPU."""
    for module, mutant in catalogue():
        rule = RULES[mutant.breaks[0]]
        # A rule that watches the runs of others has none to watch if it builds on no rule.
        has_runs = not rule.watches or bool(rule.needs)
        is_refused = all(RULES[number].level == MUST for number in mutant.breaks)
        ends_by_itself = not mutant.hangs and not module.endswith("process")
        on_two_ranks = mutant.worlds == WORLDS and not mutant.device
        if has_runs and is_refused and ends_by_itself and on_two_ranks:
            yield module, mutant


def _number_of_scenarios(of: tuple[str, Mutant]) -> int:
    _, mutant = of
    return len({scenario.name for rule in _rules(mutant) for scenario in rule.on})


def _rules(mutant: Mutant) -> list[Rule]:
    """Return the rules that must refuse a mutant, and those that they build on.

    If one of the others refuses it first, the result shows which one.
    """
    needed = with_needed(RULES, mutant.breaks)
    return [rule for rule in needed.values() if rule.kind == mutant.kind]


def _broken(module: str, mutant: Mutant) -> Broken:
    case = Case(
        f"{module}:{mutant.name}",
        mutant.claims,
        mutant.state,
        mutant.setup,
        WORLDS,
        rules=tuple(rule.number for rule in _rules(mutant)),
        kind=mutant.kind,
        partly=True,
    )
    return Broken(case, mutant.breaks, frozenset(mutant.because))


def _by_its_rules(case: Case) -> Case:
    rules = tuple(
        number
        for number, rule in RULES.items()
        if rule.kind == case.kind and not rule.device and not is_costly(rule) and not rule.probes
    )
    return replace(case, rules=rules, worlds=WORLDS, partly=True)
