"""Section 16: sync strategies."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from conformance.claims import Claims
from conformance.kinds.strategy import (
    ACCUMULATED,
    CLAIM,
    COMBINED,
    COUNTED,
    FORMS,
    KEPT,
    MICROBATCHES,
    NO_DDP,
    ORDERED,
    PLAIN,
    RAISES,
    RANDOM,
    RANKS,
    SHARED,
    SPARSE,
    SUBGROUPS,
    VIEWS,
    WITHOUT,
    batches,
    clears,
    multiple,
    raises_in,
    uses,
)
from conformance.leftovers import left_behind
from conformance.rulebook import SHOULD, rule
from conformance.run import Run, fed
from conformance.verdict import Found

ALL_USED = "it claims all_used: 16.16"
EXPLAINED = 50  # failures of a run whose causes are looked for
NO_GRADIENT = ": there is no gradient"
COMPOSER = "MosaicML Composer, composer.distributed.ddp_sync_context"
TORCH = "torch documentation, DistributedDataParallel.no_sync"


@rule(
    "16.1",
    "A micro-batch alone gives the mean",
    on=(PLAIN,),
    owns=(PLAIN,),
    source=f"{TORCH}; {COMPOSER}",
    remedy="whether the last micro-batch synchronises at all; the divisor: the sum over W ranks is divided by W, once",
)
def mean_of_one(run: Run, claims: Claims, found: Found) -> None:
    """After a step of one micro-batch every gradient is the mean over the ranks.

    Values are such that every right way to the mean gives the same bits.
    """
    _means(run, found)


@rule(
    "16.2",
    "Micro-batches accumulate",
    on=(ACCUMULATED, RANDOM),
    owns=(ACCUMULATED, RANDOM),
    needs=("16.1",),
    source=f"{TORCH}; pytorch's test_accumulate_gradients_no_sync; {COMPOSER}",
    remedy="no_sync() around forward and backward of all micro-batches but the last, or an average of all that has accumulated",
)
def accumulates(run: Run, claims: Claims, found: Found) -> None:
    """After a step of 1, 2 or 4 micro-batches every gradient is the sum over micro-batches of the means over the ranks.

    Bit for bit with values where every right order of operations gives the same bits; random ones within the roundings that a
    strategy can have which averages in every micro-batch.
    """
    _means(run, found)


@rule(
    "16.3",
    "Micro-batches that use different parameters",
    on=(MICROBATCHES,),
    owns=(MICROBATCHES,),
    needs=("16.2",),
    source=f"{COMPOSER}; pytorch #69031; composer #48",
    remedy="DDP that synchronises in the last micro-batch alone waits for what that does not use: average all that has accumulated, or "
    "claim what it needs: find_unused or all_used",
)
def different_microbatches(run: Run, claims: Claims, found: Found) -> None:
    """Where the last micro-batch of a step leaves out parameters that others have used, all gradients are the means all the same.

    A parameter that none has used has no gradient afterwards, or zeros.
    """
    if claims.has("all_used"):
        found.does_not_apply(ALL_USED)
        return
    _means(run, found)


@rule(
    "16.4",
    "Ranks that use different parameters",
    on=(RANKS,),
    owns=(RANKS,),
    needs=("16.3",),
    source=f"torch documentation, DistributedDataParallel (find_unused_parameters): unused parameters count with zeros; {COMPOSER}",
    remedy="ranks that each go through the gradients that they have send different ones to the same collective: go through all "
    "parameters, with zeros for those that this rank has not used",
)
def different_ranks(run: Run, claims: Claims, found: Found) -> None:
    """Where ranks use different parameters, each gradient is the mean over all ranks, with zeros for those that have not used it.

    The parameters have one shape, and ranks use as many of them: what is mixed up here raises no error.
    """
    if claims.has("all_used"):
        found.does_not_apply(ALL_USED)
        return
    _means(run, found)
    found.failures.sort(key=lambda failure: failure.actual.endswith(NO_GRADIENT))  # a wrong one says more than one that is not there


@rule(
    "16.5",
    "DDP's options",
    on=(VIEWS, COMBINED),
    owns=(VIEWS, COMBINED),
    needs=("16.4",),
    source="torch documentation, DistributedDataParallel (gradient_as_bucket_view, find_unused_parameters); pytorch's "
    "test_accumulate_gradients_no_sync_grad_is_view",
    remedy="gradients that are put in place of DDP's views; a parameter that one rank alone has used, or none",
)
def options(run: Run, claims: Claims, found: Found) -> None:
    """With gradient_as_bucket_view, and with find_unused_parameters too where ranks and micro-batches use different parameters, some
    of them on one rank alone, gradients are the same means."""
    _means(run, found)


@rule(
    "16.6",
    "Replicas hold the same gradients",
    on=(RANDOM, RANKS, COMBINED),
    needs=("16.5",),
    source="torch documentation, DistributedDataParallel: replicas take the same steps; torch.optim skips what has no gradient, not zeros",
    remedy="what each rank computes by itself after the collective; zeros or None for what no rank has used, on some ranks alone",
)
def replicas(run: Run, claims: Claims, found: Found) -> None:
    """After a step all ranks have the same bits in each gradient, and those that have a gradient of a parameter are all or none.

    An optimizer steps a parameter whose gradient is zeros, by its momentum and weight decay, and skips one that has none.
    """
    if run.world == 1:
        found.does_not_apply("there is one rank")
    for rank, step in _steps(run):
        first = run.group(rank)[0]
        for index in range(len(run.scenario.params)):
            mine, other = _got(run, rank, step, index), _got(run, first, step, index)
            where = f"rank {rank}, step {step}: p{index}"
            if mine is None or other is None:
                both = mine is other
                had = (
                    f"{where} has {'a' if mine is not None else 'no'} gradient, on rank {first} it has {'one' if mine is None else 'none'}"
                )
                found.require(both, "a gradient on every rank, or on none", had, "zeros are not the same as no gradient to an optimizer")
            else:
                found.require(torch.equal(mine, other), f"what rank {first} holds", f"{where} differs")


@rule(
    "16.7",
    "Optimizers that share a parameter",
    on=(SHARED,),
    owns=(SHARED,),
    needs=("16.2",),
    source=f"{COMPOSER}, whose forced_sync goes through the parameters of every optimizer",
    remedy="go through each parameter once, or divide only what was summed just now",
)
def shared(run: Run, claims: Claims, found: Found) -> None:
    """A parameter of two optimizers is averaged as the others are: not divided, and not summed, once more."""
    _means(run, found)


@rule(
    "16.8",
    "Gradients that were there stay in the sum",
    on=(KEPT,),
    owns=(KEPT,),
    needs=("16.2",),
    source="torch documentation, torch.Tensor.backward: gradients accumulate until they are cleared",
    remedy="gradients that are cleared, or kept apart, where a step begins: only the trainer knows whether they are to be",
)
def kept(run: Run, claims: Claims, found: Found) -> None:
    """Where gradients are not cleared after a step, the next one adds to them."""
    _means(run, found)


@rule(
    "16.9",
    "Any group",
    on=(SUBGROUPS,),
    owns=(SUBGROUPS,),
    needs=("16.2",),
    source="torch documentation, torch.distributed.new_group; ranks in a group are not global ranks",
    remedy="model.process_group, and its size, in every collective; a global rank where a place in the group is meant",
)
def subgroups(run: Run, claims: Claims, found: Found) -> None:
    """Of a model that lives on a subgroup gradients are the means over its ranks, and no collective is on others."""
    _means(run, found)
    for record in run.ranks:
        group = run.group(record.rank)
        for issued in record.all("collective", inside=True):
            said = f"rank {record.rank}, step {issued['step']}: {issued['what']} over ranks {issued['group']}"
            is_own = set(issued["group"]) <= set(group)
            found.require(is_own, f"collectives over ranks {list(group)}", said, "the model's process_group was not used")


@rule(
    "16.10",
    "Any dtype, shape and layout",
    on=(FORMS,),
    owns=(FORMS,),
    needs=("16.2",),
    source="torch documentation, torch.autograd, Default gradient layouts; fused optimizers refuse gradients of other strides",
    remedy="one flat buffer for gradients of several dtypes; offsets where one is empty or 0-d; a collective, or p.grad = ..., that makes "
    "a channels_last gradient contiguous",
)
def forms(run: Run, claims: Claims, found: Found) -> None:
    """Gradients of four dtypes in one model, 0-d, empty, channels_last and transposed ones, are means in their own dtype, and are
    laid out as their parameters are; a frozen parameter has none."""
    _means(run, found)
    for rank, step in _steps(run):
        names = [f"p{index}" for index in _said(run, rank, step)["strides_changed"]]
        found.require(not names, "the strides of the parameter", f"rank {rank}, step {step}: the gradient of {', '.join(names)} has others")


@rule(
    "16.11",
    "Sparse gradients, or a clear refusal",
    on=(SPARSE,),
    owns=(SPARSE,),
    needs=("16.2",),
    may_refuse=True,
    source="torch documentation, torch.nn.Embedding (sparse); composer.distributed leaves it to the backend",
    remedy="sum sparse gradients by a collective of their own, or raise an error on every rank",
)
def sparse(run: Run, claims: Claims, found: Found) -> None:
    """The gradient of a sparse embedding, of which ranks use different rows, is the mean; or an error on every rank says that it
    cannot be."""
    _means(run, found)


@rule(
    "16.12",
    "Gradients are final when the last context is left",
    on=(ORDERED,),
    owns=(ORDERED,),
    needs=("16.2",),
    source="torch documentation, async_op: a collective's result is there after wait()",
    remedy="an asynchronous collective that nobody waits for",
)
def final(run: Run, claims: Claims, found: Found) -> None:
    """When the context of the last micro-batch has been left, gradients hold the means: an optimizer can take its step.

    Peers begin each micro-batch when rank 0 is done with it, or waits for them: one that does not wait is found out every time.
    """
    _means(run, found)


@rule(
    "16.13",
    "DDP goes on without it",
    on=(WITHOUT, ACCUMULATED),
    owns=(WITHOUT,),
    needs=("16.2",),
    source=f"{TORCH}: it restores what it has set",
    remedy="model.require_backward_grad_sync, a hook or a patched method that is not put back when the last context is left",
)
def without(run: Run, claims: Claims, found: Found) -> None:
    """After the last context DDP synchronises as it did before: a step outside of any context gives DDP's means."""
    for rank, step in _steps(run):
        _as_before(run, rank, step, found)
    if run.scenario.name == WITHOUT.name:
        _means(run, found)


