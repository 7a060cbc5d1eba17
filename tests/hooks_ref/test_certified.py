"""The references are certified by the commands of their README, and torch's own hooks as
third-party subjects."""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import hooks_ref
from conformance.judging.rule import AT_SCALE, Rule
from conformance.rules import book
from conformance.subjects.claims import LOCAL, parse_claims
from conformance.subjects.kinds import HOOK, KINDS
from tests.cases import Case, Judgements, affordable, by_a_part, in_turns, refusals
from tests.right import ARITHMETIC, COMPRESSORS, OBJECTS
from tests.torch_marks import OWN_HOOKS_ARE_REFUSED

README = Path(hooks_ref.__file__).parent / "README.md"


def case(options: str) -> Case:
    """Read the options of a command line; choose fewer world sizes than the soak."""
    words = shlex.split(options)
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given.keys() <= {
        "--hook",
        "--setup",
        "--state",
        "--claims",
        *(f"--{kind}" for kind in KINDS),
    }, options
    if kind := next((kind for kind in KINDS if kind != HOOK and f"--{kind}" in given), ""):
        worlds = (2, 4) if "{2: 2, 4: 4}" in options else (1, 2)
        return Case(given[f"--{kind}"], given.get("--claims", "exact"), worlds=worlds, kind=kind)
    target = given.get("--hook") or given["--setup"]
    claims = given.get("--claims", "exact")
    read = parse_claims(claims)
    worlds = (1, 2)
    if read.lossy == LOCAL:
        worlds = (2, 3)
    return Case(target, claims, given.get("--state"), setup="--setup" in given, worlds=worlds)


def ours() -> Iterator[Case]:
    """Yield the commands of the README.

    If a lossy hook repeats the claim of an earlier one with another compressor, or setting, only
    the rules on compressors and their state judge it. Only the rules on arithmetic judge hooks that
    round to bfloat16, and only those on results judge a fused hook over another inner hook. With
    --thorough all rules do.
    """
    seen = set[tuple[str, str]]()
    for options in re.findall(r"^\|.*\| `(--\w+ .*)` \|$", README.read_text(), re.M):
        made = case(options)
        frame = (
            _SIBLINGS.get(made.target, made.target),
            parse_claims(made.claims).lossy if made.kind == HOOK else "",
        )
        if "bfloat16" in made.claims:
            made = replace(made, rules=of_sections(*ARITHMETIC, "10"))
        elif made.target.endswith(":adagrad_out_of_place"):
            made = replace(made, rules=of_sections("1", "2", "10", "13"))
        elif frame in seen and frame[1]:
            made = replace(made, rules=of_sections(*COMPRESSORS, "11"))
        yield made
        seen.add(frame)


def of_sections(*sections: str) -> tuple[str, ...]:
    return tuple(number for number, rule in book(HOOK, "cpu").items() if rule.section in sections)


