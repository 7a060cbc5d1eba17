import random
import re
from collections.abc import Callable
from dataclasses import fields

import expecttest
import pytest

from conformance.errors import UsageError
from conformance.judging.rule import Rule
from conformance.session.options import Options
from conformance.subjects.claims import (
    Claims,
    claims_help,
    claims_table,
    default_claims,
    parse_claims,
)
from conformance.subjects.kinds import HOOK, KINDS, Claim, Form
from conformance.subjects.kinds.hook import REFERENCES
from conformance.subjects.references import SEEDS, claimed_references
from conformance.subjects.spec import SubjectSpec, reference_of
from tests import ROOT

PAGE = ROOT / "docs" / "your-hook.md"
FORMS = [
    pytest.param(kind.name, claim, form, id=f"{kind.name}-{form.text}")
    for kind in KINDS.values()
    for claim in kind.claims.values()
    for form in claim.forms
]


# ---- Parsing and writing


@pytest.mark.parametrize(
    ("text", "claims"),
    [
        ("exact", Claims()),
        ("rounded(float16)", Claims(rounded="float16")),
        ("rounded(torch.bfloat16)", Claims(rounded="bfloat16")),
        ("rounded('float16')", Claims(rounded="float16")),
        ("sum", Claims(sum=True)),
        ("exact, world_only", Claims(world_only=True)),
        ("exact,", Claims()),
        ("(sum,\n world_only)", Claims(sum=True, world_only=True)),
        ("compressed, warmup(2)", Claims(lossy="feedback", warmup=2)),
        ("compressed(feedback='ef21', delta=0.25)", Claims(lossy="difference", delta=0.25)),
        ("compressed(feedback=ef21, delta=0.25)", Claims(lossy="difference", delta=0.25)),
        (
            "compressed(delta=0.99, feedback=False), world_only",
            Claims(lossy="contraction", delta=0.99, world_only=True),
        ),
        ("unbiased", Claims(lossy="unbiased")),
        ("dtypes(float32, torch.float64)", Claims(dtypes=("float32", "float64"))),
        ("unbiased(ratio=0.3)", Claims(lossy="unbiased", ratio=0.3)),
        ("poststep(call=flush), chained", Claims(poststep=True, call="flush", chained=True)),
        ("local, warmup(4)", Claims(lossy="local", warmup=4)),
        (
            "unbiased, warmup(4, rounded=float16)",
            Claims(lossy="unbiased", warmup=4, warmup_rounded="float16"),
        ),
        (
            "fused(optim.SGD, lr=0.1, momentum=0.9, after=2)",
            Claims(fused="SGD(lr=0.1, momentum=0.9)", after=2),
        ),
        (
            "rounded(float16), fused(Adam, betas=(0.8, 0.9))",
            Claims("float16", fused="Adam(betas=(0.8, 0.9))"),
        ),
        (
            "fused(SGD, lr=0.1, frees_gradients=True)",
            Claims(fused="SGD(lr=0.1)", frees_gradients=True),
        ),
        (" sum , rounded(float16), world_only ", Claims("float16", sum=True, world_only=True)),
        (
            "compressed, like(TopK, memory='a, (b', ratio=0.25)",
            Claims(lossy="feedback", like="TopK,memory='a, (b',ratio=0.25"),
        ),
    ],
)
def test_parses(text: str, claims: Claims) -> None:
    assert parse_claims(text) == claims


@pytest.mark.parametrize(
    "text",
    [
        "exact",
        "rounded(float16)",
        "sum, world_only",
        "rounded(bfloat16), sum, world_only",
        "compressed",
        "compressed(delta=0.25)",
        "compressed(ratio=0.5)",
        "local(ratio=0)",
        "compressed(feedback=ef21), warmup(3)",
        "compressed, warmup(300, rounded=bfloat16)",
        "compressed(feedback=False, delta=0.5), world_only",
        "compressed(feedback=False, delta=0.9999, ratio=0.2505)",
        "compressed(delta=0.9999999)",
        "local",
        "unbiased, warmup(2)",
        "rounded(float16, ratio=0.5), sum",
        "compressed, like(TopK, ratio=0.25, memory='ef21')",
        "exact, fused(SGD), dtypes(float32), world_only",
        "exact, fused(SGD)",
        "rounded(float16), poststep(call=flush), chained, world_only",
        "exact, poststep",
        "exact, min_world_size(2), dtypes(float32), backends(gloo, nccl), devices(cpu)",
        "exact, fused(SGD, lr=0.1, after=2)",
        "exact, fused(SGD, lr=0.1, weight_decay=0.01, no_decay='vectors')",
        "exact, fused(SGD, lr=0.1, after=2, frees_gradients=True)",
        "compressed, fused(Adam, betas=(0.8, 0.9))",
    ],
)
def test_the_text_of_claims_parses_to_itself(text: str) -> None:
    """Certificates hold these texts, and are compared by them."""
    assert str(parse_claims(text)) == text