@rule(
    "16.14",
    "An exception comes out as it is",
    on=(RAISES,),
    owns=(RAISES,),
    needs=("16.13",),
    source="Python documentation, contextlib.contextmanager: what is raised in the body is raised at the yield; torch's no_sync",
    remedy="try and finally around the yield, where something is to be put back; an __exit__ that returns True; an average after an error",
)
def exception(run: Run, claims: Claims, found: Found) -> None:
    """What is raised inside a context, on all ranks, comes out of it unchanged; gradients cleared, the next step gives the means."""
    for record in run.ranks:
        for event in record.all("failed"):
            what = f"rank {record.rank}, step {event['step']}: {event['came']} came out"
            found.require(
                event["same"], "the exception that was raised inside", what, "__exit__ returned True" * (event["came"] == "nothing")
            )
    for rank, step in _steps(run):
        if raises_in(run.scenario, step) is not None:
            _as_before(run, rank, step, found)
    _means(run, found)


@rule(
    "16.15",
    "A module without DDP",
    on=(NO_DDP,),
    owns=(NO_DDP,),
    needs=("16.2",),
    may_refuse=True,
    source=f"{COMPOSER}: around a module that is no DistributedDataParallel it does nothing",
    remedy="isinstance(model, DistributedDataParallel), before anything else",
)
def no_ddp(run: Run, claims: Claims, found: Found) -> None:
    """Around a module that is not wrapped in DDP it does nothing, so that one loop serves both; or an error on every rank says that
    there has to be one."""
    _means(run, found)


