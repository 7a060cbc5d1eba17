"""Section 11: a state belongs to one model, and outlives the process where it is said to."""

from dataclasses import replace

from conformance.judging.requirements import require_optimizer, require_same, require_steps
from conformance.judging.rule import SHOULD, WorldSizes, rule
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.hook import RESUMED, RESUMED_ONE, SAVED, SAVED_ONE, TWO_MODELS, VALUES
from conformance.subjects.claims import Claims


@rule(
    "11.1",
    "two models do not share what is kept",
    on=(VALUES, TWO_MODELS),
    owns=(TWO_MODELS,),
    reads_all_runs=True,
    worlds=WorldSizes.PRIMARY,
    needs=("3.3",),
    since="1.2",
    source="bugs in the wild: residuals and step counts in a module's dictionary, by the bucket's number",
    remedy="what is kept in a module, a class attribute or a default argument; it belongs in the state",
)
def two_models(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Where another model with a hook and a state of its own trains in the same process, the bits are those of a model alone.

    A subject that names one object, instead of what makes one, is shared by both models because it was asked for.
    """
    alone, beside = runs.values()
    if any(rank.first("twin", one_object=True) for rank in beside.ranks):
        found.does_not_apply("the subject is one object: both models would share it; name its class, or what makes it")
        return
    for one, other in zip(alone.ranks, beside.ranks, strict=True):
        names = one.tensors.keys() & other.tensors.keys()  # the second may be shorter
        require_same(
            {name: one.tensors[name] for name in names}, other.tensors, f"alone and beside another model on rank {one.rank}", found
        )


@rule(
    "11.2",
    "resumes with the same bits",
    on=(SAVED_ONE, RESUMED_ONE),
    owns=(SAVED_ONE, RESUMED_ONE),
    claimed="checkpointable",
    reads_all_runs=True,
    needs=("2.1", "3.3"),
    since="1.2",
    source="torch documentation, DDP Communication Hooks: How to Checkpoint Communication Hook State",
    remedy="what decides the next step and is not in the state: a step count, a residual, a seed, warm-started factors",
)
def same_bits(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under ``checkpointable`` new processes that load the state give the bits that the old ones go on to give.

    The state is saved with torch.save, or its state_dict is where it has one. One parameter: it is the same bucket in both.
    """
    saved, resumed = runs.values()
    for one, other in zip(saved.ranks, resumed.ranks, strict=True):
        after = _steps_of(one, range(saved.scenario.resume.saves_at, len(saved.scenario.steps)))
        require_same(after.tensors, other.tensors, f"going on and resuming on rank {one.rank}", found)


@rule(
    "11.3",
    "resumes parameter by parameter",
    on=(SAVED, RESUMED),
    owns=(SAVED, RESUMED),
    claimed="checkpointable",
    reads_all_runs=True,
    needs=("11.2",),
    since="1.2",
    source="torch documentation, DistributedDataParallel: buckets are rebuilt after the first step, and a new process starts over",
    remedy="state that is kept by bucket, or by a parameter's address; keep it by the parameter's place in the model",
)
def by_parameter(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under ``checkpointable`` the steps before and after the change of processes are, as one run, what the subject claims.

    A fused hook's parameters too. Bits may differ here: a new process has its parameters in other places of the bucket until DDP
    has rebuilt it.
    """
    saved, resumed = runs.values()
    at, end = saved.scenario.resume.saves_at, len(saved.scenario.steps)
    ranks = [_steps_of(one, range(at), other, range(at, end)) for one, other in zip(saved.ranks, resumed.ranks, strict=True)]
    joined = Run(saved.scenario, saved.world, ranks)
    require_steps(joined, claims, found, joined.steps("crafted"))
    if claims.fused:
        require_optimizer(joined, claims, found)


@rule(
    "11.4",
    "loads as plain data",
    on=(RESUMED_ONE,),
    claimed="checkpointable",
    needs=("11.2",),
    level=SHOULD,
    since="1.2",
    source="torch documentation, torch.load: weights_only",
    remedy="a state_dict of plain data and tensors, or torch.serialization.add_safe_globals",
)
def plain_data(run: Run, claims: Claims, found: Found) -> None:
    """Under ``checkpointable`` the state loads with ``weights_only=True``: a checkpoint is no place for code."""
    for rank in run.ranks:
        for loaded in rank.all("loaded"):
            found.require(loaded["weights_only"], "a state that torch.load(weights_only=True) takes", f"rank {rank.rank}: {loaded['why']}")


def _steps_of(first: RankRecord, steps: range, then: RankRecord | None = None, later: range = range(0)) -> RankRecord:
    """Return what a rank recorded in some steps, and another in later ones."""
    parts = [(first, steps), *([(then, later)] if then else [])]
    tensors = {name: value for rank, within in parts for name, value in rank.tensors.items() if int(name.partition("/")[0]) in within}
    events = [event for rank, within in parts for event in rank.events if event["step"] in within]
    return replace(first, tensors=tensors, events=events)
