"""Section 14: averagers of parameters."""

import torch

from conformance.judging.common_rules import (
    leaves_no_trace,
    refuses_fewer_ranks,
    right_however_strings_hash,
)
from conformance.judging.oracles.averager import (
    SHIFTED,
    changed,
    due,
    never_averages,
    require_parameters_left,
    require_quiet,
    require_right,
    require_same_gradients,
    require_same_outside,
)
from conformance.judging.oracles.averager_like import (
    EVALUATED,
    require_like,
    require_nested,
    require_restored,
    require_same_agreement,
)
from conformance.judging.oracles.averager_records import calls, result
from conformance.judging.requirements import require_same_gaps
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.averager import (
    COLUMNS,
    DTYPES,
    FLAT,
    FORMS,
    INTEGERS,
    ORDERED,
    PLAIN,
    RANDOM,
    RESUMED,
    SAVED,
    SUBGROUPS,
    UNUSED,
)
from conformance.scenarios.averager_loops import CLOSE
from conformance.scenarios.averager_training import EMPTY
from conformance.scenarios.hash_seeds import AVERAGER as HASH_SEEDS
from conformance.subjects.claims import Claims

# Both the order of values in memory and the memory itself are lost by the same assignment.
IN_PLACE = "copy into the parameter (p.copy_) instead of replacing its tensor (p.data = ...)"


@rule(
    "14.1",
    "The average is the mean",
    on=(PLAIN, RANDOM),
    owns=(PLAIN, RANDOM),
    certifies_machine=True,
    baseline="like",
    source="torch documentation, Model Averaging; Lin et al., Local SGD, ICLR 2020",
    remedy="the divisor and the group: the mean over W ranks is their sum, divided by W once",
)
def mean_of_parameters(run: Run, claims: Claims, found: Found) -> None:
    """After a call that averages, every parameter holds the mean over the ranks that are averaged.

    On crafted values every right way to compute the mean gives the same bits. On random values the
    result may differ by the roundings of a sum. Rule 14.2 judges which steps average. Local steps
    write some parameters, which are drawn, by ``p.data``: that leaves their versions as they were.
    """
    require_right(run, claims, found)


@rule(
    "14.2",
    "Parameters change at the scheduled steps only",
    on=(PLAIN,),
    certifies_machine=True,
    baseline="like",
    source="torch documentation, PeriodicModelAverager and HierarchicalModelAverager",
    remedy="the count of steps: whether it begins at 0, includes warm-up steps, and includes every "
    "call",
)
def schedule(run: Run, claims: Claims, found: Found) -> None:
    """Parameters change at the steps of the claimed schedule and keep their bits at all others.

    Steps are calls, counted from 0. At world size 1 there is nothing to average with, so that
    nothing may change. Under ``like`` the steps are those at which the reference changes them.

    Long schedules run on until two averages of every period are due.
    """
    require_quiet(run, claims, found)
    if run.reference is not None:
        _require_same_schedule(run, run.reference, found)
        return
    for rank, step in calls(run):
        group = due(run, rank, step, claims)
        names = changed(run, rank, step)
        if len(group) > 1:
            found.require(
                bool(names),
                f"an average over ranks {list(group)}",
                f"rank {rank}, step {step}: no parameter has changed",
                SHIFTED,
            )
        else:
            found.require(
                not names,
                "parameters as they were: this step does not average",
                f"rank {rank}, step {step}: {', '.join(names)} changed",
                SHIFTED,
            )


@rule(
    "14.3",
    "Replicas hold the same bits",
    on=(RANDOM, CLOSE),
    owns=(CLOSE,),
    needs=("14.1", "14.2"),
    baseline="like",
    source="Lin et al., Local SGD, ICLR 2020, algorithm 1: all workers continue from one model",
    remedy="local computation after the collective, such as a sum in an order of the rank's own; "
    "an average that is left out if ranks are close to each other, or to the average before, or "
    "values small",
)
def replicas(run: Run, claims: Claims, found: Found) -> None:
    """After an average all ranks that took part in it hold the same bits.

    In a further run ranks are close to each other before each average: crafted values, whose mean
    is exact, differ by a few units in their last places. The relative distance, 1/20 to 1/2,000,000
    on two ranks, and the magnitude, 2**-27 to 2**11, are drawn for each parameter. In some averages
    all parameters are as close as possible, and tiny besides in some of these. Every other average
    has parameters that are as close to the average before. Every average is due
    as any other: all ranks hold the bits of the mean.
    """
    _require_same_bits(run, claims, found)
    if run.scenario.family == CLOSE.name and not found.failures:
        require_right(run, claims, found, must_change=True)


