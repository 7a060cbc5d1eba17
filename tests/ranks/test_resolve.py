"""Every shape in which hooks and states come in the wild can be named without editing them."""

import enum
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Optional, Union

import pytest
import torch

from conformance.errors import TargetError
from conformance.hosts.pool import Pool
from conformance.ranks.resolve import (
    Factory,
    call_with_names,
    describe,
    is_one_object,
    make_hook,
    make_state,
    resolve,
)
from conformance.scenarios.hook import VALUES
from conformance.subjects.spec import Subject, SubjectSpec, parse_other
from tests.hooks_ref.algorithms import try_hook

NAMES = ("process_group", "model", "rank", "world_size", "device", "optimizer")
CONTEXT: dict[str, Callable[[], Any]] = {name: (lambda name=name: f"the {name}") for name in NAMES}


def hook(state: object, bucket: object) -> str:
    return "future"


class Stateful:
    """A state, a hook as its method, and a factory."""

    def __init__(self, process_group: object = None, rank: int = 1) -> None:
        self.process_group = process_group
        self.rank = rank

    @classmethod
    def for_rank(cls, rank: object) -> tuple[str, object]:
        return "for", rank

    def method(self, state: object, bucket: object) -> str:
        return "future"

    __call__ = method


def positional(pg: object, /, *, model: object) -> tuple[object, object]:
    return pg, model


def make(scale: float = 1.0) -> Callable[..., Any]:
    return functools.partial(hook, scale)


def make_on_group(group: object) -> tuple[object, Callable[..., Any]]:
    return group, hook


def needs_group(process_group: object) -> object:
    return process_group


class Plain:
    """A hook that needs nothing of a rank's."""

    def __call__(self, state: object, bucket: object) -> str:
        return "future"


class Kind(enum.Enum):
    """As torch's DDPCommHookType."""

    PLAIN = functools.partial(hook)


MEMBERS = {
    "hook": hook,
    "Stateful": Stateful,
    "positional": positional,
    "make": make,
    "make_on_group": make_on_group,
    "Kind": Kind,
    "needs_group": needs_group,
    "Plain": Plain,
    "of_half": functools.partial(make, torch.float16),
    "wrapped": functools.partial(make, scale=hook),
    "of_a_list": functools.partial(make, scale=[1.0]),
    "of_a_bound_one": functools.partial(Stateful().method, None),
    "bound": Stateful().method,
    "groups": ("a", "b"),
    "in_a_list": [{}],
    "number": 3,
    "with_no_call": object(),
    "described": Subject(hook=hook, state=lambda world_size: ["of", world_size], claims="sum"),
    "__conformance__": {"hook": "rounded(float16)"},
}


@pytest.fixture(autouse=True)
def wild() -> Iterator[None]:
    module = types.ModuleType("wild")
    vars(module).update(MEMBERS)
    module.__file__ = __file__
    sys.modules["wild"] = module
    yield
    del sys.modules["wild"]


def made(hook_text: str, state: str | None = None) -> tuple[Any, Any]:
    return make_hook(resolve(SubjectSpec(hook=hook_text, state=state)), CONTEXT, "--hook")


@pytest.mark.parametrize(
    "text",
    [
        "hook",
        "bound",
        "Stateful",
        "Stateful,rank=2",
        "make()",
        "make,scale=2.0",
        "Kind.PLAIN",
        "Stateful.for_rank",
    ],
)
def test_hooks_of_every_shape(text: str) -> None:
    found, state = made(f"wild:{text}")
    assert callable(found)
    assert state is None


def test_a_factory_can_return_state_and_hook() -> None:
    assert made("wild:make_on_group()") == (hook, "the process_group")


@pytest.mark.parametrize(
    ("state", "value"),
    [
        ("pg", "the process_group"),
        ("world_size", "the world_size"),
        ("wild:groups", ("a", "b")),
        ("wild:in_a_list", [{}]),
        ("wild:number", 3),
        ("wild:Stateful.for_rank", ("for", "the rank")),
        ("wild:Stateful.for_rank,rank=7", ("for", 7)),
        ("wild:positional", ("the process_group", "the model")),
    ],
)
def test_states_of_every_shape(state: str, value: object) -> None:
    assert made("wild:hook", state)[1] == value


def test_a_class_as_state_gets_what_its_signature_names() -> None:
    state = made("wild:hook", "wild:Stateful,rank=5")[1]
    assert (state.process_group, state.rank) == ("the process_group", 5)


def test_an_argument_of_the_target_is_not_taken_from_the_rank() -> None:
    """``--setup wild:positional,model=small`` names a model; the rank's model is not passed."""
    resolved = resolve(SubjectSpec(setup="wild:positional,model=small"))
    assert resolved.setup is not None
    assert call_with_names(resolved.setup, {}, CONTEXT) == ("the process_group", "small")


