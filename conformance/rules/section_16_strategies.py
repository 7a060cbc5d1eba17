"""Section 16: sync strategies."""

import torch

from conformance.judging.oracles.strategy import NO_GRADIENT, _as_before, _got, _means, _said, _steps
from conformance.judging.rule import SHOULD, WorldSizes, rule
from conformance.judging.side_effects import left_behind
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.strategy import (
    ACCUMULATED,
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
    raises_in,
)
from conformance.subjects.claims import Claims
from conformance.subjects.kinds.strategy import CLAIM

ALL_USED = "it claims all_used: 16.16"
COMPOSER = "MosaicML Composer, composer.distributed.ddp_sync_context"
TORCH = "torch documentation, DistributedDataParallel.no_sync"


@rule(
    "16.1",
    "A micro-batch alone gives the mean",
    on=(PLAIN,),
    owns=(PLAIN,),
    certifies_machine=True,
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
    certifies_machine=True,
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
    worlds=WorldSizes.BELOW_MINIMUM,
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
