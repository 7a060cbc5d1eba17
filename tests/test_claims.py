import pytest

from conformance.claims import Claims, parse_claims
from conformance.errors import UsageError


@pytest.mark.parametrize(
    ("text", "claims"),
    [
        ("exact", Claims()),
        ("rounded(float16)", Claims(rounded="float16")),
        ("rounded(torch.bfloat16)", Claims(rounded="bfloat16")),
        ("rounded('float16')", Claims(rounded="float16")),
        ("sum", Claims(sum=True)),
        ("exact, world_only", Claims(world_only=True)),
        (" sum , rounded(float16), world_only ", Claims("float16", True, True)),
    ],
)
def test_parses(text: str, claims: Claims) -> None:
    assert parse_claims(text) == claims


@pytest.mark.parametrize("claims", [Claims(), Claims("float16"), Claims(None, True, True), Claims("bfloat16", True, True)])
def test_its_text_parses_to_itself(claims: Claims) -> None:
    assert parse_claims(str(claims)) == claims


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
        ("compressed(ratio=2)", "cannot read"),
        ("local", "not judged by this version"),
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
