import pytest

from conformance.errors import UsageError
from conformance.subjects.claims import Claims, parse_claims


@pytest.mark.parametrize(
    ("text", "claims"),
    [
        ("exact", Claims()),
        ("rounded(float16)", Claims(rounded="float16")),
        ("rounded(torch.bfloat16)", Claims(rounded="bfloat16")),
        ("rounded('float16')", Claims(rounded="float16")),
        ("sum", Claims(sum=True)),
        ("exact, world_only", Claims(world_only=True)),
        ("compressed, warmup(2)", Claims(lossy="feedback", warmup=2)),
        ("compressed(feedback=ef21, delta=0.25)", Claims(lossy="difference", delta=0.25)),
        ("compressed(delta=0.99, feedback=False), world_only", Claims(lossy="contraction", delta=0.99, world_only=True)),
        ("unbiased", Claims(lossy="unbiased")),
        ("dtypes(float32, torch.float64)", Claims(dtypes=("float32", "float64"))),
        ("unbiased(ratio=0.3)", Claims(lossy="unbiased", ratio=0.3)),
        ("poststep(call=flush), chained", Claims(poststep=True, call="flush", chained=True)),
        ("local, warmup(4)", Claims(lossy="local", warmup=4)),
        ("fused(optim.SGD, lr=0.1, momentum=0.9, after=2)", Claims(fused="SGD(lr=0.1, momentum=0.9)", after=2)),
        ("rounded(float16), fused(Adam, betas=(0.8, 0.9))", Claims("float16", fused="Adam(betas=(0.8, 0.9))")),
        ("fused(SGD, lr=0.1, frees_gradients=True)", Claims(fused="SGD(lr=0.1)", frees_gradients=True)),
        (" sum , rounded(float16), world_only ", Claims("float16", True, True)),
    ],
)
def test_parses(text: str, claims: Claims) -> None:
    assert parse_claims(text) == claims


@pytest.mark.parametrize(
    "text",
    [
        *("exact", "rounded(float16)", "sum, world_only", "rounded(bfloat16), sum, world_only", "compressed", "compressed(delta=0.25)"),
        *(
            "compressed(ratio=0.5)",
            "local(ratio=0)",
            "compressed(feedback=ef21), warmup(3)",
            "compressed(feedback=False, delta=0.5), world_only",
            "local",
            "unbiased, warmup(2)",
            "rounded(float16, ratio=0.5), sum",
            "compressed, like(TopK, ratio=0.25, memory='ef21')",
        ),
        *(
            "exact, fused(SGD), dtypes(float32), world_only",
            "exact, fused(SGD)",
            "rounded(float16), poststep(call=flush), chained, world_only",
            "exact, poststep",
            "exact, min_world_size(2), dtypes(float32), backends(gloo, nccl), devices(cpu)",
            "exact, fused(SGD, lr=0.1, after=2)",
            "exact, fused(SGD, lr=0.1, after=2, frees_gradients=True)",
            "compressed, fused(Adam, betas=(0.8, 0.9))",
        ),
    ],
)
def test_its_text_parses_to_itself(text: str) -> None:
    assert str(parse_claims(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exakt", "'exakt' is not a claim; known: exact"),
        ("rounded", "rounded takes one dtype"),
        ("rounded(int8)", "rounded takes one dtype"),
        ("sum(2)", "'sum' takes no arguments"),
        ("sum, sum", "'sum' is given twice"),
        ("exact, sum", "contradicts itself"),
        ("exact, rounded(float16)", "contradicts itself"),
        ("compressed(ratio=2)", "a number from 0 to 1"),
        ("rounded(float16, ratio=2)", "a number from 0 to 1"),
        ("like(powerSGD_hook)", "like says which lossy result"),
        ("compressed, like(power_sgd)", "like takes a reference of hooks_ref"),
        ("compressed, like(TopK, OneBit)", "like takes a reference of hooks_ref"),
        ("compressed(0.5)", "compressed takes feedback="),
        ("local(2)", "local takes ratio="),
        ("compressed(feedback=False)", "needs delta="),
        ("compressed(delta=0)", "a number from 0.01 to 1"),
        ("compressed(feedback=often)", "compressed takes feedback="),
        ("compressed, local", "contradicts itself"),
        ("compressed, sum", "contradicts itself"),
        ("exact, unbiased", "contradicts itself"),
        ("warmup(3)", "there is none"),
        ("compressed, warmup(0)", "from 1 to 50"),
        ("compressed, warmup(1000)", "from 1 to 50"),
        ("dtypes(int8)", "dtypes takes float32"),
        ("dtypes(float64)", "dtypes takes float32"),
        ("fused", "the name of an optimizer"),
        ("fused(LBFGS)", "the name of an optimizer"),
        ("fused(SGD, after=9)", "from 0 to 4"),
        ("fused(SGD, frees_gradients=1)", "is True or False"),
        ("fused(SGD, lr=[x for x in y])", "cannot read"),
        ("compressed(**x)", "cannot read"),
        ("chained(2)", "takes no arguments"),
        ("min_world_size(1)", "from 2 to 4"),
        ("min_world_size", "from 2 to 4"),
        ("backends", "backends takes names"),
        ("devices(cuda, cuda)", "devices takes names"),
        ("poststep(flush)", "poststep takes call="),
        ("poststep(call=3)", "poststep takes call="),
        ("poststep, fused(SGD)", "contradicts itself"),
        ("rounded(float16", "cannot read"),
        ("__import__('os')", "is not a claim"),
        ("", "cannot read"),
    ],
)
def test_refuses_in_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_claims(text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
