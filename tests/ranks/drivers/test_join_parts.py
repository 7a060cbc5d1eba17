"""The modules and optimizers of a joinable are found in the objects that its attributes hold."""

import random
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from conformance.ranks.drivers._join_numbers import trained_by
from conformance.ranks.drivers._join_parts import (
    deep_tensors_of,
    generators_of,
    named_numbers_of,
    parts_of,
)


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(2, 1)


class Holder:
    """Has the attributes that it is given."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes

    @property
    def loaded(self) -> Any:
        raise AssertionError("a property is called")


@dataclass(slots=True)
class Slots:
    net: Any
    unset: Any

    def __init__(self, net: Any) -> None:
        self.net = net


class Trained(torch.nn.Module):
    """A module with an optimizer, and with a copy that is none of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.copies = [linear()]
        self.count = 3


class Around(torch.optim.Optimizer):
    """An optimizer that holds another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


class Hook(JoinHook):
    def __init__(self) -> None:
        self.net = linear()


class Thread(threading.Thread):
    def __init__(self) -> None:
        super().__init__()
        self.net = linear()


def found(subject: Any) -> list[str]:
    """Return the names of the parts that are modules or optimizers."""
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return [name for name, part in parts_of(subject).items() if issubclass(type(part), kinds)]


def test_parts_are_found_by_their_paths() -> None:
    net = linear()
    subject = Holder(
        models={"generator": linear(), 7: linear()},
        trainer=Holder(state=Slots(net), optimizer=torch.optim.SGD(net.parameters(), lr=0.1)),
        direct=linear(),
        pairs=[(linear(), None)],
        ordered=OrderedDict(first=linear()),
        one={linear()},
    )
    assert found(subject) == [
        "direct.",
        "models/generator.",
        "models/1.",
        "trainer.optimizer.",
        "ordered/first.",
        "one/Linear[[1, 2], [1]].",
        "trainer.state.net.",
        "pairs/0/0.",
    ]
    assert "models." in parts_of(subject)
    assert "trainer.state." not in parts_of(subject)


def test_each_object_is_found_once_and_at_its_nearest_place() -> None:
    subject = Holder(trainer=Holder(net=linear()))
    subject.trainer.back = subject
    subject.trainer.again = [subject.trainer.net]
    assert found(subject) == ["trainer.net."]
    subject.net = torch.nn.Sequential(subject.trainer.net)
    assert found(subject) == ["net."]


def test_a_module_has_parts_that_it_has_not_registered() -> None:
    module = Trained()
    assert found(module) == ["optimizer.", "copies/0."]
    assert found(torch.nn.Sequential(module)) == ["0.optimizer.", "0.copies/0."]
    assert found(Holder(net=module)) == ["net.", "net.optimizer.", "net.copies/0."]
    assert parts_of(linear()) == {}


def test_an_optimizer_of_a_users_class_may_hold_another_one() -> None:
    inner = torch.optim.SGD(linear().parameters(), lr=0.1)
    assert found(Holder(optimizer=Around(inner))) == ["optimizer.", "optimizer.inner."]


def test_the_search_leaves_other_code_and_data_alone() -> None:
    target = Holder(net=linear())
    proxy = weakref.proxy(target)
    subject = Holder(
        hook=Hook(),
        thread=Thread(),
        kind=Trained,
        call=Hook.main_hook,
        gone=proxy,
        data=[linear() for _ in range(257)],
        alike={linear(), linear()},
        scheduler=torch.optim.lr_scheduler.StepLR(
            torch.optim.SGD(linear().parameters(), lr=0.1), 1
        ),
    )
    del target
    assert found(subject) == []
    nested: Any = linear()
    for _ in range(8):
        nested = Holder(inner=nested)
    assert found(nested) == []
    assert found(nested.inner.inner) == ["inner." * 6]


def test_values_are_read_that_may_follow_contexts() -> None:
    drawn = torch.Generator()
    trainer = Holder(epoch=2, is_on=True, seeds=[random.Random(1), drawn], losses=[0.5])
    trainer.residuals = {"first": torch.zeros(2)}
    subject = Holder(trainer=trainer, rate=0.1, own=torch.zeros(1), nets=[Trained()])
    numbers = named_numbers_of(subject)
    assert numbers["trainer.epoch"] == 2
    assert numbers["rate"] == 0.1
    assert numbers["nets/0.count"] == 3
    assert not numbers.keys() & {"trainer.is_on", "trainer.losses/0"}
    assert list(deep_tensors_of(subject)) == ["trainer.residuals/first"]
    assert generators_of(subject) == {
        "trainer.seeds/0": trainer.seeds[0],
        "trainer.seeds/1": drawn,
    }


def test_frozen_parameters_of_an_optimizer_are_trained() -> None:
    trainer = Holder(net=linear(), copy=linear())
    subject = Holder(trainer=trainer)
    trainer.optimizer = torch.optim.SGD(trainer.net.parameters(), lr=0.1)
    trainer.net.requires_grad_(False)
    trainer.copy.requires_grad_(False)
    ids = [id(parameter) for parameter in trained_by(subject)]
    assert ids == [id(parameter) for parameter in trainer.net.parameters()]
