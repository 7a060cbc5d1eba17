import pytest

from conformance.errors import UsageError
from conformance.subjects.arguments import Argument, parse_arguments, split_at_commas
from conformance.subjects.kinds import HOOK, KINDS
from conformance.subjects.spec import (
    REFERENCE,
    SubjectSpec,
    make_spec,
    parse_other,
    parse_subject,
    reference_of,
)
from conformance.subjects.target import parse_target, write_target


def test_parses_a_target() -> None:
    text = (
        "mypkg.hooks:Class.method,rank=2,name=plain,path=/tmp/x y,shape=(1, 2),text='a,b',rank=3,"
        r"quoted='it\'s, it',kind=Kind.SOME,none=None,empty="
    )
    target = parse_target(text, "--hook")
    assert (target.module, target.attribute) == ("mypkg.hooks", "Class.method")
    assert str(target) == "mypkg.hooks:Class.method"
    assert target.kwargs == {
        "rank": 3,  # the last one counts
        "name": "plain",
        "path": "/tmp/x y",
        "shape": (1, 2),
        "text": "a,b",
        "quoted": "it's, it",
        "kind": "Kind.SOME",
        "none": None,
        "empty": "",
    }
    assert target.call
    assert parse_target(write_target(str(target), target.kwargs), "--hook") == target


@pytest.mark.parametrize("kind", KINDS)
def test_calls_targets_with_parentheses_or_arguments_only(kind: str) -> None:
    assert not parse_target("mypkg:make", f"--{kind}").call
    assert parse_target("mypkg:make()", f"--{kind}").call
    assert parse_target("mypkg:make,rank=2", f"--{kind}").call
    assert make_spec(kind, "mypkg:make()").name == "mypkg:make()"


@pytest.mark.parametrize(
    "text",
    [
        "mypkg",
        "mypkg:",
        ":hook",
        "my pkg:hook",
        "mypkg:hook,rank",
        "mypkg:hook,=2",
        "mypkg:hook,1x=2",
        "mypkg:hook,,rank=2",
        "mypkg:hook,rank=2,",
        "mypkg:hook(rank=2)",
        "mypkg.hook",
        "a:b:c",
    ],
)
def test_refuses_other_forms(text: str) -> None:
    with pytest.raises(UsageError, match="--hook: ") as error:
        parse_target(text, "--hook")
    assert "\n" not in str(error.value)


def test_an_argument_without_a_name_is_refused_with_an_example() -> None:
    reason = r"--hook: 'rank' in 'a:b,rank' is not key=value; type e\.g\. a:b,rank=2"
    with pytest.raises(UsageError, match=reason):
        parse_target("a:b,rank", "--hook")


def test_parses_arguments() -> None:
    assert parse_arguments("") == []
    assert parse_arguments("SGD, lr = 0.1, name='a=b',") == [
        Argument(None, "SGD", "SGD"),
        Argument("lr", 0.1, "lr = 0.1"),
        Argument("name", "a=b", "name='a=b'"),
    ]
    assert parse_arguments("'a=b'") == [Argument(None, "a=b", "'a=b'")]
    assert parse_arguments("torch.float16")[0].value == "torch.float16"


@pytest.mark.parametrize("text", ["a,,b", "a=", "a=/tmp", "[x for x in y]", "**x", "a b", "("])
def test_a_value_is_a_literal_or_a_word(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read '.*': type a number, a word, True"):
        parse_arguments(text)


def test_splits_at_commas_outside_brackets_and_quotes() -> None:
    assert split_at_commas("a, (b, [c, d]), 'e, f', \"'g, \", h") == [
        "a",
        "(b, [c, d])",
        "'e, f'",
        '"\'g, "',
        "h",
    ]
    assert split_at_commas("a, (b, c") == ["a", "(b, c"]
    assert split_at_commas("") == [""]


@pytest.mark.parametrize(("hook", "setup"), [(None, None), ("a:b", "c:d")])
def test_requires_exactly_one_subject(hook: str | None, setup: str | None) -> None:
    with pytest.raises(UsageError, match="name one subject"):
        parse_subject(hook, None, setup)


def test_only_hooks_have_a_state_and_a_set_up() -> None:
    with pytest.raises(
        UsageError, match="--state and --setup belong to a hook, not to an averager"
    ):
        make_spec("averager", "a:b", state="pg")
    with pytest.raises(UsageError, match=r"name one subject: --averager module:attribute$"):
        make_spec("averager", None)


def test_a_state_can_be_a_name_of_the_context() -> None:
    assert parse_subject("a:b", "pg", None).state == "pg"
    with pytest.raises(UsageError, match="--state"):
        parse_subject("a:b", "nonsense", None)


def test_specs_of_every_kind() -> None:
    hook = make_spec(HOOK, "a:b,rank=2", state="pg")
    assert hook == SubjectSpec(hook="a:b,rank=2", state="pg")
    assert make_spec(HOOK, None, setup="a:b") == SubjectSpec(setup="a:b")
    averager = parse_other("averager", "a:b,period=4")
    assert averager == SubjectSpec(kind="averager", target="a:b,period=4")
    assert hook.arguments == {"rank": 2}
    assert averager.arguments == {"period": 4}
    assert SubjectSpec(setup="a:b").arguments == {}
    assert reference_of(HOOK) == REFERENCE == SubjectSpec(hook="hooks_ref:allreduce_hook")
