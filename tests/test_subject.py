import pytest

from conformance.errors import UsageError
from conformance.subjects.spec import parse_subject
from conformance.subjects.target import parse_target


def test_takes_a_target_apart() -> None:
    target = parse_target("mypkg.hooks:Class.method,rank=2,name=plain,shape=(1, 2),text='a,b'", "--hook")
    assert (target.module, target.attribute) == ("mypkg.hooks", "Class.method")
    assert target.kwargs == {"rank": 2, "name": "plain", "shape": (1, 2), "text": "a,b"}
    assert target.call


def test_calls_only_when_told_to() -> None:
    assert not parse_target("mypkg:hook", "--hook").call
    assert parse_target("mypkg:make_hook()", "--hook").call


@pytest.mark.parametrize("text", ["mypkg", "mypkg:", ":hook", "my pkg:hook", "mypkg:hook,rank", "mypkg:hook,=2", "mypkg.hook", "a:b:c"])
def test_refuses_other_forms(text: str) -> None:
    with pytest.raises(UsageError, match="--hook: "):
        parse_target(text, "--hook")


@pytest.mark.parametrize(("hook", "setup"), [(None, None), ("a:b", "c:d")])
def test_wants_exactly_one_subject(hook: str | None, setup: str | None) -> None:
    with pytest.raises(UsageError, match="name one subject"):
        parse_subject(hook, None, setup)


def test_a_state_can_be_a_name_of_the_context() -> None:
    assert parse_subject("a:b", "pg", None).state == "pg"
    with pytest.raises(UsageError, match="--state"):
        parse_subject("a:b", "nonsense", None)
