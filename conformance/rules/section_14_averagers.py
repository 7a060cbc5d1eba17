"""Section 14: averagers of parameters."""

import torch

from conformance.judging.oracles.averager import LIKE, _as_alike, _calls, _changed, _got, _means, _never, due
from conformance.judging.rule import SHOULD, WorldSizes, rule
from conformance.judging.side_effects import left_behind
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.averager import DTYPES, FORMS, ORDERED, PLAIN, RANDOM, RESUMED, SAVED, SUBGROUPS, UNUSED
from conformance.subjects.claims import Claims

EVERYWHERE = (PLAIN, RANDOM, FORMS, DTYPES, UNUSED, SUBGROUPS, ORDERED, SAVED, RESUMED)
ALIKE = 2.0**-10  # see 14.12
SHIFTED = "the schedule is shifted, or a step was not counted, or counted twice"


@rule(
    "14.1",
    "The average is the mean",
    on=(PLAIN, RANDOM),
    owns=(PLAIN, RANDOM),
    certifies_machine=True,
    source="torch documentation, Model Averaging; Lin et al., Local SGD, ICLR 2020",
    remedy="the divisor, and the group: the mean over W ranks is the sum divided by W, once",
)
def mean_of_parameters(run: Run, claims: Claims, found: Found) -> None:
    """At a step that averages, every parameter holds the mean over the ranks that are averaged.

    Values are such that every right way to the mean gives the same bits, and random ones, where it is held to the roundings
    that a sum may have. Which steps average is 14.2's.
    """
    _means(run, claims, found)


@rule(
    "14.2",
    "It averages when it says",
    on=(PLAIN,),
    certifies_machine=True,
    source="torch documentation, PeriodicModelAverager and HierarchicalModelAverager",
    remedy="the count of steps: whether it begins at 0, whether warm-up steps are counted, whether every call counts",
)
def schedule(run: Run, claims: Claims, found: Found) -> None:
    """Parameters change at the steps that the schedule names, and stay what they are, bit for bit, at all others.

    Steps are the calls, counted from 0. Where it averages with none, as at world size 1, nothing can change.
    """
    if claims.has("like"):
        found.does_not_apply(LIKE)
        return
    for rank, step in _calls(run):
        group, changed = due(run, rank, step, claims), _changed(run, rank, step)
        if len(group) > 1:
            what = f"rank {rank}, step {step}: no parameter has changed"
            found.require(bool(changed), f"an average over ranks {list(group)}", what, SHIFTED)
        else:
            what = f"rank {rank}, step {step}: {', '.join(changed)} changed"
            found.require(not changed, "parameters as they were: this step does not average", what, SHIFTED)


@rule(
    "14.3",
    "Replicas hold the same bits",
    on=(RANDOM,),
    needs=("14.1", "14.2"),
    source="Lin et al., Local SGD, ICLR 2020, algorithm 1: all workers go on from one model",
    remedy="what each rank computes by itself after the collective: an order of summation of its own",
)
def replicas(run: Run, claims: Claims, found: Found) -> None:
    """After an average, all ranks that took part in it hold the same bits."""
    if claims.has("like"):
        found.does_not_apply(LIKE)
        return
    if run.world == 1:
        found.does_not_apply("there is one rank")
    for rank, step in _calls(run):
        group = due(run, rank, step, claims)
        for index in range(len(run.scenario.params)) if len(group) > 1 else ():
            first, other = _got(run, group[0], step, index), _got(run, rank, step, index)
            found.require(torch.equal(first, other), f"what rank {group[0]} holds", f"rank {rank}, step {step}: p{index} differs")
    if not found.checks and not found.not_applicable:
        found.does_not_apply(_never(run))


@rule(
    "14.4",
    "Parameters in any form",
    on=(FORMS,),
    owns=(FORMS,),
    needs=("14.1", "14.2"),
    source="torch documentation, average_parameters_or_parameter_groups; pytorch #74136",
    remedy="an iterator that is read twice; a parameter in two groups that is averaged twice; only the first group",
)
def forms(run: Run, claims: Claims, found: Found) -> None:
    """Parameters come as a list, as an iterator that can be read once, as an optimizer's groups, or with one in two groups;
    each is averaged once.

    A frozen parameter is the same on all ranks, and stays what it is, whether it is averaged or not.
    """
    _means(run, claims, found, must_change=True)