@pytest.mark.parametrize(
    ("kind", "typed", "text"),
    [
        (HOOK, "checkpointable, world_only, sum", "sum, world_only, checkpointable"),
        (HOOK, "warmup(2), local(ratio=0.50)", "local(ratio=0.5), warmup(2)"),
        ("averager", "periodic(period=4)", "periodic(period=4, warmup_steps=0)"),
        (
            "averager",
            "min_world_size(2), like(DiLoCoModelAverager, period=4, outer='a')",
            "like(DiLoCoModelAverager, period=4, outer='a'), min_world_size(2)",
        ),
        ("strategy", "find_unused, min_world_size(3)", "find_unused, min_world_size(3)"),
        ("joinable", "min_world_size(2)", "min_world_size(2)"),
        ("joinable", "what every joinable is", "what every joinable is"),
        (
            "collective",
            "divided(2), blocks(int8), collective(scatter)",
            "divided(loss=2.0), blocks(int8, size=128), collective(scatter)",
        ),
        (
            "collective",
            "collective(scatter), bounded(block=8, relative=0.5), dimensions(2)",
            "collective(scatter), bounded(relative=0.5, ratio=1.0, block=8), dimensions(2)",
        ),
        ("wrapper", "reentrant, recomputes", "reentrant, recomputes"),
    ],
)
def test_the_text_of_claims(kind: str, typed: str, text: str) -> None:
    assert str(parse_claims(typed, kind)) == text
    assert parse_claims(text, kind) == parse_claims(typed, kind)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exakt", "'exakt' is not a claim of a hook; did you mean exact? docs/your-hook.md"),
        ("compresed", "'compresed' is not a claim of a hook; did you mean compressed? "),
        ("rounded", "rounded takes one dtype, and ratio= if bytes are limited: rounded(float16), "),
        ("rounded(int8)", "rounded takes float16 or bfloat16, not int8"),
        ("sum(2)", "sum takes no arguments"),
        ("sum, sum", "'sum' is given twice"),
        ("exact, sum", "exact contradicts sum"),
        ("exact, rounded(float16)", "exact contradicts rounded"),
        ("compressed(ratio=2)", "compressed takes ratio=, a number from 0 to 1; got 2"),
        ("rounded(float16, ratio=2)", "rounded takes ratio=, a number from 0 to 1; got 2"),
        ("like(powerSGD_hook)", "like needs a lossy claim"),
        ("compressed, like(power_sgd)", "like takes a reference of hooks_ref"),
        ("compressed, like(TopK, OneBit)", "like takes a reference of hooks_ref"),
        ("compressed(0.5)", "compressed takes feedback="),
        ("local(2)", "local takes ratio="),
        ("compressed(feedback=False)", "compressed needs delta="),
        ("compressed(delta=0)", "compressed takes delta=, a number from 0.01 to 1; got 0"),
        ("compressed(feedback=often)", "compressed takes feedback="),
        ("compressed(feedback=[1])", "compressed takes feedback="),
        ("compressed, local", "compressed contradicts local"),
        ("compressed, sum", "compressed contradicts sum"),
        ("exact, unbiased", "exact contradicts unbiased"),
        ("warmup(3)", "warmup needs a lossy claim"),
        ("compressed, warmup(0)", "from 1 to 2000"),
        ("compressed, warmup(2, rounded=float32)", "takes rounded=, float16 or bfloat16"),
        ("compressed, warmup(2001)", "from 1 to 2000"),
        ("compressed, warmup(51), fused(SGD, lr=0.1)", "at most 50 steps"),
        ("dtypes(int8)", "dtypes takes float32"),
        ("dtypes(float64)", "dtypes takes float32"),
        ("fused", "the name of an optimizer"),
        ("fused(LBFGS)", "the name of an optimizer"),
        ("fused(SGD, after=9)", "from 0 to 4"),
        ("fused(SGD, frees_gradients=1)", "is True or False"),
        ("unbiased(ranks=1)", "takes ranks=1 beside noise="),
        ("unbiased(noise=0.5, ranks=2)", "takes ranks=1 beside noise="),
        ("fused(AdamW, weight_decay=0.1, no_decay=biases)", "takes no_decay=vectors"),
        ("fused(AdamW, no_decay=vectors)", "needs weight_decay= beside no_decay=vectors"),
        ("fused(SGD, lr=0.1, lr=0.2)", "fused takes lr= once"),
        ("fused(SGD, lambda=0.1)", "fused cannot take lambda=: it is a keyword"),
        ("fused(SGD, lr=[x for x in y])", "fused cannot read '[x for x in y]': type a number"),
        ("compressed(**x)", "compressed cannot read '**x'"),
        ("chained(2)", "takes no arguments"),
        ("min_world_size(1)", "from 2 to 4"),
        ("min_world_size", "from 2 to 4"),
        ("backends", "backends takes names: backends(gloo, nccl)"),
        ("devices(cuda, cuda)", "devices takes names: devices(cpu, cuda)"),
        ("poststep(flush)", "poststep takes call="),
        ("poststep(call=3)", "poststep takes call="),
        ("poststep, fused(SGD)", "poststep contradicts fused"),
        ("rounded(float16", "cannot read 'rounded(float16'; type claims with commas between them"),
        ("exact; sum", "cannot read"),
        ("exact,, sum", "cannot read"),
        ("__import__('os')", "is not a claim of a hook"),
        ("what every hook is", "cannot read"),
        ("", "cannot read"),
    ],
)
def test_refuses_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_claims(text)
    assert str(error.value).startswith("--claims: ")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