def _require_same_bits(run: Run, claims: Claims, found: Found) -> None:
    """Require the same bits on all ranks that are averaged together."""
    if run.reference is not None:
        require_same_agreement(run, found)
        return
    if run.world == 1:
        found.does_not_apply("there is one rank")
    for rank, step in calls(run):
        group = due(run, rank, step, claims)
        if len(group) < 2:
            continue
        for index in range(len(run.scenario.params)):
            found.require(
                torch.equal(result(run, group[0], step, index), result(run, rank, step, index)),
                f"the bits of rank {group[0]}",
                f"rank {rank}, step {step}: p{index} differs",
                "an average is left out if ranks are close to each other, or values small"
                if run.scenario.family == CLOSE.name
                else "",
            )
    if not found.checks and not found.not_applicable:
        found.lacks_evidence(never_averages(run))


@rule(
    "14.4",
    "Parameters can be passed in any form",
    on=(FORMS,),
    owns=(FORMS,),
    needs=("14.1", "14.2"),
    baseline="like",
    source="torch documentation, average_parameters_or_parameter_groups; pytorch #74136",
    remedy="an iterator that is read twice; a parameter in two groups that is averaged twice; only "
    "the first group; a test of type(p) is torch.nn.Parameter, which misses subclasses: use "
    "isinstance; a group's list that is filtered or sorted in place",
)
def forms(run: Run, claims: Claims, found: Found) -> None:
    """Each parameter is averaged once, whether it comes in a list, in an iterator that can be read
    once, or in an optimizer's groups; also if two groups have it, or if the learning rate of its
    group is zero. An averager that is made with the parameters gets them in such an iterator, too,
    as model.parameters() is one; in a list, if that raises an error, or if the signature says that
    it is a list or a sequence.

    A drawn half of the parameters is of a subclass of ``torch.nn.Parameter``, as
    packages for quantized or adapted weights have them. A frozen parameter, at a drawn place, is
    the same on all ranks and keeps its values, averaged or not.

    The list, and the groups, are the trainer's own, often those of an optimizer: after each call
    they have the parameters, in their order, and the keys and values that they had before.
    """
    require_right(run, claims, found, must_change=True)
    for rank, step in calls(run):
        event = run.ranks[rank].first("averaged", step=step) or {}
        changes = event.get("form_changes", ["?"])
        found.require(
            not changes,
            "the list and the groups as they were",
            f"rank {rank}, step {step}: another content of {', '.join(changes)}",
            "the list or the group of the caller is changed in place: make a list of your own",
        )


@rule(
    "14.5",
    "A parameter without a gradient on some ranks is averaged",
    on=(UNUSED, EMPTY),
    owns=(UNUSED, EMPTY),
    needs=("14.1", "14.2"),
    baseline="like",
    source="torch.distributed.algorithms.model_averaging.utils, which leaves out parameters "
    "without a gradient on each rank separately",
    remedy="ranks that each choose the parameters to average: let them agree first, or average all",
)
def unused(run: Run, claims: Claims, found: Found) -> None:
    """A parameter that has a gradient on some ranks of the group only is averaged on all ranks of
    the group.

    With conditional branches ranks use different parameters. If each rank leaves out its own unused
    ones, ranks send different parameters to the same collective, which mixes up their values or
    aborts. A parameter without a gradient on any rank is the same on all ranks here. In some steps
    a rank has no gradient at all, as after an empty batch. Under ``like`` the result is that of the
    reference while some rank has had a gradient in every step.
    """
    require_right(run, claims, found, must_change=True)


@rule(
    "14.6",
    "Any process group works",
    on=(SUBGROUPS,),
    owns=(SUBGROUPS,),
    needs=("14.1", "14.2"),
    baseline="like",
    source="torch documentation, torch.distributed.new_group; ranks in a group are not global "
    "ranks",
    remedy="dist.get_world_size() without the group; a collective without group=; a global rank in "
    "place of a rank in the group; a barrier of WORLD; on ranks outside of the group, "
    "get_world_size() is -1, and collectives return without an error: return at once",
)
def subgroups(run: Run, claims: Claims, found: Found) -> None:
    """On a subgroup the mean is over the ranks of the subgroup, divided by their number.

    The ranks of one group then make further calls, and those of the other group none. With the
    value that ``new_group()`` returns on a rank outside of the group, parameters stay as they are,
    or an error refuses it.

    A subject that claims ``world_only`` must average over WORLD instead.
    """
    if claims.has("world_only") and claims.has("like"):
        found.does_not_apply("it claims world_only, and the reference averages over its own group")
        return
    require_right(run, claims, found, must_change=True)
    require_same_outside(run, found)


