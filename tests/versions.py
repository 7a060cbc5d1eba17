"""A subset of the tests for one version of torch: ``python -m tests.versions``.

It judges a reference of each kind, a mutant of each section, and torch's own subjects, on two
ranks, and writes the results to ``tests/torch_versions/results/VERSION.json`` as they come. The
page docs/torch-versions.md is made of these files: ``python -m tests.versions --page``. Rules whose
runs take long are left out (``tests/cases.py``).

The exit code is 1 if there is a kit error, a refused reference, or a mutant that is not refused.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conformance.judging.rule import MUST
from conformance.judging.verdict import Verdict
from conformance.rules import book
from conformance.subjects.kinds import KINDS
from conformance.torch_versions.faults import FAULTS
from conformance.torch_versions.startup import missing_parts
from conformance.torch_versions.tested import release
from tests.cases import Case, Judgements, is_costly, judges
from tests.mutants import catalogue

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "torch_versions" / "results"
PAGE = ROOT / "docs" / "torch-versions.md"
WORLDS = (2,)
GROUPS = ("references", "torch's own", "mutants")
RULES = book()
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
    Case(f"{_DDP}.default_hooks:allreduce_hook"),
    Case(f"{_DDP}.default_hooks:fp16_compress_hook", "rounded(float16)"),
    Case("tests.peers:torch_bf16", "rounded(bfloat16)"),
    Case("tests.peers:torch_fp16_wrapped", "rounded(float16)"),
    Case(f"{_DDP}:DDPCommHookType.ALLREDUCE", setup=True),
    Case(f"{_DDP}:DDPCommHookType.FP16_COMPRESS", "rounded(float16)", setup=True),
    Case(
        f"{_DDP}.powerSGD_hook:powerSGD_hook",
        "compressed",
        state=f"{_DDP}.powerSGD_hook:PowerSGDState,matrix_approximation_rank=2,start_powerSGD_iter=2",
    ),
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


def mutants() -> list[tuple[Case, tuple[str, ...], set[str]]]:
    """Return cases, the rules that must refuse them, and those that may.

    They are the first of each section of the book and of each module, of those that neither hang
    nor take long.
    """
    chosen: dict[str, tuple[Case, tuple[str, ...], set[str]]] = {}
    for module, mutant in catalogue():
        rule = RULES[mutant.breaks[0]]
        fits = not (mutant.hangs or mutant.device or is_costly(rule) or 2 not in mutant.worlds)
        if not fits or module.endswith("process"):
            continue
        case = Case(
            f"{module}:{mutant.name}",
            mutant.claims,
            mutant.state,
            mutant.setup,
            WORLDS if 2 in mutant.worlds else mutant.worlds,
            rules=mutant.breaks,
            kind=mutant.kind,
            partly=True,
        )
        entry = (case, mutant.breaks, set(mutant.because))
        chosen.setdefault(module, entry)
        chosen.setdefault(rule.section, entry)
    return list({str(case): (case, breaks, may) for case, breaks, may in chosen.values()}.values())


def _by_its_rules(case: Case) -> Case:
    rules = tuple(
        number
        for number, rule in RULES.items()
        if rule.kind == case.kind and not rule.device and not is_costly(rule) and not rule.probes
    )
    return replace(case, rules=rules, worlds=WORLDS, partly=True)


def is_limit_of_torch(reason: str) -> bool:
    """Whether a rule does not apply because of a fault of this torch."""
    return any(fault.summary in reason for fault in FAULTS)


def result_of(judgements: Judgements) -> dict[str, Any]:
    """Return the verdict on a subject, and the rules that refuse it."""
    must = {n: j for n, j in judgements.items() if RULES[n].level == MUST}
    return {
        "refused by": {
            n: (j.failures[0].actual if j.failures else j.reason)[:200]
            for n, j in must.items()
            if j.verdict is Verdict.FAIL
        },
        "kit errors": {
            n: j.reason[:300] for n, j in judgements.items() if j.verdict is Verdict.KIT_ERROR
        },
        "not applicable for torch": {
            n: j.reason
            for n, j in must.items()
            if j.verdict is Verdict.NOT_APPLICABLE and is_limit_of_torch(j.reason)
        },
        "passed": sum(j.verdict is Verdict.PASS for j in must.values()),
    }


def run(groups: Iterable[str], file: Path) -> dict[str, Any]:
    """Judge the subset; write each result as it comes, and return all results of the file.

    Args:
        groups: the groups to judge; the file keeps the results of the others.
        file: of this version.
    """
    began = time.monotonic()
    chosen = {str(case): (case, breaks, may) for case, breaks, may in mutants()}
    cases: dict[str, list[Case]] = {
        "references": [_by_its_rules(case) for case in REFERENCES],
        "torch's own": [_by_its_rules(case) for case in TORCHS],
        "mutants": [case for case, *_ in chosen.values()],
    }
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    found |= {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "missing private names": missing_parts(torch.__version__),
        "world sizes": list(WORLDS),
    }
    with judges() as judged:
        futures = {
            (group, str(case)): judged(case)
            for group, members in cases.items()
            if group in groups
            for case in members
        }
        for (group, name), future in futures.items():
            try:
                entry = result_of(future.result())
            except Exception as error:
                entry = {"error": f"{type(error).__name__}: {error}"}
            if group == "mutants":
                _, breaks, may = chosen[name]
                by = set(entry.get("refused by", ()))
                entry["as elsewhere"] = set(breaks) <= by <= set(breaks) | may
            found.setdefault(group, {})[name] = entry
            found["seconds"] = round(time.monotonic() - began)
            file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
            print(f"{group}: {name}: {cell(entry)}", flush=True)
    return found


def wrong_in(result: Mapping[str, Any]) -> list[str]:
    """Return what is wrong in the results of a version."""
    wrong = []
    for group in GROUPS:
        for name, entry in result.get(group, {}).items():
            refused = bool(entry.get("refused by"))
            if "error" in entry or entry["kit errors"] or (group == "references" and refused):
                wrong.append(f"{name}: {cell(entry)}")
            elif group == "mutants" and not refused:
                wrong.append(f"{name}: not refused")
    return wrong


def cell(entry: Mapping[str, Any]) -> str:
    """Return the verdict on a subject in a few words."""
    if "error" in entry:
        return f"not judged: {entry['error']}"
    if entry["kit errors"]:
        return "kit error: " + ", ".join(entry["kit errors"])
    if entry["refused by"]:
        return "refused by " + ", ".join(entry["refused by"])
    limits = entry["not applicable for torch"]
    return f"holds, without {', '.join(limits)}" if limits else "holds"


def main() -> int:
    """Judge the subset on this torch, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--page", action="store_true", help="write docs/torch-versions.md")
    parser.add_argument(
        "--only",
        choices=GROUPS,
        action="append",
        help="judge this group alone; the file keeps the other groups",
    )
    options = parser.parse_args()
    if options.page:
        from tests.versions_page import page

        PAGE.write_text(page())
        return 0
    groups = options.only or GROUPS
    version = torch.__version__.partition("+")[0]
    python = ".".join(platform.python_version_tuple()[:2])
    file = RESULTS / (f"{version}.json" if python == "3.11" else f"{version}-python{python}.json")
    RESULTS.mkdir(exist_ok=True)
    result = run(groups, file)
    wrong = wrong_in(result)
    for line in wrong:
        print(f"WRONG {line}")
    print(f"torch {torch.__version__}, release {release(torch.__version__)}: {result['seconds']} s")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