@rule(
    "16.16",
    "It needs what it claims",
    on=(CLAIM,),
    owns=(CLAIM,),
    needs=("16.2",),
    may_refuse=True,
    source="the claims find_unused and all_used, which ask less of it",
    remedy="leave the claim out",
)
def claimed(run: Run, claims: Claims, found: Found) -> None:
    """What claims find_unused or all_used is not right without: with DDP as it is by default, where micro-batches use different
    parameters, a gradient is not the mean, or there is an error."""
    if not (claims.has("find_unused") or claims.has("all_used")):
        found.does_not_apply()
        return
    tried = Found()
    _means(run, tried)
    found.require(
        bool(tried.failures), "a gradient that is not the mean", f"{run.name}: every gradient is the mean: {claims} is not needed"
    )
    if tried.failures:
        found.note(f"without {claims}: {tried.failures[0].actual}; {tried.failures[0].cause}")


@rule(
    "16.17",
    "Smaller groups than it says are refused",
    on=(PLAIN,),
    worlds="fewer",
    claimed="min_world_size",
    source="the claim min_world_size, without which 16.1 asks it of every group",
    remedy="check the size of the model's process_group where the context is made, and raise on every rank",
)
def fewer(run: Run, claims: Claims, found: Found) -> None:
    """In a group of fewer ranks than it claims to take, it raises an error on every rank."""
    found.require(False, "an error on every rank", f"{run.name}: it ran to its end", "min_world_size is claimed and not checked")