# ---- The tables of claims, and the texts derived from them


@pytest.mark.parametrize(("kind", "claim", "form"), FORMS)
def test_every_form_in_a_table_can_be_typed(kind: str, claim: Claim, form: Form) -> None:
    companions = {
        HOOK: ""
        if claim.name in ("exact", "rounded", "sum", "scaled", "unbiased", "local")
        else "compressed",
        "collective": "collective(scatter), rounded(float16)",
    }
    others = [text for text in companions.get(kind, "").split(", ") if text]
    taken = {"rounded", "blocks", "bounded"} if claim.name in ("blocks", "bounded") else set()
    beside = [text for text in others if text.partition("(")[0] not in {claim.name, *taken}]
    text = ", ".join([form.text, *beside])
    assert parse_claims(text, kind).has(claim.name) or claim.name in ("exact", *LOSSY)
    assert form.meaning.endswith(".")


LOSSY = ("compressed", "unbiased", "local")


def test_tables_name_the_rules_that_hold_subjects_to_claims(rules: dict[str, Rule]) -> None:
    for kind in KINDS.values():
        forms = [form for claim in kind.claims.values() for form in claim.forms]
        numbers = {n for form in forms for n in re.findall(r"\d+\.\d+", form.judged_by or "")}
        assert {rules[number].kind for number in numbers} <= {kind.name}
        needed = {n for n, rule in rules.items() if rule.claimed and rule.kind == kind.name}
        assert needed <= numbers, kind.name


