"""Section 1: requirements of DDP on a hook that DDP itself does not check."""

from itertools import combinations
from typing import Any

from conformance.judging.oracles import mean as oracle
from conformance.judging.requirements import require_steps
from conformance.judging.rule import SHOULD, WorldSizes, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import (
    AS_IS,
    BUCKETS,
    DTYPES,
    LONG,
    ORDERED,
    SHAPES,
    VALUES,
    VIEWS,
)
from conformance.scenarios.training_sizes import NETWORK
from conformance.subjects.claims import Claims

DOC = "torch documentation, DistributedDataParallel.register_comm_hook"


@rule(
    "1.1",
    "Registers as it is",
    on=(AS_IS, VALUES),
    owns=(AS_IS,),
    worlds=WorldSizes.PRIMARY,
    blamed_for="register",
    source=DOC + "; torch.nn.parallel.distributed looks the hook's parameters up by name",
    remedy="the name of the second parameter, which must be bucket; the annotations, which must be "
    "absent or exactly dist.GradBucket and torch.futures.Future[torch.Tensor]; "
    "`from __future__ import annotations`, which turns them into strings that DDP refuses",
)
def registers(run: Run, claims: Claims, found: Found) -> None:
    """DistributedDataParallel.register_comm_hook accepts the hook as it is, on every rank.

    DDP checks by name and identity, and its errors do not name the mistake.
    """
    for rank in run.ranks:
        registered = rank.first("registered") is not None
        found.require(registered, "a registered hook", f"rank {rank.rank} registered none")


@rule(
    "1.2",
    "Returns a future of one tensor",
    on=(VALUES,),
    worlds=WorldSizes.PRIMARY,
    blamed_for="contract",
    source=DOC + "; DDP segfaults on None",
    remedy="a forgotten return; get_future() without .then(lambda fut: fut.value()[0]); a callback "
    "that returns a future",
)
def future_of_a_tensor(run: Run, claims: Claims, found: Found) -> None:
    """Each call returns a torch.futures.Future that holds one tensor.

    None, a list, a Work or another future is refused.
    """
    for rank, value in _values(run):
        holds = value["state"] != "value" or value["tensor"]
        content = value.get("type", value["state"])
        actual = f"{_place(rank, value)}: the future holds {content}"
        found.require(holds, "a future of one tensor", actual)


@rule(
    "1.3",
    "Returns a result with the memory layout that DDP reads",
    on=(VALUES, BUCKETS, DTYPES, SHAPES),
    blamed_for="shape",
    source=DOC + "; the reducer takes strided views of the result's storage from its start",
    remedy="a view that is returned as the result: return a contiguous tensor of its own; "
    ".contiguous() does not copy a slice, .clone() does",
)
def shape_and_storage(run: Run, claims: Claims, found: Found) -> None:
    """The result has the bucket's shape, is contiguous and starts at offset 0 of its storage.

    DDP reads the raw storage of a strided view or of one with an offset, and goes on with garbage
    without an error.
    """
    for rank, value in _tensors(run):
        bucket_shape = value["bucket_shape"]
        same_shape = value["shape"] == bucket_shape
        right = same_shape and value["contiguous"] and value["offset"] == 0
        layout = "contiguous" if value["contiguous"] else "strided"
        found.require(
            right,
            f"shape {bucket_shape}, contiguous, storage offset 0",
            f"{_place(rank, value)}: shape {value['shape']}, {layout}, "
            f"storage offset {value['offset']}",
        )


@rule(
    "1.4",
    "Returns a result of the bucket's dtype and device",
    on=(VALUES, BUCKETS, DTYPES, SHAPES),
    blamed_for="dtype",
    source=DOC + "; the reducer's copy truncates to integers, or rounds, without an error",
    remedy="a missing cast back to the bucket's dtype before the future completes",
)
def dtype_and_device(run: Run, claims: Claims, found: Found) -> None:
    """The result has the bucket's dtype and device.

    Under ``rounded(d)`` the dtype d is accepted, too, because copying widens it exactly.
    """
    for rank, value in _tensors(run):
        dtype = run.ranks[rank].one("call", call=value["call"])["dtype"]
        bucket_device = value["bucket_device"]
        right_dtype = value["dtype"] in (dtype, claims.rounded)
        found.require(
            right_dtype and value["device"] == bucket_device,
            f"{dtype} on {bucket_device}",
            f"{_place(rank, value)}: {value['dtype']} on {value['device']}",
        )


