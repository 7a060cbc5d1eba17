"""Section 16: sync strategies."""

import torch

from conformance.judging.common_rules import (
    leaves_no_trace,
    refuses_fewer_ranks,
    right_however_strings_hash,
)
from conformance.judging.oracles.strategy import (
    ALL_USED,
    is_missing_gradient,
    record,
    require_ddp_restored,
    require_hooks_of_trainer,
    require_means,
    result,
    steps,
)
from conformance.judging.requirements import require_same_gaps
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.hash_seeds import STRATEGY as HASH_SEEDS
from conformance.scenarios.strategy import (
    ACCUMULATED,
    COMBINED,
    COUNTED,
    FLAT,
    FORMS,
    KEPT,
    MICROBATCHES,
    NO_DDP,
    ORDERED,
    PLAIN,
    RAISES,
    RANDOM,
    RANKS,
    SPARSE,
    SUBGROUPS,
    VIEWS,
    WITHOUT,
)
from conformance.scenarios.strategy_training import AFTER_WORLD, REWRAPPED
from conformance.subjects.claims import Claims
from conformance.subjects.kinds.strategy import CLAIM

COMPOSER = "MosaicML Composer, composer.distributed.ddp_sync_context"
ORDER = "DeepSpeed #2343, gradients that arrive in another order on each rank"
TORCH = "torch documentation, DistributedDataParallel.no_sync"


@rule(
    "16.1",
    "A single micro-batch gives the mean",
    on=(PLAIN,),
    owns=(PLAIN,),
    certifies_machine=True,
    source=f"{TORCH}; {COMPOSER}; {ORDER}",
    remedy="whether the last micro-batch synchronises at all; the divisor: the sum over W ranks is "
    "divided by W once; collectives in the order in which gradients arrive: ranks need a fixed "
    "one, as the model's; the gradient that comes last, which need not be the first parameter's",
)
def mean_of_one(run: Run, claims: Claims, found: Found) -> None:
    """After a step of one micro-batch every gradient is the mean over the ranks. Under ``counts`` a
    step has the claimed number here, and in all rules, and gradients are the sums of the means.

    On these values every right way to compute the mean gives the same bits. An optimizer that the
    strategy gets has a learning rate of 0 here: gradients are judged, and parameters stay.

    The order in which the gradients of a backward arrive is drawn from the session's seed for each
    step, here and in 16.2. In half of the steps, as the losses of several tasks may come in another
    order, parameters of as many elements change places from one rank to the next.
    """
    require_means(run, found)


@rule(
    "16.2",
    "Micro-batches accumulate",
    on=(ACCUMULATED, RANDOM),
    owns=(ACCUMULATED, RANDOM),
    needs=("16.1",),
    certifies_machine=True,
    source=f"{TORCH}; pytorch's test_accumulate_gradients_no_sync; {COMPOSER}",
    remedy="no_sync() around forward and backward of all micro-batches but the last, or an average "
    "of all that has accumulated; gradients that are set aside when a context begins: the trainer "
    "may clear them within it; collectives in the order in which gradients arrive",
)
def accumulates(run: Run, claims: Claims, found: Found) -> None:
    """After a step of 1, 2 or 4 micro-batches every gradient is the sum over micro-batches of the
    means over the ranks.

    Crafted values, for which every right order of operations gives the same bits, are judged bit
    for bit. Random values may differ by the roundings of a strategy that averages in every
    micro-batch.

    In this run and all others the trainer sets the gradients of a step aside, and clears them with
    ``zero_grad()``, which sets them to None: before the next step, or, in every other step of this
    run, between the forward and the backward of its first micro-batch. Later steps leave them
    alone, as DDP does, unless gradients are views of buckets or of the trainer's own buffers.
    """
    require_means(run, found)


@rule(
    "16.3",
    "Micro-batches may use different parameters",
    on=(MICROBATCHES,),
    owns=(MICROBATCHES,),
    needs=("16.2",),
    source=f"{COMPOSER}; pytorch #69031; composer #48",
    remedy="DDP that synchronises in the last micro-batch alone: it waits for the parameters that "
    "this micro-batch leaves out. Average all accumulated gradients, or claim find_unused or "
    "all_used",
)
def different_microbatches(run: Run, claims: Claims, found: Found) -> None:
    """If the last micro-batch of a step leaves out parameters that others have used, all gradients
    are still the means.

    A parameter that no micro-batch has used has no gradient afterwards, or zeros.
    """
    if claims.has("all_used"):
        found.does_not_apply(ALL_USED)
        return
    require_means(run, found)