@rule(
    "14.5",
    "A gradient that some ranks lack",
    on=(UNUSED,),
    owns=(UNUSED,),
    needs=("14.1", "14.2"),
    source="torch.distributed.algorithms.model_averaging.utils, which leaves out parameters without a gradient on each rank for itself",
    remedy="ranks decide each for itself which parameters to average: let them agree first, or average all",
)
def unused(run: Run, claims: Claims, found: Found) -> None:
    """A parameter that has a gradient on some ranks of the group, and none on others, is averaged on all of them.

    With conditional branches ranks use different parameters. Ranks that each leave out their own send different ones to the
    same collective: the values of others, or an abort. What has no gradient anywhere is the same on all ranks here.
    """
    _means(run, claims, found, must_change=True)


@rule(
    "14.6",
    "Any group",
    on=(SUBGROUPS,),
    owns=(SUBGROUPS,),
    needs=("14.1", "14.2"),
    source="torch documentation, torch.distributed.new_group; ranks in a group are not global ranks",
    remedy="dist.get_world_size() without the group; a collective without group=; a global rank where a place in the group is meant",
)
def subgroups(run: Run, claims: Claims, found: Found) -> None:
    """On a subgroup, the mean is over its ranks, with its size, whatever WORLD is."""
    _means(run, claims, found, must_change=True)


@rule(
    "14.7",
    "Any dtype and shape",
    on=(DTYPES,),
    owns=(DTYPES,),
    needs=("14.1", "14.2"),
    source="torch documentation, torch.cat promotes dtypes; bugs in flattened averaging",
    remedy="one flat buffer for parameters of several dtypes; offsets where a parameter is empty or 0-d",
)
def dtypes(run: Run, claims: Claims, found: Found) -> None:
    """Parameters of float32, float64, float16 and bfloat16 in one model, 0-d, empty and of one element, have their means, each
    in its own dtype."""
    _means(run, claims, found, must_change=True)


@rule(
    "14.8",
    "Strides, gradients and requires_grad stay",
    on=(PLAIN, FORMS),
    source="DistributedDataParallel lays its buckets out by the strides that parameters have; pytorch #73150",
    remedy="copy into the parameter (p.copy_) instead of putting another tensor in its place (p.data = ...)",
)
def in_place(run: Run, claims: Claims, found: Found) -> None:
    """Averaging leaves each parameter's strides, its gradient and its requires_grad what they were.

    DDP has views of gradients that are laid out as parameters were when it was made: for a channels_last parameter that has
    become contiguous it permutes the gradient from then on.
    """
    for rank, step in _calls(run):
        said = run.ranks[rank].first("averaged", step=step) or {}
        for what in ("strides", "grads"):
            names = [f"p{index}" for index in said.get(f"{what}_changed", ["?"])]
            found.require(not names, f"the {what} that they had", f"rank {rank}, step {step}: {what} of {', '.join(names)} changed")
        wrong = [f"p{index}" for index in said.get("asks_for_gradients", ["?"])]
        found.require(not wrong, "requires_grad as it was", f"rank {rank}, step {step}: requires_grad of {', '.join(wrong)} changed")


@rule(
    "14.9",
    "Parameters stay where they are",
    on=(PLAIN,),
    level=SHOULD,
    source="torch documentation, torch.Tensor.data; CUDA graphs and flat views of parameters hold addresses",
    remedy="copy into the parameter (p.copy_) instead of putting another tensor in its place (p.data = ...)",
)
def same_memory(run: Run, claims: Claims, found: Found) -> None:
    """A parameter keeps its memory: views of it, flat buffers and CUDA graphs see the average too."""
    for rank, step in _calls(run):
        names = [f"p{index}" for index in (run.ranks[rank].first("averaged", step=step) or {}).get("moved", ["?"])]
        found.require(not names, "the memory that they had", f"rank {rank}, step {step}: {', '.join(names)} moved")