@rule(
    "16.18",
    "It communicates once a step",
    on=(COUNTED,),
    needs=("16.2",),
    owns=(COUNTED,),
    level=SHOULD,
    source=f"{TORCH}: micro-batches accumulate without communication; {COMPOSER}, multi_auto_sync",
    remedy="no_sync() around all micro-batches but the last",
)
def communication(run: Run, claims: Claims, found: Found) -> None:
    """In a step of four micro-batches a rank gives collectives at most twice the bytes of its gradients.

    An allreduce is given them once, a reduce-scatter and an all-gather at most one and a half times; an average in every
    micro-batch four times.
    """
    for rank, step in _steps(run):
        said = _said(run, rank, step)
        number, size = said["sent"]
        found.sends(size, said["gradients"])
        times = f"{size / said['gradients']:.2f} times the bytes of its gradients, in {number} collectives"
        found.require(size <= 2 * said["gradients"], "twice the bytes of its gradients at most", f"rank {rank}, step {step}: {times}")
        if rank == 0 and step == 0:
            found.note(f"four micro-batches: {times}")


@rule(
    "16.19",
    "It leaves the process as it was",
    on=(PLAIN, ACCUMULATED),
    source="torch documentation, reproducibility; the same as 9.1, 9.3, 9.4 and 9.6 of hooks",
    remedy="a seed that is set, a global setting or a patched function that is not put back, a thread or a file that is left",
)
def leaves_no_trace(run: Run, claims: Claims, found: Found) -> None:
    """Random generators, torch's settings, functions of torch and Python, and the process's threads, children and temporary files
    are after it what they were before."""
    left_behind(run, found)


def _as_before(run: Run, rank: int, step: int, found: Found) -> None:
    """Require that DDP synchronises by itself, as it did before, when the context of a last micro-batch has been left."""
    batch = raises_in(run.scenario, step)
    if batch is None or batch == batches(run.scenario, step) - 1:
        on = _said(run, rank, step)["synchronises"]
        left = f"rank {rank}, step {step}: model.require_backward_grad_sync is {on} when the last context is left"
        found.require(
            on, "it is True, as before", left, "what was set for the context was not put back" + " after an error" * (batch is not None)
        )