@rule(
    "14.7",
    "Any dtype, shape and memory works",
    on=(DTYPES, FLAT, COLUMNS, INTEGERS),
    owns=(DTYPES, FLAT, COLUMNS, INTEGERS),
    refusable=(COLUMNS, INTEGERS),
    needs=("14.1", "14.2"),
    baseline="like",
    source="torch documentation, torch.cat promotes dtypes; bugs in flattened averaging; FSDP, "
    "apex and ZeRO, which keep parameters in flat buffers",
    remedy="one flat buffer for several dtypes; offsets after an empty or 0-d parameter; tied "
    "weights that are recognised by storage and offset: all views of a flat buffer share the "
    "storage, and an empty view has the offset of the next view; a slice of columns that is "
    "treated as contiguous",
)
def dtypes(run: Run, claims: Claims, found: Found) -> None:
    """In a model of float32, float64, float16 and bfloat16 parameters, 0-d, empty and one-element
    parameters among them, each gets its mean in its own dtype. So does each of several views of one
    flat buffer; the values between the views stay.

    There is one buffer for each dtype. The order of the views and the sizes of the gaps between
    them are drawn from the session's seed. Two views have no elements: the first and the last of
    the views. Each begins at the place at which another view, a drawn one, begins. One parameter
    more has the view of another, a drawn one, as tied weights have: both have its mean. An averager
    with the claim like may have a state for each of the two, and is not given it. In a
    further run the rows of a parameter have gaps between them, as those of columns of a larger
    weight; an error on every rank may refuse such a parameter.

    In another run, which may be refused likewise, parameters of int8, uint8, int32 and int64 are
    the same on all ranks, as quantized weights that are frozen. They keep their values, averaged or
    not; sums of two of them overflow. There are six or seven ranks, and each dtype has a small
    parameter and one of 2**8 to 2**17 elements; the numbers are drawn.
    """
    require_right(run, claims, found, must_change=True)
    require_same_gaps(run, "the parameters", found)


@rule(
    "14.8",
    "Strides, gradients and requires_grad stay as they were",
    on=(PLAIN, FORMS, DTYPES, FLAT, COLUMNS, INTEGERS, UNUSED),
    refusable=(COLUMNS, INTEGERS),
    source="DistributedDataParallel lays out its buckets by the strides of parameters; "
    "pytorch #73150",
    remedy=IN_PLACE,
)
def in_place(run: Run, claims: Claims, found: Found) -> None:
    """Averaging changes no parameter's strides, gradient or requires_grad, whatever its dtype and
    memory. The gradients differ between ranks, and a parameter that has none gets none: an
    optimizer would step it by its momentum and its weight decay. Autograd's grad mode is on or off
    as before: drawn calls are made under ``torch.no_grad()``.

    DDP keeps views of gradients with the layout that parameters had when DDP was made. If a
    channels_last parameter becomes contiguous, DDP permutes its gradient from then on.
    """
    for rank, step in calls(run):
        event = run.ranks[rank].first("averaged", step=step) or {}
        place = f"rank {rank}, step {step}"
        names = _names(event.get("strides_changed", ["?"]))
        actual = f"{place}: strides of {names} changed"
        found.require(not names, "the same strides as before", actual)
        names = _names(event.get("asks_for_gradients", ["?"]))
        actual = f"{place}: requires_grad of {names} changed"
        found.require(not names, "the same requires_grad as before", actual)
        found.require(
            not event.get("grad_mode_changed", True),
            "the same torch.is_grad_enabled() as before",
            f"{place}: the grad mode has changed",
            "the grad mode is set to a constant at the end: use torch.no_grad() as a context",
        )
    require_same_gradients(run, found)


@rule(
    "14.9",
    "Parameters keep their memory",
    on=(PLAIN,),
    level=SHOULD,
    source="torch documentation, torch.Tensor.data; CUDA graphs and flat views hold addresses",
    remedy=IN_PLACE,
)
def same_memory(run: Run, claims: Claims, found: Found) -> None:
    """A parameter keeps its memory, so that views, flat buffers and CUDA graphs see the average."""
    for rank, step in calls(run):
        event = run.ranks[rank].first("averaged", step=step) or {}
        names = _names(event.get("moved", ["?"]))
        actual = f"rank {rank}, step {step}: {names} moved"
        found.require(not names, "the same memory as before", actual)