@rule(
    "14.10",
    "It is done when it returns",
    on=(ORDERED,),
    owns=(ORDERED,),
    needs=("14.1", "14.2"),
    source="torch documentation, async_op: a collective's result is there after wait()",
    remedy="an asynchronous collective that nobody waits for",
)
def done(run: Run, claims: Claims, found: Found) -> None:
    """When the call returns, parameters hold the average.

    Peers enter each call when rank 0 has left it, or waits for them: a rank that returns without waiting is found out every time.
    """
    _means(run, claims, found, must_change=True)


@rule(
    "14.11",
    "The schedule survives a checkpoint",
    on=(RESUMED, SAVED),
    owns=(RESUMED, SAVED),
    needs=("14.1", "14.2"),
    source="torch documentation, PostLocalSGDOptimizer: the step of its averager is restored, or a warm-up begins again",
    remedy="state_dict() and load_state_dict(), or an attribute step, that hold the count of calls",
)
def checkpoint(run: Run, claims: Claims, found: Found) -> None:
    """Saved after 13 steps by its state_dict(), or else by its attribute ``step``, it goes on in new processes where it was."""
    kept = run.ranks[0].first("saved") or run.ranks[0].first("loaded")
    if kept and kept["nothing"]:
        found.does_not_apply("it has neither state_dict() nor step: with a checkpoint its schedule begins anew")
        return
    _means(run, claims, found, must_change=True)


@rule(
    "14.12",
    "As the reference that it is like",
    on=(PLAIN, FORMS, UNUSED, SUBGROUPS, SAVED, RESUMED),
    reads_all_runs=True,
    claimed="like",
    baseline="like",
    source="the reference's own definition, in hooks_ref",
    remedy="the reference's module: its first lines say what it computes",
)
def like_reference(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Step by step it makes of the same parameters what the reference does, up to the roundings of a recurrence; and what a model
    would be evaluated with, where the reference has such a thing.

    Where ranks lack gradients it may leave out others than the reference; but ranks that hold the same bits there hold the same here.
    Off by 2**-10 of the largest parameter at most: 30 steps with an outer momentum of 0.9 leave some 10 * 30 roundings of 2**-24.
    """
    for name, run in runs.items():
        if name.startswith("like_"):
            continue
        reference = runs[f"like_0-{name}"]
        if run.scenario.name == UNUSED.name:
            _as_alike(run, reference, found)
            continue
        for rank in run.ranks:
            rights = reference.ranks[rank.rank].tensors
            largest = max((right.abs().max().item() for right in rights.values()), default=0.0)
            for key, right in rights.items():
                got = rank.tensors.get(key)
                if not found.require(got is not None, f"{key} as the reference has it", f"rank {rank.rank}: there is none"):
                    continue
                assert got is not None
                error = (got.double() - right.double()).abs().max().item()
                what = f"rank {rank.rank}, {key} of {name}: off by {error:.3g}"
                found.require(error <= ALIKE * largest, f"what {claims} makes of it, up to {ALIKE * largest:.3g}", what)


@rule(
    "14.13",
    "Smaller groups than it says are refused",
    on=(PLAIN,),
    worlds=WorldSizes.BELOW_MINIMUM,
    claimed="min_world_size",
    source="torch documentation, HierarchicalModelAverager: raises if the group sizes do not fit",
    remedy="check the group's size where the averager is made, or in its first call, and raise on every rank",
)
def fewer(run: Run, claims: Claims, found: Found) -> None:
    """In a group of fewer ranks than it claims to take, it raises an error on every rank."""
    found.require(False, "an error on every rank", f"{run.name}: it ran to its end", "min_world_size is claimed and not checked")


@rule(
    "14.14",
    "It leaves the process as it was",
    on=(PLAIN,),
    source="torch documentation, reproducibility; the same as 9.1, 9.3, 9.4 and 9.6 of hooks",
    remedy="a seed that is set, a global setting or a patched function that is not put back, a thread or a file that is left",
)
def leaves_no_trace(run: Run, claims: Claims, found: Found) -> None:
    """Random generators, torch's settings, functions of torch and Python, and the process's threads, children and temporary files
    are after it what they were before."""
    left_behind(run, found)
