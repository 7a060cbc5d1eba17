"""Section 1: what DDP asks of a hook, and does not check."""

from itertools import combinations
from typing import Any

from conformance.judging.oracles import mean as oracle
from conformance.judging.requirements import require_steps
from conformance.judging.rule import SHOULD, WorldSizes, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hook import AS_IS, BUCKETS, DTYPES, LONG, ORDERED, SHAPES, VALUES, VIEWS
from conformance.subjects.claims import Claims

DOC = "torch documentation, DistributedDataParallel.register_comm_hook"


@rule(
    "1.1",
    "registers as it is",
    on=(AS_IS, VALUES),
    owns=(AS_IS,),
    worlds=WorldSizes.PRIMARY,
    blamed_for="register",
    source=DOC + "; torch.nn.parallel.distributed looks the hook's parameters up by name",
    remedy="the second parameter must be called bucket; annotations must be absent or exactly dist.GradBucket and "
    "torch.futures.Future[torch.Tensor]; `from __future__ import annotations` turns them into strings, which DDP refuses",
)
def registers(run: Run, claims: Claims, found: Found) -> None:
    """DistributedDataParallel.register_comm_hook accepts the hook as it is, on every rank.

    Its checks are by name and identity, and their errors do not say so.
    """
    for rank in run.ranks:
        registered = rank.first("registered")
        found.require(registered is not None, "a registered hook", f"rank {rank.rank} registered none")


@rule(
    "1.2",
    "returns a future of one tensor",
    on=(VALUES,),
    worlds=WorldSizes.PRIMARY,
    blamed_for="contract",
    source=DOC + "; DDP segfaults on None",
    remedy="a forgotten return; get_future() without .then(lambda fut: fut.value()[0]); a callback that returns a future",
)
def future_of_a_tensor(run: Run, claims: Claims, found: Found) -> None:
    """Each call returns a torch.futures.Future that holds one tensor: not None, a list, a Work, or another future."""
    for rank, value in _values(run):
        what = value.get("type", value["state"])
        found.require(
            value["state"] != "value" or value["tensor"], "a future of one tensor", f"{_at(rank, value)}: the future holds {what}"
        )


@rule(
    "1.3",
    "the result lies in memory as DDP reads it",
    on=(VALUES, BUCKETS, DTYPES, SHAPES),
    blamed_for="shape",
    source=DOC + "; the reducer takes strided views of the result's storage from its start",
    remedy="return a contiguous tensor of its own: .contiguous() on a slice at offset 0 is not a copy, .clone() is",
)
def shape_and_storage(run: Run, claims: Claims, found: Found) -> None:
    """The result has the bucket's shape, is contiguous and starts at its storage's offset 0.

    DDP reads the raw storage of a strided or offset view and goes on with garbage, without a word.
    """
    for rank, value in _tensors(run):
        shape = f"shape {value['shape']}, {'contiguous' if value['contiguous'] else 'strided'}, storage offset {value['offset']}"
        right = value["shape"] == value["bucket_shape"] and value["contiguous"] and value["offset"] == 0
        found.require(right, f"shape {value['bucket_shape']}, contiguous, storage offset 0", f"{_at(rank, value)}: {shape}")


@rule(
    "1.4",
    "the result has the bucket's dtype and device",
    on=(VALUES, BUCKETS, DTYPES, SHAPES),
    blamed_for="dtype",
    source=DOC + "; the reducer's copy truncates to integers or rounds without a word",
    remedy="cast back before the future completes",
)
def dtype_and_device(run: Run, claims: Claims, found: Found) -> None:
    """The result has the bucket's dtype and device; under rounded(d), d is accepted too, since copying widens it exactly."""
    for rank, value in _tensors(run):
        dtype = next(run.ranks[rank].all("call", call=value["call"]))["dtype"]
        right = value["dtype"] in (dtype, claims.rounded) and value["device"] == value["bucket_device"]
        found.require(right, f"{dtype} on {value['bucket_device']}", f"{_at(rank, value)}: {value['dtype']} on {value['device']}")