@rule(
    "16.4",
    "Ranks may use different parameters",
    on=(RANKS,),
    owns=(RANKS,),
    needs=("16.3",),
    source="torch documentation, DistributedDataParallel (find_unused_parameters): unused "
    f"parameters count with zeros; {COMPOSER}",
    remedy="a loop over the gradients that a rank happens to have: ranks then send different "
    "gradients to the same collective. Loop over all parameters, with zeros for those that this "
    "rank has not used",
)
def different_ranks(run: Run, claims: Claims, found: Found) -> None:
    """If ranks use different parameters, each gradient is the mean over all ranks, with zeros for
    the ranks that have not used its parameter.

    The parameters have one shape and ranks use equally many, so that a mix-up raises no error.
    """
    if claims.has("all_used"):
        found.does_not_apply(ALL_USED)
        return
    require_means(run, found)
    # The first failure is the one that is reported: a wrong value shows more than a missing one.
    found.failures.sort(key=is_missing_gradient)


@rule(
    "16.5",
    "DDP's options work",
    on=(VIEWS, COMBINED),
    owns=(VIEWS, COMBINED),
    needs=("16.4",),
    source="torch documentation, DistributedDataParallel (gradient_as_bucket_view, "
    "find_unused_parameters); pytorch's test_accumulate_gradients_no_sync_grad_is_view",
    remedy="gradients that replace DDP's views; a parameter that only one rank has used, or none",
)
def options(run: Run, claims: Claims, found: Found) -> None:
    """Gradients are the same means with gradient_as_bucket_view, and also if find_unused_parameters
    is added while ranks and micro-batches use different parameters, some on one rank only."""
    require_means(run, found)


@rule(
    "16.6",
    "Replicas hold the same gradients",
    on=(RANDOM, RANKS, COMBINED),
    needs=("16.5",),
    source="torch documentation, DistributedDataParallel: replicas take the same steps; "
    "torch.optim skips parameters without a gradient, but not zeros",
    remedy="local computation after the collective; zeros on some ranks and None on others for a "
    "parameter that no rank has used",
)
def replicas(run: Run, claims: Claims, found: Found) -> None:
    """After a step all ranks hold the same bits of each gradient, and either all or none have one.

    An optimizer steps a parameter whose gradient is zeros, by its momentum and weight decay, but
    skips a parameter without a gradient.
    """
    if run.world == 1:
        found.does_not_apply("there is one rank")
    for rank, step in steps(run):
        first = run.group(rank)[0]
        for index in range(len(run.scenario.params)):
            mine = result(run, rank, step, index)
            other = result(run, first, step, index)
            place = f"rank {rank}, step {step}: p{index}"
            if mine is not None and other is not None:
                same = torch.equal(mine, other)
                found.require(same, f"the bits of rank {first}", f"{place} differs")
                continue
            actual = f"{place} has a gradient, but not on rank {first}"
            if mine is None:
                actual = f"{place} has no gradient, but has one on rank {first}"
            found.require(
                mine is other,
                "a gradient on every rank, or on none",
                actual,
                "to an optimizer zeros differ from no gradient",
            )


@rule(
    "16.8",
    "Existing gradients stay in the sum",
    on=(KEPT,),
    owns=(KEPT,),
    needs=("16.2", "16.10"),
    source="torch documentation, torch.Tensor.backward: gradients accumulate until they are "
    "cleared",
    remedy="gradients that are cleared or set aside when a step begins: only the trainer knows "
    "whether to clear them",
)
def kept(run: Run, claims: Claims, found: Found) -> None:
    """If gradients are not cleared after a step, the next step adds to them."""
    require_means(run, found)


@rule(
    "16.9",
    "Any process group works",
    on=(SUBGROUPS, AFTER_WORLD, REWRAPPED),
    owns=(SUBGROUPS, AFTER_WORLD, REWRAPPED),
    needs=("16.4",),
    source="torch documentation, torch.distributed.new_group: group ranks are not global ranks",
    remedy="model.process_group and its size in every collective, also in one that comes only if a "
    "rank lacks a gradient, or is for half precision or for large gradients; a global rank in "
    "place of a rank in the group; a group or its size that is kept from the first model, by "
    "id(model) or network",
)
def subgroups(run: Run, claims: Claims, found: Found) -> None:
    """Gradients of a model on a subgroup are the means over its ranks, and every collective is on
    that group. In drawn steps one group, both or neither lack the gradients of some parameters, on
    one rank or on all; not under ``all_used``. They are the means as well if the process has
    trained a model on WORLD before, which is gone, and had the id() that the model has now; and if
    the same network was trained on WORLD, then on other subgroups of this size, for one to three
    steps each, and wrapped anew.

    Drawn parameters have drawn dtypes: half precision, float32 and float64. In the model that comes
    after one on WORLD a drawn one has 2**17 to 2**19 elements."""
    if claims.has("world_only"):
        found.does_not_apply("it claims world_only, and was run on WORLD")
        return
    require_means(run, found)
    for rank in run.ranks:
        group = run.group(rank.rank)
        for event in rank.all("collective", inside=True):
            found.require(
                set(event["group"]) <= set(group),
                f"collectives over ranks {list(group)}",
                f"rank {rank.rank}, step {event['step']}: {event['what']} over ranks "
                f"{event['group']}",
                "the model's process_group was not used",
            )


