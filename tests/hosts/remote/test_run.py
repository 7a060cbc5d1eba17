"""A run on several hosts, with hosts that send messages of the test's."""

import select
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.hosts.remote import run as remote_run
from conformance.hosts.remote.rendezvous import Announcement
from conformance.hosts.remote.run import Member, RemoteRun
from conformance.hosts.remote.wire import ConnectionLost, Stream
from conformance.judging.run_failures import failed_run
from conformance.records.files import OUTCOME, write_json
from conformance.records.run import load_run
from conformance.scenarios.hook import VALUES

Host = Callable[[Stream], None]


def host_of(host_rank: int, **fields: Any) -> Announcement:
    """Return the announcement of a host; there are two on each node."""
    node = host_rank // 2
    announcement = Announcement(
        id=f"host {host_rank}",
        token="",
        addresses=("127.0.0.1",),
        port=1,
        host_rank=host_rank,
        host_count=4,
        node=node,
        node_count=2,
        local_rank=host_rank % 2,
        hostname="abc"[node],
        pid=1,
        store=("localhost", 1),
    )
    return replace(announcement, **fields)


def rank_outcome(rank: int, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "exit": 0, "died": 100.0 + rank, "printed": 0, "output": "", **more}


def outcome(rank: int, stopped: str = "ended", **more: Any) -> dict[str, Any]:
    return {
        "outcome": {"stopped": stopped, "left_processes": [], "ranks": [rank_outcome(rank, **more)]}
    }


def carried_out(
    folder: Path, *hosts: Host, deadline: float = 60.0, grace: float = 0.0
) -> tuple[dict[str, Any], RemoteRun]:
    """Run one host for each rank, on threads."""
    ends = [socket.socketpair() for _ in hosts]
    theirs = [Stream(end) for _, end in ends]
    threads = [
        threading.Thread(target=_serve, args=pair) for pair in zip(hosts, theirs, strict=True)
    ]
    team = RemoteRun(
        [
            Member(host_of(rank), Stream(end), (rank,), clock_offset=100.0)
            for rank, (end, _) in enumerate(ends)
        ],
        folder,
    )
    for thread in threads:
        thread.start()
    team.start({"op": "run"}, (), {str(rank): {"RANK": str(rank)} for rank in range(len(hosts))})
    result = team.supervise(deadline, grace)
    for member in team.members:
        member.lane.hang_up()
    for thread in threads:
        thread.join()
    for stream in (*theirs, *(member.lane for member in team.members)):
        stream.close()
    return result, team


def _serve(host: Host, stream: Stream) -> None:
    command = stream.receive(60.0)
    assert list(command["environment"]) == [str(rank) for rank in command["ranks"]]
    try:
        host(stream)
    except ConnectionLost:
        return


def waits(rank: int) -> Host:
    """A host whose rank does not end by itself."""

    def host(stream: Stream) -> None:
        reason = stream.receive(60.0)["stop"]
        stream.send({"evidence": reason})
        assert "kill" in stream.receive(60.0)
        stream.send(outcome(rank, reason, exit=-9, killed=True, stacks="here"))

    return host


def ends(rank: int, **more: Any) -> Host:
    return lambda stream: stream.send(outcome(rank, **more))