@rule(
    "1.5",
    "every call comes to an end",
    on=(VALUES,),
    owns=(VALUES,),
    worlds=WorldSizes.PRIMARY,
    certifies_machine=True,
    source=DOC + "; DDP waits for the future without a timeout, and Ctrl-C does not reach it",
    remedy="a path that completes no future; a wait inside .then; a collective that not every rank issues; exceptions",
)
def completes(run: Run, claims: Claims, found: Found) -> None:
    """On every rank each call returns, and its future completes: no hang, no exception, no dead process."""
    for rank, value in _values(run):
        done = value["state"] == "value"
        found.require(done, "a completed future", f"{_at(rank, value)}: {value['state']} {value.get('message', '')}")


@rule(
    "1.6",
    "completes once the result is final",
    on=(ORDERED,),
    owns=(ORDERED,),
    needs=("1.5",),
    source="pytorch#43307; futures completed while the collective still writes",
    remedy="complete the future in the collective's own callback; one result buffer per bucket",
)
def final_when_complete(run: Run, claims: Claims, found: Found) -> None:
    """When the future completes the result is final: it is not written afterwards, and no two buckets share its memory.

    Judged where rank 0 has left its hook before any peer enters: what is complete by then cannot hold their part. On a device with
    streams a future may be complete as soon as the work is enqueued that its value comes from; there 21.1 says when it is final.
    """
    for rank in run.ranks:
        for step in range(len(run.scenario.steps)):
            values = list(rank.all("value", step=step, state="value", tensor=True))
            for value in values:
                returned = next(rank.all("returned", call=value["call"]))
                rest = next(rank.all("rest", call=value["call"]), {})
                early = value["bucket_device"] == "cpu" and returned["done"] and returned["digest"] != value["digest"]
                found.require(
                    not early,
                    "a future that completes with its final value",
                    f"{_at(rank.rank, value)}: complete when the hook returned, before any peer had entered its own, and written later",
                )
                found.require(
                    claims.poststep or rest.get("digest") == value["digest"],
                    "a result that nobody writes once DDP has read it",
                    f"{_at(rank.rank, value)}: other bits after the last collective of the step had ended",
                )
            _require_apart(rank.rank, values, found)


def _require_apart(rank: int, values: list[dict[str, Any]], found: Found) -> None:
    spans = sorted((value["index"], value["memory"][0], value["memory"][0] + value["memory"][1]) for value in values if value.get("memory"))
    for (one, start, end), (other, other_start, other_end) in combinations(spans, 2):
        found.require(
            start >= other_end or other_start >= end,
            "a result buffer for each bucket of a step",
            f"rank {rank}, step {values[0]['step']}: buckets {one} and {other} return the same memory",
        )


@rule(
    "1.7",
    "works on later steps as on the first",
    on=(LONG,),
    owns=(LONG,),
    needs=("2.1",),
    source="pytorch#43307: right at first, NaN from the third iteration on",
    remedy="counters, warm-ups and buffers kept from one step to the next",
)
def later_steps(run: Run, claims: Claims, found: Found) -> None:
    """Twelve steps in a row are all right."""
    require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "1.8",
    "right whatever the number of buckets",
    on=(BUCKETS,),
    owns=(BUCKETS,),
    needs=("2.1",),
    source="pytorch#63210, pytorch#48670; buckets change number, index and size after the first step",
    remedy="is_last() instead of a count of calls; state keyed by parameter instead of by bucket index",
)
def several_buckets(run: Run, claims: Claims, found: Found) -> None:
    """A backward with five buckets is as right as the one before it with one; the hook is called once per bucket."""
    require_steps(run, claims, found, run.steps("crafted"))
    for rank in run.ranks:
        for step in run.steps("crafted"):
            indices = [call["index"] for call in rank.all("call", step=step)]
            found.require(
                indices == sorted(set(indices)), "one call per bucket", f"rank {rank.rank}, step {step}: calls for buckets {indices}"
            )