@rule(
    "1.5",
    "Completes every call",
    on=(VALUES,),
    owns=(VALUES,),
    worlds=WorldSizes.PRIMARY,
    certifies_machine=True,
    source=DOC + "; DDP waits for the future without a timeout, and Ctrl-C does not reach it",
    remedy="a path that completes no future; a wait inside .then; a collective that only some "
    "ranks issue; exceptions",
)
def completes(run: Run, claims: Claims, found: Found) -> None:
    """On every rank each call returns and its future completes, without a hang, exception or
    crash."""
    for rank, value in _values(run):
        actual = f"{_place(rank, value)}: {value['state']} {value.get('message', '')}"
        found.require(value["state"] == "value", "a completed future", actual)


@rule(
    "1.6",
    "Completes the future when the result is final",
    on=(ORDERED, NETWORK),
    owns=(ORDERED,),
    needs=("1.5",),
    source="pytorch#43307; futures completed while the collective still writes",
    remedy="a future that is not completed in the collective's own callback; one result buffer "
    "that several buckets share",
)
def final_when_complete(run: Run, claims: Claims, found: Found) -> None:
    """When the future completes the result is final: nothing writes it afterwards, and no two
    buckets share its memory.

    Rank 0 leaves its hook before any peer enters: a future that is complete by then cannot hold the
    peers' part. So it is for small buckets, and for one that is larger than DDP's 25 MiB. On a
    device with streams a future may complete as soon as the work that computes its value is
    enqueued; 21.1 judges there when the value is final.
    """
    for rank in run.ranks:
        for step in range(len(run.scenario.steps)):
            values = list(rank.all("value", step=step, state="value", tensor=True))
            for value in values:
                place = _place(rank.rank, value)
                returned = rank.one("returned", call=value["call"])
                changed = returned["digest"] != value["digest"]
                is_early = value["bucket_device"] == "cpu" and returned["done"] and changed
                found.require(
                    not is_early,
                    "a future that completes with its final value",
                    f"{place}: complete when the hook returned, before any peer had entered, and "
                    "written later",
                )
                at_rest = next(rank.all("rest", call=value["call"]), {})
                found.require(
                    claims.poststep or at_rest.get("digest") == value["digest"],
                    "a result that nobody writes once DDP has read it",
                    f"{place}: other bits after the last collective of the step had ended",
                )
            _require_apart(rank.rank, values, found)


def _require_apart(rank: int, values: list[dict[str, Any]], found: Found) -> None:
    """Require the results of one step to share no memory."""
    spans = []
    for value in values:
        if value.get("memory"):
            start, size = value["memory"]
            spans.append((value["index"], start, start + size))
    for (one, start, end), (other, other_start, other_end) in combinations(sorted(spans), 2):
        found.require(
            start >= other_end or other_start >= end,
            "a result buffer for each bucket of a step",
            f"rank {rank}, step {values[0]['step']}: "
            f"buckets {one} and {other} return the same memory",
        )


@rule(
    "1.7",
    "Works on later steps as on the first",
    on=(LONG,),
    owns=(LONG,),
    needs=("2.1",),
    source="pytorch#43307: right at first, NaN from the third iteration on",
    remedy="counters, warm-ups and buffers that are kept from one step to the next",
)
def later_steps(run: Run, claims: Claims, found: Found) -> None:
    """Twelve steps in a row are all right."""
    require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "1.8",
    "Works with any number of buckets",
    on=(BUCKETS,),
    owns=(BUCKETS,),
    needs=("2.1",),
    source="pytorch#63210, pytorch#48670; buckets change number, index and size after the first "
    "step",
    remedy="a count of calls, which is_last() replaces; state that is kept by bucket index instead "
    "of by parameter",
)
def several_buckets(run: Run, claims: Claims, found: Found) -> None:
    """A backward with five buckets is as right as the one before it with one bucket; the hook is
    called once per bucket."""
    require_steps(run, claims, found, run.steps("crafted"))
    for rank in run.ranks:
        for step in run.steps("crafted"):
            indices = [call["index"] for call in rank.all("call", step=step)]
            found.require(
                indices == sorted(set(indices)),
                "one call per bucket",
                f"rank {rank.rank}, step {step}: calls for buckets {indices}",
            )