@rule(
    "16.10",
    "Any dtype, shape and layout works",
    on=(FORMS, FLAT),
    owns=(FORMS, FLAT),
    needs=("16.2",),
    source="torch documentation, torch.autograd, Default gradient layouts; fused optimizers refuse "
    "gradients of other strides; apex and ZeRO, which keep gradients in flat buffers",
    remedy="one flat buffer for gradients of several dtypes; offsets after an empty or 0-d "
    "gradient; a collective, or p.grad = ..., that makes a channels_last gradient contiguous; "
    "tied weights that are recognised by storage and offset: all views of a flat buffer share the "
    "storage, and an empty view has the offset of the next view; a walk over modules that leaves "
    "out the parameters of those with submodules, or visits a tied weight twice",
)
def forms(run: Run, claims: Claims, found: Found) -> None:
    """Gradients of four dtypes in one model, 0-d, empty, channels_last and transposed ones, are
    means in their own dtype and layout; a frozen parameter has none. Gradients that are views of
    one flat buffer, as the parameters are of another one, are means, too; the values between the
    views stay.

    In the model of four dtypes drawn parameters lie in submodules, some of them beside further
    submodules, and two submodules share one parameter, which counts once.

    There are two buffers for each dtype. The order of the views and the sizes of the gaps between
    them are drawn from the session's seed. Two views of each buffer of float32 have no elements:
    each begins at the place at which another view, a drawn one, begins.
    """
    require_means(run, found)
    require_same_gaps(run, "the gradients", found)
    for rank, step in steps(run):
        names = ", ".join(f"p{index}" for index in record(run, rank, step)["strides_changed"])
        actual = f"rank {rank}, step {step}: the gradient of {names} has other strides"
        found.require(not names, "the strides of the parameter", actual)


@rule(
    "16.11",
    "Sparse gradients work, or are refused",
    on=(SPARSE,),
    owns=(SPARSE,),
    needs=("16.2",),
    may_refuse=True,
    source="torch documentation, torch.nn.Embedding (sparse); composer.distributed leaves it to "
    "the backend",
    remedy="sum sparse gradients by a collective of their own, or raise an error on every rank; "
    "add rows that come twice; divide by the number of all ranks",
)
def sparse(run: Run, claims: Claims, found: Found) -> None:
    """The gradients of two sparse embeddings, with other rows used on each rank, are the means; or
    an error on every rank refuses them. One has 10 rows, the other 66,000 to 80,000, by the
    session's seed.

    A row that is looked up twice comes twice, with a part of its values each, as from an
    embedding's backward. In two of three steps a rank looks up no row.
    """
    require_means(run, found)


@rule(
    "16.12",
    "Gradients are final when the last context ends",
    on=(ORDERED,),
    owns=(ORDERED,),
    needs=("16.2",),
    source="torch documentation, async_op: a collective's result is available after wait()",
    remedy="an asynchronous collective without a wait()",
)
def final(run: Run, claims: Claims, found: Found) -> None:
    """At the end of the last micro-batch's context gradients hold the means, so that an optimizer
    can step.

    Peers begin each micro-batch when rank 0 has completed it or waits for them. A rank that does
    not wait therefore fails every time.
    """
    require_means(run, found)


@rule(
    "16.13",
    "DDP continues without the strategy",
    on=(WITHOUT, ACCUMULATED),
    owns=(WITHOUT,),
    needs=("16.2",),
    source=f"{TORCH}: it restores the setting",
    remedy="model.require_backward_grad_sync, a hook or a patched method that is not restored when "
    "the last context ends; hooks that are removed by clearing a parameter's dict of hooks, not by "
    "their handles",
)
def without(run: Run, claims: Claims, found: Found) -> None:
    """After the last context DDP synchronises as before: a step outside of contexts gives the means
    of DDP. The trainer's own hooks on parameters run in every backward, once each."""
    for rank, step in steps(run):
        require_ddp_restored(run, rank, step, found)
    if run.scenario.name == WITHOUT.name:
        require_means(run, found)
    if run.scenario.variant == ACCUMULATED.variant:
        require_hooks_of_trainer(run, found)