@rule(
    "1.9",
    "is registered on every rank",
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
            if registered["count"] == 0 and registered["logged"]:
                continue  # a built-in C++ hook: registered, but nothing of it can be observed
            found.require(registered["count"] == 1, "one hook on each rank", f"rank {rank.rank} registered {registered['count']}")


@rule(
    "1.10",
    "works on the bucket, not on p.grad",
    on=(VALUES, VIEWS),
    owns=(VIEWS,),
    needs=("1.5",),
    reads_all_runs=True,
    worlds=WorldSizes.PRIMARY,
    source="pytorch#61637",
    remedy="read and write bucket.buffer() or bucket.gradients(); p.grad is something else unless gradient_as_bucket_view=True",
)
def bucket_not_grad(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """The result is the same with gradient_as_bucket_view=True and without: the hook works on the bucket."""
    if claims.lossy:
        _require_alike(runs, claims, found)
        return
    right = {}
    for run in runs.values():
        steps = run.steps("crafted")[:3]
        right[run.scenario.ddp.gradient_as_bucket_view] = all(oracle.compare(run, step, claims).mismatch is None for step in steps)
    if right.get(True) or right.get(False):
        found.require(
            right == {True: True, False: True},
            "the same gradients either way",
            "right with gradient_as_bucket_view=True, wrong without"
            if right.get(True)
            else "wrong with gradient_as_bucket_view=True, right without",
            "the hook works on p.grad, which is the bucket's memory only with gradient_as_bucket_view=True" if right.get(True) else "",
        )


def _require_alike(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Require nearly the same results of the steps that both have; a lossy result has no one right value."""
    one, other = runs.values()
    for step in range(min(len(one.scenario.steps), claims.warmup + 3)):
        for index in range(len(one.scenario.params)):
            a, b = one.got(0, step, index), other.got(0, step, index)
            if a is not None and b is not None:
                alike = float((a - b).norm()) <= 0.01 * float(a.norm() + b.norm())
                said = f"step {step}, parameter {one.parameter_name(index)}: they differ"
                found.require(alike, "the same results with gradient_as_bucket_view=True and without", said)


@rule(
    "1.11",
    "has a name",
    on=(VALUES,),
    needs=("1.1",),
    level=SHOULD,
    worlds=WorldSizes.PRIMARY,
    source="DDP reads hook.__name__ and hook.__qualname__: AttributeError on a functools.partial or a callable object",
    remedy="functools.update_wrapper(partial, partial.func), or __name__ and __qualname__ attributes on the object",
)
def named(run: Run, claims: Claims, found: Found) -> None:
    """The hook has a __name__ and a __qualname__, which DDP reads. The kit lends a name to one that has none."""
    for rank in run.ranks:
        nameless = rank.first("nameless")
        found.require(nameless is None, "a name", f"a {nameless['type'] if nameless else ''} without one: DDP itself would refuse it")


@rule(
    "1.12",
    "gradients are right when it says",
    on=(VALUES,),
    needs=("1.5", "2.1"),
    since="1.4",
    source="torch documentation, DistributedDataParallel: gradients are averaged when backward returns; Horovod and others have a "
    "synchronize() to call first, which every training loop then has to make",
    remedy="--claims 'poststep(call=NAME)', where the trainer makes that call; or a future that completes with the result",
)
def with_backward(run: Run, claims: Claims, found: Found) -> None:
    """Gradients are final when backward returns; or, of a hook that claims poststep, when the call has been made, and not before.

    A call after backward that a set-up asks for, and that no claim speaks of, changes no gradient.
    """
    changed = [(rank.rank, called) for rank in run.ranks for called in rank.all("called") if called["changed"]]
    if claims.poststep:
        calls = sum(1 for rank in run.ranks for _ in rank.all("called"))
        late = bool(changed) or run.world == 1
        same = f"the same bits before and after each of {calls} calls: they are right when backward returns"
        found.require(late, "gradients that the call changes", same)
        return
    rank, called = changed[0] if changed else (0, {})
    found.require(
        not changed,
        "the same gradients before and after what the set-up has called after backward",
        f"rank {rank}, step {called.get('step')}: {', '.join(called.get('changed', []))} changed with that call",
    )


def _values(run: Run) -> list[tuple[int, dict[str, Any]]]:
    return [(rank.rank, value) for rank in run.ranks for value in rank.all("value")]


def _tensors(run: Run) -> list[tuple[int, dict[str, Any]]]:
    return [(rank, value) for rank, value in _values(run) if value["state"] == "value" and value["tensor"]]


def _at(rank: int, value: dict[str, Any]) -> str:
    return f"rank {rank}, step {value['step']}, bucket {value['index']}"