@rule(
    "1.9",
    "Registers on every rank",
    on=(VALUES,),
    reads_all_runs=True,
    worlds=WorldSizes.PRIMARY,
    source="upstream behaviour: a hook on rank 0 alone is accepted",
    remedy="a set-up function that registers under `if rank == 0`",
)
def on_every_rank(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Every rank registers one hook."""
    for run in runs.values():
        for rank in run.ranks:
            registered = rank.first("registered") or {"count": 0, "logged": ""}
            # A built-in C++ hook is registered, but cannot be observed.
            if registered["count"] == 0 and registered["logged"]:
                continue
            actual = f"rank {rank.rank} registered {registered['count']} hooks"
            found.require(registered["count"] == 1, "one hook on each rank", actual)


@rule(
    "1.10",
    "Works on the bucket, not on p.grad",
    on=(VALUES, VIEWS),
    owns=(VIEWS,),
    needs=("1.5",),
    reads_all_runs=True,
    worlds=WorldSizes.PRIMARY,
    source="pytorch#61637",
    remedy="p.grad, which is other memory unless gradient_as_bucket_view=True: read and write "
    "bucket.buffer() or bucket.gradients()",
)
def bucket_not_grad(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """The result is the same with gradient_as_bucket_view=True and without it."""
    if claims.lossy:
        _require_similar(runs, claims, found)
        return
    right = {}
    for run in runs.values():
        comparisons = [oracle.compare(run, step, claims) for step in run.steps("crafted")[:3]]
        is_view = run.scenario.ddp.gradient_as_bucket_view
        right[is_view] = all(comparison.mismatch is None for comparison in comparisons)
    right_with = right.get(True)
    right_without = right.get(False)
    # A result that is wrong in both runs is a failure of 2.1.
    if not right_with and not right_without:
        return
    actual = "wrong with gradient_as_bucket_view=True, right without"
    cause = ""
    if right_with:
        actual = "right with gradient_as_bucket_view=True, wrong without"
        cause = (
            "the hook works on p.grad, which is the bucket's memory only with "
            "gradient_as_bucket_view=True"
        )
    both = bool(right_with and right_without)
    found.require(both, "the same gradients with the option and without", actual, cause)


def _require_similar(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Require nearly the same lossy results in the steps that both runs have."""
    one, other = runs.values()
    for step in range(min(len(one.scenario.steps), claims.warmup + 3)):
        for index in range(len(one.scenario.params)):
            first = one.got(0, step, index)
            second = other.got(0, step, index)
            if first is None or second is None:
                continue
            size = float(first.norm() + second.norm())
            found.require(
                float((first - second).norm()) <= 0.01 * size,
                "the same results with gradient_as_bucket_view=True and without",
                f"step {step}, parameter {one.parameter_name(index)}: they differ",
            )


@rule(
    "1.11",
    "Has a name",
    on=(VALUES,),
    needs=("1.1",),
    level=SHOULD,
    worlds=WorldSizes.PRIMARY,
    source="DDP reads hook.__name__ and hook.__qualname__: AttributeError on a functools.partial "
    "or a callable object",
    remedy="a functools.partial without functools.update_wrapper(partial, partial.func); an object "
    "without __name__ and __qualname__",
)
def named(run: Run, claims: Claims, found: Found) -> None:
    """The hook has a __name__ and a __qualname__, which DDP reads.

    The kit lends a name to a hook without one.
    """
    for rank in run.ranks:
        nameless = rank.first("nameless")
        kind = nameless["type"] if nameless else ""
        found.require(nameless is None, "a name", f"a {kind} without one: DDP would refuse it")


@rule(
    "1.12",
    "Completes gradients when it claims to",
    on=(VALUES,),
    needs=("1.5", "2.1"),
    since="1.4",
    source="torch documentation, DistributedDataParallel: gradients are averaged when backward "
    "returns; Horovod and others require a call of synchronize() first, which every training loop "
    "then has to make",
    remedy="--claims 'poststep(call=NAME)', if the trainer makes that call; otherwise a future "
    "that completes before the result is there",
)
def with_backward(run: Run, claims: Claims, found: Found) -> None:
    """Gradients are final when backward returns. Under ``poststep`` they are final after the
    claimed call, and not before.

    Without that claim, a call after backward that a set-up requests changes no gradient.
    """
    calls = [(rank.rank, called) for rank in run.ranks for called in rank.all("called")]
    changed = [(rank, called) for rank, called in calls if called["changed"]]
    if claims.poststep:
        found.require(
            bool(changed) or run.world == 1,
            "gradients that the call changes",
            f"the same bits before and after each of {len(calls)} calls: "
            "they are right when backward returns",
        )
        return
    actual = ""
    if changed:
        rank, called = changed[0]
        names = ", ".join(called["changed"])
        actual = f"rank {rank}, step {called['step']}: {names} changed with that call"
    found.require(
        not changed, "the same gradients before and after the set-up's call after backward", actual
    )


def _values(run: Run) -> list[tuple[int, dict[str, Any]]]:
    return [(rank.rank, value) for rank in run.ranks for value in rank.all("value")]


def _tensors(run: Run) -> list[tuple[int, dict[str, Any]]]:
    values = _values(run)
    return [
        (rank, value) for rank, value in values if value["state"] == "value" and value["tensor"]
    ]


def _place(rank: int, value: dict[str, Any]) -> str:
    return f"rank {rank}, step {value['step']}, bucket {value['index']}"