@rule(
    "16.14",
    "Exceptions come out of the context unchanged",
    on=(RAISES,),
    owns=(RAISES,),
    needs=("16.10", "16.13"),
    unless="counts",
    source="Python documentation, contextlib.contextmanager: an exception in the body is raised at "
    "the yield; torch's no_sync",
    remedy="try and finally around the yield for settings to restore, not except Exception; an "
    "__exit__ that returns True; an average after an error",
)
def exception(run: Run, claims: Claims, found: Found) -> None:
    """An exception that is raised inside a context on all ranks comes out unchanged; after
    gradients are cleared, the next step gives the means.

    It is an error, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit or
    BaseException.
    """
    for rank in run.ranks:
        for event in rank.all("failed"):
            found.require(
                event["same"],
                "the exception that was raised inside",
                f"rank {rank.rank}, step {event['step']}: {event['came']} came out",
                "__exit__ returned True" if event["came"] == "nothing" else "",
            )
    # In every step: a setting that an exception has left may only show at the end of the next one.
    for rank_number, step in steps(run):
        require_ddp_restored(run, rank_number, step, found)
    require_means(run, found)


@rule(
    "16.15",
    "A module without DDP is left alone, or refused",
    on=(NO_DDP,),
    owns=(NO_DDP,),
    needs=("16.2",),
    may_refuse=True,
    source=f"{COMPOSER}: around a module without DistributedDataParallel it does nothing",
    remedy="isinstance(model, DistributedDataParallel), before anything else",
)
def no_ddp(run: Run, claims: Claims, found: Found) -> None:
    """Around a module without DDP the strategy does nothing, so that one loop serves both; or an
    error on every rank requires DDP."""
    require_means(run, found)


@rule(
    "16.16",
    "Needs the options that it claims to need",
    on=(CLAIM,),
    owns=(CLAIM,),
    needs=("16.2",),
    may_refuse=True,
    source="the claims find_unused and all_used, which relax other rules",
    remedy="leave the claim out",
)
def claimed(run: Run, claims: Claims, found: Found) -> None:
    """With DDP's default options, a strategy that claims find_unused or all_used gives a gradient
    other than the mean, or an error, if micro-batches use different parameters."""
    if not (claims.has("find_unused") or claims.has("all_used")):
        found.does_not_apply()
        return
    trial = Found()
    require_means(run, trial)
    if not trial.failures:
        actual = f"{run.name}: every gradient is the mean: {claims} is not needed"
        found.require(False, "a gradient other than the mean", actual)
        return
    found.checked(1)
    first = trial.failures[0]
    found.note(f"without {claims}: {first.actual}; {first.cause}")


fewer = refuses_fewer_ranks(
    "16.17",
    on=(PLAIN,),
    source="the claim min_world_size, without which 16.1 applies to every group",
    remedy="check the size of the model's process_group when the context is made, and raise on "
    "every rank",
)


@rule(
    "16.18",
    "Communicates once in each step",
    on=(COUNTED,),
    needs=("16.2",),
    owns=(COUNTED,),
    level=SHOULD,
    source=f"{TORCH}: micro-batches accumulate without communication; {COMPOSER}, multi_auto_sync",
    remedy="no_sync() around all micro-batches but the last",
)
def communication(run: Run, claims: Claims, found: Found) -> None:
    """In a step of four micro-batches a rank passes to collectives at most twice the bytes of its
    gradients.

    An allreduce takes these bytes once, a reduce-scatter and an all-gather take them at most one
    and a half times, and an average in every micro-batch takes them four times.
    """
    for rank, step in steps(run):
        event = record(run, rank, step)
        number, size = event["sent"]
        gradients = event["gradients"]
        found.sends(size, gradients)
        ratio = f"{size / gradients:.2f} times the bytes of its gradients, in {number} collectives"
        found.require(
            size <= 2 * gradients,
            "at most twice the bytes of its gradients",
            f"rank {rank}, step {step}: {ratio}: {size} bytes for {gradients}",
        )
        if rank == 0 and step == 0:
            found.note(f"four micro-batches: {ratio}")


no_trace = leaves_no_trace("16.19", on=(PLAIN,))


hash_seeds = right_however_strings_hash("16.38", forms, on=(HASH_SEEDS,))
