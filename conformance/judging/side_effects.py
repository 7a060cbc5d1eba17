"""What a subject that is no hook leaves behind in its process: asked of every kind that works on a ``drive.stage.Stage``."""

from conformance.judging.verdict import Found
from conformance.records.run import Run


def left_behind(run: Run, found: Found) -> None:
    """Require that ranks are left as they were found."""
    for rank in run.ranks:
        start, end = rank.first("state", at="start"), rank.first("state", at="end")
        if not found.require(start is not None and end is not None, "a record from the start to the end", f"rank {rank.rank}: none"):
            continue
        assert start
        assert end
        for event in rank.all("leaves"):
            moved = f"rank {rank.rank}, step {event['step']}: {event['what']} moved {', '.join(event['rng_changed'])}"
            found.require(not event["rng_changed"], "random generators as they were", moved)
        changed = [name for name, value in end["process"].items() if start["process"].get(name, value) != value]
        found.require(not changed, "settings as they were", f"rank {rank.rank}: {', '.join(changed)} changed")
        found.require(not end["patches"], "functions as they were", f"rank {rank.rank}: {', '.join(end['patches'][:3])}")
        threads = [thread for thread in end["threads"] if thread not in start["threads"]]
        found.require(not threads, "no thread more", f"rank {rank.rank}: {', '.join(map(str, threads[:3]))}")
        found.require(not end["children"], "no process more", f"rank {rank.rank}: {', '.join(map(str, end['children'][:3]))}")
        found.require(not end["files"], "no temporary file", f"rank {rank.rank}: {', '.join(map(str, end['files'][:3]))}")
    found.require(not run.left_processes, "no process that outlives its rank", f"{', '.join(run.left_processes[:3])}")