@pytest.mark.parametrize("kind", KINDS)
def test_errors_list_all_claims_of_the_kind(kind: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_claims("foo", kind)
    page = "docs/your-hook.md" if kind == "hook" else "docs/other-kinds.md"
    assert str(error.value) == (
        f"--claims: 'foo' is not a claim of {KINDS[kind].with_article}; known: "
        f"{', '.join(KINDS[kind].claims)}. {page} has their arguments"
    )
    with pytest.raises(UsageError) as error:
        parse_claims(",", kind)
    assert str(error.value) == (
        "--claims: cannot read ','; type claims with commas between them; known: "
        f"{', '.join(KINDS[kind].claims)}. {page} has their arguments"
    )


def test_the_help_names_all_claims() -> None:
    option = next(option for option in fields(Options) if option.name == "claims")
    assert option.metadata["help"] == claims_help()
    for kind in KINDS.values():
        for claim in kind.claims.values():
            assert claim.forms[0].text in claims_help()
    assert claims_help().count("min_world_size") == 1, "it is a claim of every kind"


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_has_a_row_for_every_form(kind: str) -> None:
    header, line, *rows = claims_table(kind).splitlines()
    forms = [form for claim in KINDS[kind].claims.values() for form in claim.forms]
    assert len(rows) == len(forms)
    for row, form in zip(rows, forms, strict=True):
        assert row == f"| `{form.text}` | {form.meaning} | {form.judged_by or '-'} |"
    assert {header.count("|"), line.count("|")} == {4}


def test_the_table_in_the_page_is_the_table_of_hooks() -> None:
    """EXPECTTEST_ACCEPT=1 writes it."""
    text = PAGE.read_text()
    begin, rest = text.split("<!-- claims of hooks -->\n", 1)
    current, end = rest.split("<!-- end of claims -->\n", 1)
    table = claims_table(HOOK)
    if expecttest.ACCEPT and current != table:
        PAGE.write_text(f"{begin}<!-- claims of hooks -->\n{table}<!-- end of claims -->\n{end}")
        current = table
    assert current == table


# ---- Random claims

Arguments = Callable[[random.Random], list[str]]


def _some(rng: random.Random, *arguments: str) -> list[str]:
    """Return some of the arguments, in any order."""
    return rng.sample(arguments, rng.randint(0, len(arguments)))


def _ratio(rng: random.Random) -> str:
    return f"ratio={rng.choice([0, 1, 0.5, 0.039, rng.random()])}"


def _names(rng: random.Random, *names: str) -> list[str]:
    return rng.sample(names, rng.randint(1, len(names)))


def _options(rng: random.Random) -> list[str]:
    values = ["0.1", "1e-05", "-3", "True", "None", "word", "'a, b'", "(1, 2)", "{1: [2, 'x=y']}"]
    return [f"{name}={rng.choice(values)}" for name in _some(rng, "lr", "betas", "rank")]


def _compressed(rng: random.Random) -> list[str]:
    feedback = rng.choice(["True", "ef21", "False"])
    delta = f"delta={rng.choice([1, 0.01, 0.25, rng.uniform(0.01, 1)])}"
    if feedback == "False":
        return [f"feedback={feedback}", delta, *_some(rng, _ratio(rng))]
    return _some(rng, f"feedback={feedback}", delta, _ratio(rng))


def _nothing(rng: random.Random) -> list[str]:
    return []


RANDOM_ARGUMENTS: dict[str, dict[str, Arguments]] = {
    HOOK: {
        "exact": _nothing,
        "rounded": lambda rng: [rng.choice(["float16", "bfloat16"]), *_some(rng, _ratio(rng))],
        "sum": _nothing,
        "compressed": _compressed,
        "unbiased": lambda rng: _some(rng, _ratio(rng)),
        "local": lambda rng: _some(
            rng, rng.choice([_ratio(rng), f"period={rng.randint(2, 8)}", "mixing=False"])
        ),
        "scaled": _nothing,
        "keeps_unused": _nothing,
        "rescaled": lambda rng: ["call=rescale"],
        "warmup": lambda rng: [str(rng.randint(1, 50)), *_some(rng, "rounded=bfloat16")],
        "fused": lambda rng: [
            rng.choice(["SGD", "optim.Adam"]),
            *_options(rng),
            *_some(rng, f"after={rng.randint(0, 4)}", f"frees_gradients={rng.random() < 0.5}"),
        ],
        "like": lambda rng: [rng.choice([*REFERENCES]), *_options(rng)],
        "min_world_size": lambda rng: [str(rng.randint(2, 4))],
        "dtypes": lambda rng: ["float32", *_some(rng, "float64", "float16", "complex64")],
        "backends": lambda rng: _names(rng, "gloo", "nccl", "xccl"),
        "devices": lambda rng: _names(rng, "cpu", "cuda"),
        "poststep": lambda rng: _some(rng, "call=flush"),
        "chained": _nothing,
        "world_only": _nothing,
        "checkpointable": _nothing,
    },
    "averager": {
        "periodic": lambda rng: [f"period={rng.randint(1, 9)}", *_some(rng, "warmup_steps=10")],
        "hierarchical": lambda rng: [
            f"period_group_size_dict={rng.choice(['{2: 2, 4: 4}', '{1: 3}'])}",
            *_some(rng, "warmup_steps=0"),
        ],
        "like": lambda rng: ["DiLoCoModelAverager", *_options(rng)],
        "world_only": _nothing,
    },
    "optimizer": {"averages": _nothing, "world_only": _nothing},
    "strategy": {
        "find_unused": _nothing,
        "all_used": _nothing,
        "world_only": _nothing,
        "counts": lambda rng: [str(rng.randint(2, 4))],
    },
    "joinable": {},
    "collective": {
        "collective": lambda rng: [rng.choice(["all_gather", "scatter"])],
        "rounded": lambda rng: [rng.choice(["float16", "bfloat16"])],
        "blocks": lambda rng: [rng.choice(["int8", "float8_e5m2"]), *_some(rng, "size=64")],
        "bounded": lambda rng: [
            f"relative={1 - rng.random()}",
            *_some(rng, f"ratio={1 - rng.random()}", f"block={rng.randint(1, 300)}"),
        ],
        "divided": lambda rng: [f"{rng.choice(['', 'loss='])}{rng.choice([2, -0.5, 1e-9])}"],
        "feedback": _nothing,
        "dimensions": lambda rng: [str(rng.randint(1, 2))],
    },
    "wrapper": {"recomputes": _nothing, "reentrant": _nothing, "draws_anew": _nothing},
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_claims_parse_to_themselves(kind: str) -> None:
    arguments = {"min_world_size": RANDOM_ARGUMENTS[HOOK]["min_world_size"]}
    arguments |= RANDOM_ARGUMENTS[kind]
    assert arguments.keys() == KINDS[kind].claims.keys()
    rng = random.Random(kind)
    parsed = 0
    while parsed < 300:
        chosen = rng.sample([*arguments], rng.randint(1, min(4, len(arguments))))
        if KINDS[kind].contradiction({name: {} for name in chosen}):
            continue
        text = ", ".join(f"{name}({', '.join(arguments[name](rng))})" for name in chosen)
        claims = parse_claims(text, kind)
        assert parse_claims(str(claims), kind) == claims, text
        assert str(parse_claims(str(claims), kind)) == str(claims), text
        parsed += 1


# ---- References


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_of_a_kind_has_claims(kind: str) -> None:
    reference = reference_of(kind)
    assert reference.kind == kind
    claims = default_claims(kind, reference.arguments)
    assert parse_claims(str(claims), kind) == claims


def test_references_that_subjects_claim_to_be_like() -> None:
    state = "conformance.subjects.references:state,reference="

    def references(text: str, kind: str = HOOK) -> list[SubjectSpec]:
        return claimed_references(parse_claims(text, kind))

    power = references("compressed, like(powerSGD_hook, matrix_approximation_rank=2)")
    assert power == [
        SubjectSpec(
            "hooks_ref:powerSGD_hook",
            f"{state}'powerSGD_hook',matrix_approximation_rank=2,random_seed={seed}",
        )
        for seed in SEEDS
    ]
    assert references("compressed, like(TopK, ratio=0.25, memory=ef21)") == [
        SubjectSpec("hooks_ref:compression_hook", f"{state}'TopK',ratio=0.25,memory='ef21'")
    ]
    assert references("compressed, like(quantization_pertensor_hook)") == [
        SubjectSpec("hooks_ref:quantization_pertensor_hook")
    ]
    assert references("like(DiLoCoModelAverager, period=4)", "averager") == [
        SubjectSpec(kind="averager", target="hooks_ref:DiLoCoModelAverager,period=4")
    ]


def test_a_long_warm_up_is_on_record_in_its_last_steps_only() -> None:
    short = parse_claims("compressed, warmup(50)")
    assert (short.warmup, short.long_warmup, short.steps_of_warmup) == (50, 0, 50)
    long = parse_claims("compressed, warmup(1000)")
    assert (long.warmup, long.long_warmup, long.steps_of_warmup) == (8, 1000, 1000)
    assert str(long) == "compressed, warmup(1000)"
    assert parse_claims(str(long)) == long
