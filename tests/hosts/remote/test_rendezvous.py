"""Hosts are found in stores, which the test fills as torchrun does."""

import dataclasses
import json
import socket

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.run import get_args_parser

from conformance.errors import UsageError
from conformance.hosts.remote import rendezvous
from conformance.hosts.remote.rendezvous import (
    HostsNotFound,
    find_hosts,
    kit_digest,
    parse_endpoint,
    publish,
)
from tests.hosts.remote.test_run import host_of
from tests.torch_marks import needs_list_keys

_STORES: list[TCPStore] = []  # kept: if one is destroyed, others of this process may stop answering


def new_store() -> TCPStore:
    _STORES.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    return _STORES[-1]


def fill(store: TCPStore, hosts: int = 2, of: int = 2) -> None:
    for rank in range(hosts):
        publish(host_of(rank, host_count=of, store=("localhost", store.port)))


def name_it(endpoint: TCPStore, shared: TCPStore, run: str, number: int = 0) -> None:
    endpoint.set(f"torch.rendezvous.{run}.{number}/MASTER_ADDR", "localhost")
    endpoint.set(f"torch.rendezvous.{run}.{number}/MASTER_PORT", str(shared.port))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("anna:1234", ("anna", 1234)),
        ("anna", ("anna", 29400)),
        ("[::1]:5", ("::1", 5)),
        ("[fe80::1]", ("fe80::1", 29400)),
    ],
)
def test_endpoints_are_parsed_as_torchrun_does(text: str, found: tuple[str, int]) -> None:
    assert parse_endpoint(text) == found


@pytest.mark.parametrize(
    "text", ["", ":29400", "anna:", "anna:port", "anna:0", "anna:99999", "http://anna:29400", "::1"]
)
def test_other_texts_are_no_endpoints(text: str) -> None:
    with pytest.raises(UsageError, match="--attach"):
        parse_endpoint(text)


@needs_list_keys
def test_hosts_are_found_by_the_endpoint_and_by_their_own_store() -> None:
    endpoint = new_store()
    shared = new_store()
    older = new_store()
    name_it(endpoint, older, "job", 0)
    name_it(endpoint, shared, "job", 10)
    fill(shared)
    for store in (endpoint, shared):
        found = find_hosts("localhost", store.port)
        assert [host.host_rank for host in found] == [0, 1]
        assert found[0].addresses == (
            "127.0.0.1",
            "localhost",
        )  # the first node keeps the store


def test_the_error_names_the_missing_hosts() -> None:
    endpoint = new_store()
    shared = new_store()
    with pytest.raises(HostsNotFound, match="no rendezvous"):
        find_hosts("localhost", endpoint.port)
    name_it(endpoint, shared, "none")
    with pytest.raises(HostsNotFound, match="no host of the kit's has come yet"):
        find_hosts("localhost", endpoint.port)
    fill(shared, 1, of=3)
    with pytest.raises(HostsNotFound, match="1 of 3 hosts"):
        find_hosts("localhost", shared.port)
    # Bound and not listening: nobody answers, and no other process can take the port meanwhile.
    with socket.socket() as closed:
        closed.bind(("localhost", 0))
        port = closed.getsockname()[1]
        with pytest.raises(HostsNotFound, match=f"nobody answers at localhost:{port}"):
            find_hosts("localhost", port)


class WithoutKeys:
    """A store of a torch that cannot list its keys."""

    def __init__(self, store: TCPStore) -> None:
        self.check = store.check
        self.get = store.get


def test_a_torchrun_without_a_name_is_found_if_keys_cannot_be_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reach = rendezvous._reach
    monkeypatch.setattr(rendezvous, "_reach", lambda *address: WithoutKeys(reach(*address)))
    endpoint = new_store()
    older = new_store()
    shared = new_store()
    with pytest.raises(HostsNotFound, match="no rendezvous without --rdzv-id: give the address"):
        find_hosts("localhost", endpoint.port)
    # torchrun's name of a run that has none.
    assert get_args_parser().parse_args(["script.py"]).rdzv_id == "none"
    name_it(endpoint, older, "none", 0)
    name_it(endpoint, shared, "none", 1)
    fill(shared)
    assert [host.host_rank for host in find_hosts("localhost", endpoint.port)] == [0, 1]


class Closed:
    """A store whose server ends."""

    def check(self, _: list[str]) -> bool:
        raise dist.DistNetworkError("failed to recv, got 0 bytes\nException raised from recvBytes")


def test_a_store_that_closes_during_the_search_has_no_hosts_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_reach", lambda *_: Closed())
    with pytest.raises(HostsNotFound, match=r"the store at localhost:1 is gone \(failed to recv"):
        find_hosts("localhost", 1)


@needs_list_keys
@pytest.mark.ranks  # it waits for hosts that do not come
def test_hosts_of_several_torchruns_are_not_mixed() -> None:
    endpoint = new_store()
    one = new_store()
    other = new_store()
    for run, shared in (("one", one), ("other", other)):
        name_it(endpoint, shared, run)
        fill(shared)
    with pytest.raises(
        UsageError, match=" or ".join(sorted(f"--attach localhost:{s.port}" for s in (one, other)))
    ):
        find_hosts("localhost", endpoint.port)


@pytest.mark.parametrize("text", ["no json", "[]", '{"host_rank": 0}'])
def test_an_announcement_of_another_version_is_refused(text: str) -> None:
    store = new_store()
    store.set("conformance/host/0", text)
    with pytest.raises(HostsNotFound, match="another version"):
        find_hosts("localhost", store.port)
    more = {**dataclasses.asdict(host_of(0)), "more": 1}
    store.set("conformance/host/0", json.dumps(more))
    with pytest.raises(HostsNotFound, match="another version"):
        find_hosts("localhost", store.port)


def test_a_kit_has_one_digest() -> None:
    assert kit_digest() == kit_digest()
    assert len(kit_digest()) == 64