@rule(
    "14.10",
    "The average is complete on return",
    on=(ORDERED,),
    owns=(ORDERED,),
    needs=("14.1", "14.2"),
    baseline="like",
    source="torch documentation, async_op: a collective's result is available after wait()",
    remedy="an asynchronous collective without a wait()",
)
def done(run: Run, claims: Claims, found: Found) -> None:
    """When the call returns, parameters hold the average.

    Peers enter each call when rank 0 has left it or waits for them. A rank that returns without
    waiting therefore fails every time.
    """
    require_right(run, claims, found, must_change=True)


@rule(
    "14.11",
    "The schedule survives a checkpoint",
    on=(SAVED, RESUMED),
    owns=(SAVED, RESUMED),
    needs=("14.1", "14.2"),
    baseline="like",
    source="torch documentation, PostLocalSGDOptimizer: unless the averager's step is restored, "
    "its warm-up begins again",
    remedy="state_dict() and load_state_dict(), or the attribute step, hold the count of calls",
)
def checkpoint(run: Run, claims: Claims, found: Found) -> None:
    """Saved at a drawn step after the first average and loaded in new processes, the averager
    continues its schedule. The model's parameters stay as they are while the state is saved or
    loaded: the trainer saves and loads the model itself.

    Its state is its state_dict() or, if it has none, its attribute ``step``, unless that is a
    method.
    """
    event = run.ranks[0].first("saved") or run.ranks[0].first("loaded")
    if event and event["nothing"]:
        found.does_not_apply(
            "it has neither state_dict() nor a count: its schedule begins anew after a checkpoint"
        )
        return
    require_parameters_left(run, found)
    require_right(run, claims, found, must_change=True)


@rule(
    "14.12",
    "Results are those of the claimed reference",
    on=(PLAIN, RANDOM, FORMS, DTYPES, FLAT, UNUSED, SUBGROUPS, ORDERED, SAVED, RESUMED),
    needs=("14.1", "14.2"),
    claimed="like",
    baseline="like",
    source="the reference's own definition, in hooks_ref",
    remedy="the reference's module, which defines the result in its first lines",
)
def like_reference(run: Run, claims: Claims, found: Found) -> None:
    """In every step the parameters are those of the reference, up to the roundings of its
    recurrence; so are the averaged copies to evaluate with, if the reference keeps any. If the
    averager has a context ``applied(params)``, it restores the parameters when it ends.

    This context writes the averages into the parameters. It restores them also if an error,
    KeyboardInterrupt, SystemExit or another BaseException ends it. Strides, gradients and
    ``requires_grad`` are then as before, views of a buffer still are views of it, and within the
    context ``state_dict()`` is the same as before. The context gets a list of parameters, or an
    iterator or groups, which it may refuse with an error. In some steps no parameter requires a
    gradient when the context begins. If one context is nested in another, parameters are the
    averages until the outer one ends, unless an error refuses the inner one. After
    ``load_state_dict()`` the context writes the loaded averages at once.

    The bound is one for each element; ``oracles/averager_like.py`` derives it. If ranks lack
    gradients, the averager may leave out other parameters than the reference, but ranks that agree
    under the reference agree here, too.
    """
    if claims.has("world_only") and run.scenario.groups:
        found.does_not_apply("it claims world_only, and the reference averages over its own group")
        return
    require_like(run, claims, found, EVALUATED)
    require_restored(run, found)
    require_nested(run, found)


fewer = refuses_fewer_ranks(
    "14.13",
    on=(PLAIN,),
    source="torch documentation, HierarchicalModelAverager: raises if the group sizes do not fit",
    remedy="check the group's size when the averager is made, or in its first call, and raise on "
    "every rank",
)

no_trace = leaves_no_trace("14.14", on=(PLAIN,))


def _require_same_schedule(run: Run, reference: Run, found: Found) -> None:
    """Require changes at the steps at which the reference changes the parameters."""
    for rank, step in calls(run):
        right = bool(changed(reference, rank, step))
        names = changed(run, rank, step)
        found.require(
            bool(names) == right,
            "an average" if right else "parameters as they were",
            f"rank {rank}, step {step}: {', '.join(names) or 'no parameter'} changed",
            SHIFTED,
        )


def _names(indices: list[int | str]) -> str:
    return ", ".join(f"p{index}" for index in indices)


hash_seeds = right_however_strings_hash("14.28", dtypes, on=(HASH_SEEDS,))