_SIBLINGS = {
    "hooks_ref:batched_powerSGD_hook": "hooks_ref:powerSGD_hook",
    "hooks_ref:quantization_perchannel_hook": "hooks_ref:quantization_pertensor_hook",
}
OURS = list(ours())
# torch's own, as third-party subjects, at an odd size too. DDP refuses any hook named
# bf16_compress_hook on CPU, so that torch's gets another name.
TORCHS = [
    Case("torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook"),
    Case(
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:fp16_compress_hook",
        "rounded(float16)",
    ),
    Case("tests.peers:torch_bf16", "rounded(bfloat16)"),
    Case("tests.peers:torch_fp16_wrapped", "rounded(float16)"),
    Case("tests.peers:torch_bf16_wrapped", "rounded(bfloat16)"),
    Case("torch.distributed.algorithms.ddp_comm_hooks:DDPCommHookType.ALLREDUCE", setup=True),
]
# Compressors that lose nothing: exact, by the way that a compressed step takes.
LOSSLESS = [
    Case("hooks_ref:compression_hook", state=f"examples.states:{name}")
    for name in ("everything", "everything_at_random")
]
# Feedback to the roundings of a sum, of messages in other dtypes than the claimed one.
FED_BACK = [
    Case(f"hooks_ref:auto_quantize,{options},error_feedback=True", worlds=(2, 3), kind="collective")
    for options in (
        *("func=all_reduce,qtype=FP16", "func=all_reduce,qtype=BFP16"),
        "func=reduce_scatter,qtype=FP16",
    )
]
CASES = [
    *OURS,
    *FED_BACK,
    *(replace(case, worlds=(1, 3)) for case in TORCHS[:2]),
    *(replace(case, worlds=(1, 2), rules=of_sections(*ARITHMETIC)) for case in TORCHS[2:5]),
    replace(TORCHS[5], worlds=(1, 2), rules=of_sections(*OBJECTS)),
    replace(LOSSLESS[1], worlds=(1, 2)),
    # Not at scale: each of a thousand simulated ranks would decode the data of all ranks.
    replace(
        LOSSLESS[0],
        worlds=(1, 2),
        rules=of_sections(*{rule.section for rule in book(HOOK, "cpu").values()} - {AT_SCALE}),
    ),
]


# By a part of the rules each. By the whole book at all world sizes, test_ci.py certifies the
# reference of hooks.
CASES = [
    case if case.rules else by_a_part(case, affordable(book(case.kind, "cpu"), turn))
    for turn, case in enumerate(CASES)
]


@pytest.mark.parametrize("case", in_turns(CASES[1:], 60), ids=str)
def test_is_certified(
    judgements_of: Callable[[Case], Judgements], rules: dict[str, Rule], case: Case
) -> None:
    refused = refusals(judgements_of(case), rules)
    if case.target in {one.target for one in TORCHS}:
        refused = {n: why for n, why in refused.items() if n not in OWN_HOOKS_ARE_REFUSED}
    assert refused == {}, "\n".join(f"{number}: {why}" for number, why in refused.items())


@pytest.mark.parametrize(
    "case",
    in_turns([replace(case, rules=("10.1",)) for case in OURS if case.kind == "hook"], 6),
    ids=str,
)
def test_waits_for_nothing_inside_the_hook(
    judgements_of: Callable[[Case], Judgements], case: Case
) -> None:
    assert judgements_of(case)["10.1"].verdict.holds, judgements_of(case)["10.1"].reason


@pytest.mark.parametrize(
    "case", [Case("hooks_ref:noop_hook", worlds=(2,), rules=("2.1",))], ids=str
)
def test_noop_is_refused_as_what_it_is(
    judgements_of: Callable[[Case], Judgements], case: Case
) -> None:
    assert "nothing was communicated" in judgements_of(case)["2.1"].failures[0].cause


@pytest.mark.parametrize(
    "case",
    [
        Case(
            "examples.setups:zero_after_backward",
            "fused(SGD, lr=0.1, after=2), dtypes(float32)",
            setup=True,
            worlds=(2, 3),
            rules=("13.6",),
        )
    ],
    ids=str,
)
def test_a_fused_hook_may_refuse_ranks_without_inputs(
    judgements_of: Callable[[Case], Judgements], case: Case
) -> None:
    """It raises an exception under find_unused_parameters, too."""
    assert judgements_of(case)["13.6"].verdict.holds, judgements_of(case)["13.6"].reason


def test_every_hook_has_a_command() -> None:
    """Every hook, compressor and factory of hooks has a command in the README."""
    named = set(re.findall(r"^\| `(\w+)` \| `--", README.read_text(), re.M))
    hooks = {
        name
        for name in hooks_ref.__all__
        if name.endswith(("_hook", "_wrapper", "_step", "_interleaved", "_optimizer"))
    }
    compressors = {"TopK", "RandomK", "ScaledSign", "OneBit", "QSGD", "TernGrad"}
    of_modules = {"checkpoint_wrapper", "offload_wrapper"}
    assert hooks - {"noop_hook", "compression_hook"} - of_modules | compressors <= named