def right(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return what the gradient of a parameter is to be after a step, flat in float64: zeros where no rank has used it."""
    total = torch.zeros_like(_fed(run, rank, step, 0, index))
    for at, batch in _parts(run, step):
        total += _mean(run, rank, at, batch, index)
    return total


def _means(run: Run, found: Found) -> None:
    """Require the right gradients after every step that was not cut short."""
    alike: dict[int, list[str]] = {}  # by the place of a failure, the mistakes that make such a value
    for rank, step in _steps(run):
        if raises_in(run.scenario, step) is not None:
            continue
        for index in range(len(run.scenario.params)):
            wanted, got = right(run, rank, step, index), _got(run, rank, step, index)
            where, used = f"rank {rank}, step {step}, p{index}", _is_used(run, rank, step, index)
            if got is None:
                found.require(not used, "the mean", f"{where}{NO_GRADIENT}", _none(run, rank, step, index))
                continue
            bound = 0.0 * wanted if run.scenario.steps[step] == "crafted" else _roundings(run, rank, step, index)
            wrong = (~((got - wanted).abs() <= bound)).nonzero()
            if not len(wrong):
                found.checked(1)
                continue
            at = int(wrong[0])
            expected = f"the sum over micro-batches of the means: {wanted[at].item():.9g}" if used else "no gradient, or zeros"
            actual = f"{where}, index {at}: {got[at].item():.9g} ({len(wrong)} of {len(got)} elements differ)"
            found.require(False, expected, actual)
            if len(alike) < EXPLAINED:
                alike[len(found.failures) - 1] = _causes(run, rank, step, index, got)
    often = Counter(name for names in alike.values() for name in names)
    for place, names in alike.items():
        found.failures[place].cause = max(names, key=often.__getitem__, default="")


def _roundings(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return how far a right result can be from the sum of means.

    With n micro-batches, each value goes through at most n accumulations and n averages; an average over W ranks is W - 1 sums
    and a product with a rounded quotient: W + 2 roundings of half an eps each, relative to what has come together, in each of the
    n. The bound is twice that.
    """
    size, parts = _size(run, rank), list(_parts(run, step))
    together = torch.stack([_fed(run, other, at, b, index).abs() for at, b in parts for other in _ranks(run, rank)]).sum(0) / size
    return together * len(parts) * (size + 2) * torch.finfo(getattr(torch, run.scenario.params[index].dtype)).eps


def _causes(run: Run, rank: int, step: int, index: int, got: torch.Tensor) -> list[str]:
    """Name the known mistakes that make this of these values; of several, the first is the likeliest."""
    size, wanted, own = _size(run, rank), right(run, rank, step, index), _own(run, rank, step, index)
    dtype = run.scenario.params[index].dtype
    over_world = torch.stack([_own(run, other, step, index) for other in range(run.world)]).mean(0)
    if dtype not in ("float32", "float64"):
        return []  # where different mistakes round to the same
    if run.scenario.name == NO_DDP.name:
        return ["it was averaged over ranks, though there is no DDP"] if _alike(got, over_world) else []
    users = sum(_has_used(run, other, step, index) for other in _ranks(run, rank))
    known = {
        **({"averaged over WORLD": over_world, "divided by the size of WORLD": wanted * size / run.world} if run.scenario.groups else {}),
        "averaged over the ranks alone that have used it: the zeros of the others count too": wanted * size / max(users, 1),
        "each rank keeps its own: what has accumulated was not synchronised, a lost sync": own,
        "each rank has its own, divided: it was not summed, or not yet": own / size,
        "the sum, not divided": wanted * size,
        "divided twice": wanted / size,
        **_of_some(run, rank, step, index),
        "the k-th gradients of all ranks were averaged together, whatever parameters they belong to": _mixed(run, rank, step, index),
    }
    names = [name for name, value in known.items() if value is not None and _alike(got, value) and not _alike(wanted, value)]
    return names or ["it went through float32"] * (dtype == "float64" and torch.equal(got, got.float().double()))


def _of_some(run: Run, rank: int, step: int, index: int) -> dict[str, torch.Tensor]:
    """Return by their names the results of mistakes with some of the micro-batches."""
    parts = list(_parts(run, step))
    before, now = [part for part in parts if part[0] < step], [part for part in parts if part[0] == step]
    means, own = ({p: of(run, rank, *p, index) for p in parts} for of in (_mean, _fed))
    total = torch.stack(list(means.values())).sum(0)
    known = {"divided by the number of micro-batches": total / len(now)}
    if before:
        known["gradients that were there before the step are missing"] = total - torch.stack([means[p] for p in before]).sum(0)
    for number in range(1, len(now)):
        for some in itertools.combinations(now, number):
            names = ", ".join(str(batch) for _, batch in some)
            rest = total - torch.stack([means[p] for p in some]).sum(0)
            known[f"micro-batch {names} is missing"] = rest
            known[f"of micro-batch {names} each rank keeps its own"] = rest + torch.stack([own[p] for p in some]).sum(0)
    return known


def _mixed(run: Run, rank: int, step: int, index: int) -> torch.Tensor | None:
    """Return the mean of this gradient and those of other ranks that are as far down their lists of gradients, if shapes allow it."""
    lists = {other: [i for i in range(len(run.scenario.params)) if _has_used(run, other, step, i)] for other in _ranks(run, rank)}
    if index not in lists[rank]:
        return None
    place = lists[rank].index(index)
    if any(place >= len(those) for those in lists.values()):
        return None
    values = [_own(run, other, step, those[place]) for other, those in lists.items()]
    return torch.stack(values).mean(0) if len({len(value) for value in values}) == 1 else None


def _none(run: Run, rank: int, step: int, index: int) -> str:
    """Say why a gradient may be missing."""
    used = _has_used(run, rank, step, index)
    return "it was lost" if used else "this rank has not used the parameter, and was not given the mean of those that have"


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(len(one)) and torch.allclose(one, other, rtol=1e-5, atol=0.0)


def _steps(run: Run) -> Iterator[tuple[int, int]]:
    """Yield (rank, step) of every step on record."""
    for rank in run.ranks:
        for event in rank.all("synchronised"):
            yield rank.rank, event["step"]


def _said(run: Run, rank: int, step: int) -> dict[str, Any]:
    said = run.ranks[rank].first("synchronised", step=step)
    assert said is not None
    return said


def _parts(run: Run, step: int) -> Iterator[tuple[int, int]]:
    """Yield (step, micro-batch) of all that gradients hold after a step."""
    begin = step
    while not clears(run.scenario, begin):
        begin -= 1
    for at in range(begin, step + 1):
        for batch in range(batches(run.scenario, at)):
            yield at, batch


def _ranks(run: Run, rank: int) -> tuple[int, ...]:
    """Return the ranks that gradients of ``rank`` are averaged over: itself, where there is no DDP."""
    return (rank,) if run.scenario.name == NO_DDP.name else run.group(rank)


def _size(run: Run, rank: int) -> int:
    return len(_ranks(run, rank))


def _mean(run: Run, rank: int, step: int, batch: int, index: int) -> torch.Tensor:
    return torch.stack([_fed(run, other, step, batch, index) for other in _ranks(run, rank)]).mean(0)


def _own(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the sum of what a rank has fed of a parameter."""
    return torch.stack([_fed(run, rank, at, batch, index) for at, batch in _parts(run, step)]).sum(0)


def _fed(run: Run, rank: int, step: int, batch: int, index: int) -> torch.Tensor:
    """Return what a micro-batch of a rank adds to a gradient, in float64."""
    scenario, spec, group = run.scenario, run.scenario.params[index], run.group(rank)
    values = fed(scenario.steps[step], spec, len(group), rank, step, index)
    if not uses(scenario, len(group), group.index(rank), step, batch, index):
        return torch.zeros_like(values)
    # In the dtype of the parameter, as on the rank.
    return (values * multiple(len(group), batches(scenario, step), batch)).to(getattr(torch, spec.dtype)).double()


def _has_used(run: Run, rank: int, step: int, index: int) -> bool:
    group = run.group(rank)
    return any(uses(run.scenario, len(group), group.index(rank), at, batch, index) for at, batch in _parts(run, step))


def _is_used(run: Run, rank: int, step: int, index: int) -> bool:
    """Whether any rank has used a parameter since gradients were cleared."""
    return any(_has_used(run, other, step, index) for other in _ranks(run, rank))


def _got(run: Run, rank: int, step: int, index: int) -> torch.Tensor | None:
    got = run.ranks[rank].tensors.get(f"{step}/grad/p{index}")
    return None if got is None else got.reshape(-1).double()