def test_a_subject_describes_itself() -> None:
    resolved = resolve(SubjectSpec(hook="wild:described"))
    assert resolved.claims == "sum"
    assert make_state(resolved.state, CONTEXT) == ["of", "the world_size"]
    assert made("wild:described", "pg")[1] == "the process_group"


@pytest.mark.parametrize("hook", ["wild:Plain", "wild:make()", "wild:described"])
@pytest.mark.parametrize("state", ["pg", "process_group", "wild:needs_group"])
def test_a_hook_that_is_made_may_have_a_state_that_needs_a_rank(hook: str, state: str) -> None:
    """Whoever describes the subject calls its factory, and has no process group."""
    assert describe(SubjectSpec(hook=hook, state=state))["module"] == "wild"
    assert made(hook, state)[1] == "the process_group"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("wild:hook", False),
        ("wild:make,scale=2.0", False),
        ("wild:Plain", False),
        ("wild:of_half", False),
        ("wild:wrapped", False),
        ("wild:bound", True),
        ("wild:of_a_list", True),
        ("wild:of_a_bound_one", True),
    ],
)
def test_a_function_with_bound_values_is_no_object_that_models_share(
    text: str, is_one: bool
) -> None:
    assert is_one_object(resolve(SubjectSpec(hook=text))) is is_one


def test_claims_beside_the_hook_are_found() -> None:
    description = describe(SubjectSpec(hook="wild:hook"))
    assert description["claims"] == "rounded(float16)"
    assert set(description["sha256"]) == {"wild", "tests.ranks.test_resolve"}


def test_another_kind_is_resolved_by_the_same_function() -> None:
    spec = parse_other("averager", "wild:make,scale=2.0")
    target = resolve(spec).target
    assert target is not None
    assert (target.function, target.kwargs) == (make, {"scale": 2.0})
    assert set(describe(spec)["sha256"]) == {"wild", "tests.ranks.test_resolve"}
    with pytest.raises(TargetError, match="an int cannot be called with arguments"):
        resolve(parse_other("averager", "wild:number,scale=2.0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wild:number", "an int is no hook"),
        ("wild:with_no_call", "an object is no hook"),
        ("wild:hok", "did you mean hook"),
        ("wild:make_on_group", r"a hook, call it: --hook 'wild:make_on_group\(\)'$"),
        ("wild:Stateful.metod", "did you mean method"),
        ("wilder:hook", "there is no module 'wilder'"),
        ("wild:make,scalar=2", "unexpected keyword argument 'scalar'"),
    ],
)
def test_the_message_names_the_error(text: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        describe(SubjectSpec(hook=text))


def test_the_saved_object_of_a_set_up_must_have_a_state_dict(pool: Pool) -> None:
    run = try_hook(pool, VALUES, setup="conformance:Case,saved=3")
    messages = [error["message"] for rank in run.ranks for error in rank.all("error")]
    message = "--setup: the Case's `saved` has no state_dict() and load_state_dict(): int"
    assert messages == [message] * 2


@pytest.mark.parametrize(
    ("annotation", "requires"),
    [
        (list, True),
        (list[torch.nn.Parameter], True),
        (Sequence[torch.nn.Parameter], True),
        ("list[torch.nn.Parameter]", True),
        ("typing.List[torch.Tensor]", True),
        (Collection[torch.nn.Parameter], True),
        (tuple[torch.nn.Parameter, ...], True),
        (torch.nn.ParameterList, True),
        (list[torch.nn.Parameter] | None, True),
        (Union[list[torch.nn.Parameter], list[dict[str, Any]]], True),  # noqa: UP007
        (Optional["list[torch.nn.Parameter]"], True),
        ("Optional[List[torch.nn.Parameter]]", True),
        ("t.Union[t.List[torch.nn.Parameter], 't.Sequence[dict]']", True),
        ("list[torch.nn.Parameter] | list[dict] | None", True),
        ("nn.ParameterList", True),
        (list[torch.nn.Parameter] | Iterable[torch.nn.Parameter], False),
        ("list[torch.nn.Parameter] | Iterator[torch.nn.Parameter]", False),
        ("Optional[Iterable[torch.nn.Parameter]]", False),
        ("no annotation", False),
        (Iterable[torch.nn.Parameter], False),
        ("Iterable[torch.nn.Parameter]", False),
        (None, False),
    ],
)
def test_an_annotation_may_require_a_list(annotation: object, requires: bool) -> None:
    def averager(params: Any) -> None:
        """Make nothing."""

    averager.__annotations__["params"] = annotation
    assert Factory(averager, {}).requires_a_list("params") is requires
    assert not Factory(averager, {}).requires_a_list("model")