def test_a_run_that_ends(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    record = tmp_path / "there" / "events.jsonl"
    record.write_text('{"event": "step", "step": 0, "time": 142.5}\n')
    result, _ = carried_out(
        tmp_path, ends(0), lambda stream: stream.send(outcome(1), [(1, record)])
    )
    assert result["stopped"] == "ended"
    write_json(tmp_path / OUTCOME, result)
    assert load_run(tmp_path, VALUES, 2).ranks[1].events == [
        {"event": "step", "step": 0, "time": 42.5}
    ]
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert [rank["died"] for rank in result["ranks"]] == [0.0, 1.0]  # on the controller's clock
    assert [rank["clock"] for rank in result["ranks"]] == [100.0, 100.0]


def test_peers_of_a_rank_that_died_are_stopped(tmp_path: Path) -> None:
    result, _ = carried_out(tmp_path, waits(0), ends(1, exit=-11), waits(2))
    assert result["stopped"] == "peer"
    assert [rank["exit"] for rank in result["ranks"]] == [-9, -11, -9]
    write_json(tmp_path / OUTCOME, result)
    broken = failed_run(load_run(tmp_path, VALUES, 3))
    assert broken is not None
    assert broken.line == "rank 1 died (signal SIGSEGV) before it began"


def test_nothing_is_killed_before_all_hosts_have_evidence(tmp_path: Path) -> None:
    """If its peer were killed first, a hanging rank would report a closed connection."""
    taken = threading.Event()

    def quick(stream: Stream) -> None:
        stream.send({"evidence": stream.receive(60.0)["stop"]})
        assert not select.select([stream], [], [], 0.2)[0] or taken.is_set()
        assert "kill" in stream.receive(60.0)
        assert taken.is_set()
        stream.send(outcome(0, exit=-9, killed=True))

    def slow(stream: Stream) -> None:
        reason = stream.receive(60.0)["stop"]
        taken.wait(0.5)
        taken.set()
        stream.send({"evidence": reason})
        stream.receive(60.0)
        stream.send(outcome(1, exit=-9, killed=True))

    result, _ = carried_out(tmp_path, quick, slow, deadline=0.1)
    assert result["stopped"] == "hang"
    assert all(rank["killed"] for rank in result["ranks"])


def test_a_host_that_stops_by_itself_stops_all(tmp_path: Path) -> None:
    def floods(stream: Stream) -> None:
        stream.send({"evidence": "flood"})
        assert "kill" in stream.receive(60.0)
        stream.send(outcome(1, "flood", exit=-9, killed=True, printed=1 << 30))

    result, _ = carried_out(tmp_path, waits(0), floods)
    assert result["stopped"] == "flood"


def test_a_lost_host_is_reported_and_the_others_are_stopped(tmp_path: Path) -> None:
    result, team = carried_out(tmp_path, waits(0), lambda stream: stream.hang_up(), waits(2))
    assert result["stopped"] == "node"
    assert [member.state for member in team.members] == ["done", "lost", "done"]
    assert team.members[1].reason == "its process ended"
    assert result["ranks"][0]["stacks"] == "here"
    assert result["ranks"][1] == {"rank": 1, "exit": None}


def test_a_lost_host_without_a_rank_stops_nothing(tmp_path: Path) -> None:
    """It is remembered: if torchrun starts all hosts anew, this was the reason."""
    ours, theirs = socket.socketpair()
    lane, end = socket.socketpair()
    beside = Stream(ours)
    other = Stream(end)
    team = RemoteRun([Member(host_of(0), Stream(lane), (0,))], tmp_path, [(host_of(3), beside)])
    theirs.close()

    def late() -> None:
        while not team.lost_others:
            threading.Event().wait(0.01)
        ends(0)(other)

    thread = threading.Thread(target=late)
    thread.start()
    assert team.supervise(60.0, 0.0)["stopped"] == "ended"
    thread.join()
    assert [(host.host_rank, how) for host, how in team.lost_others] == [(3, "its process ended")]
    for stream in (beside, other, team.members[0].lane):
        stream.close()


def test_a_silent_host_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_run, "ANSWER", 0.2)
    result, team = carried_out(
        tmp_path, waits(0), lambda stream: _until_hung_up(stream), deadline=0.1
    )
    assert result["stopped"] == "hang"
    assert (team.members[1].state, team.members[1].reason) == ("lost", "it did not answer")


def _until_hung_up(stream: Stream) -> None:
    while True:
        stream.receive(60.0)


@pytest.mark.parametrize(
    "lie",
    [
        {"outcome": []},
        {"outcome": {"stopped": "ended", "left_processes": [], "ranks": []}},
        outcome(0),
        outcome(1, exit="zero"),
        {"outcome": {"stopped": "ended", "left_processes": [], "ranks": [{"rank": 1}]}},
        {**outcome(1), "files": [{"rank": 0, "name": "events.jsonl", "size": 3}]},
        {**outcome(1), "files": [{"rank": 1, "name": "../../outcome.json", "size": 3}]},
    ],
)
def test_a_host_that_sends_an_invalid_outcome_is_lost(tmp_path: Path, lie: dict[str, Any]) -> None:
    """It cannot report ranks of another host, nor write any other file."""

    def liar(stream: Stream) -> None:
        stream.send(lie)
        _until_hung_up(stream)

    (tmp_path / "run").mkdir()
    result, team = carried_out(tmp_path / "run", ends(0), liar)
    assert result["stopped"] == "node"
    assert team.members[1].state == "lost"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_full_disk_of_a_node_is_the_kits_error(tmp_path: Path) -> None:
    _, team = carried_out(
        tmp_path, waits(0), lambda stream: stream.send({"kit_error": "No space left on device"})
    )
    assert team.members[1].kit_error == "No space left on device"
