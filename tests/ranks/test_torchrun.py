"""Tests of torchrun's environment variables."""

import os
import platform
import socket

import pytest

from conformance.ranks.torchrun import name_the_host, node_sizes, torchrun_environment

NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def test_ranks_are_numbered_node_by_node() -> None:
    found = [torchrun_environment((3, 1, 2), rank) for rank in range(6)]
    assert [variables["RANK"] for variables in found] == ["0", "1", "2", "3", "4", "5"]
    assert {variables["WORLD_SIZE"] for variables in found} == {"6"}
    assert {variables["GROUP_WORLD_SIZE"] for variables in found} == {"3"}
    assert [tuple(int(variables[name]) for name in NAMES) for variables in found] == [
        (0, 3, 0),
        (1, 3, 0),
        (2, 3, 0),
        (0, 1, 1),
        (0, 2, 2),
        (1, 2, 2),
    ]


def test_roles_are_the_ranks_of_the_world() -> None:
    variables = torchrun_environment((2, 2), 3)
    assert (variables["ROLE_RANK"], variables["ROLE_WORLD_SIZE"]) == ("3", "4")
    assert variables["ROLE_NAME"] == "default"


@pytest.mark.parametrize(
    ("nodes", "world", "device", "sizes"),
    [
        ((2, 3), 5, "cpu", (2, 3)),
        ((), 4, "cpu", (4,)),
        ((2, 3), 4, "cpu", (4,)),
        ((2, 3), 5, "cuda", (5,)),
    ],
)
def test_nodes_are_simulated_if_they_fit_and_ranks_need_no_device(
    nodes: tuple[int, ...], world: int, device: str, sizes: tuple[int, ...]
) -> None:
    assert node_sizes(nodes, world, device) == sizes


def test_each_node_has_a_host_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, function in ((os, "uname"), (platform, "node"), (socket, "gethostname")):
        monkeypatch.setattr(owner, function, getattr(owner, function))
    monkeypatch.setattr(socket, "getfqdn", socket.getfqdn)
    monkeypatch.setenv("HOSTNAME", "real")
    real = socket.gethostname()
    name_the_host((3,), 0)
    assert socket.gethostname() == real
    name_the_host((2, 1), 2)
    names = {socket.gethostname(), platform.node(), os.uname().nodename, socket.getfqdn()}
    assert names | {os.environ["HOSTNAME"]} == {f"{real}-1"}
