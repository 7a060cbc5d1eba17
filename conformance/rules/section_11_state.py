"""Section 11: a state belongs to one model, and outlives the process if it is claimed to."""

from dataclasses import replace

from conformance.judging.oracles.feedback import (
    require_all_delivered,
    require_near_estimates,
    require_small_loss,
)
from conformance.judging.requirements import (
    require_meeting,
    require_optimizer,
    require_own_group,
    require_same,
    require_steps,
)
from conformance.judging.rule import SHOULD, WorldSizes, rule
from conformance.judging.twins import is_shared, require_models_and_twins
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run
from conformance.scenarios.evidence import (
    FEEDBACK_OVERFLOWN,
    FEEDBACK_RESCALED,
    FEEDBACK_RESTING,
    FEEDBACK_UNUSED,
)
from conformance.scenarios.hook import RESUMED, RESUMED_ONE, SAVED, SAVED_ONE, TWO_MODELS, VALUES
from conformance.scenarios.late_steps import RESUMED_LATE, ROLLED_BACK_LATE, SAVED_LATE
from conformance.scenarios.learning_rates import rate_after_save
from conformance.scenarios.reused_states import RESUMED_ELSEWHERE, ROLLED_BACK
from conformance.scenarios.surroundings import JOINT, JOINT_ALIKE
from conformance.subjects.claims import DIFFERENCE, Claims


@rule(
    "11.1",
    "Keeps the states of two models apart",
    on=(VALUES, TWO_MODELS),
    owns=(TWO_MODELS,),
    reads_all_runs=True,
    worlds=WorldSizes.PRIMARY,
    needs=("3.3",),
    since="1.2",
    source="bugs in the wild: residuals and step counts in a module's dictionary, by the bucket's "
    "number",
    remedy="values that are kept in a module, a class attribute or a default argument, and belong "
    "in the state",
)
def two_models(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """If another model with a hook and a state of its own trains in the same process, the bits are
    the same as for a model alone. Of a fused hook the other model's optimizer has another rate.
    Under ``rescaled(call=NAME)`` the trainer makes that call for the other model before about a
    quarter of the steps, and under ``checkpointable`` it saves the other state, and loads it some
    steps later, if that has load_state_dict (``scenarios/calls_for_twin.py``).

    A subject given as one object, instead of its class or factory, is shared by both models on
    purpose: the rule does not apply to it.
    """
    alone, beside = runs.values()
    if is_shared(beside, found):
        return
    for one, other in zip(alone.ranks, beside.ranks, strict=True):
        # The run with two models may be shorter.
        shared = {name: one.tensors[name] for name in one.tensors.keys() & other.tensors.keys()}
        pair = f"on rank {one.rank}, the run alone and the run beside another model"
        require_same(shared, other.tensors, pair, found)


@rule(
    "11.2",
    "Resumes with the same bits",
    on=(SAVED_ONE, RESUMED_ONE, ROLLED_BACK),
    owns=(SAVED_ONE, RESUMED_ONE, ROLLED_BACK),
    claimed="checkpointable",
    reads_all_runs=True,
    needs=("2.1", "3.3"),
    since="1.2",
    source="torch documentation, DDP Communication Hooks: How to Checkpoint Communication Hook "
    "State",
    remedy="values that decide the next step and are not in the state: a step count, a residual, a "
    "seed, warm-started factors; a load_state_dict that leaves values alone which exist already, "
    "or which the saved state lacks: residuals.update(saved); a factor of the loss scale; parts of "
    "large tensors, which come back in another order; the process group, which load_state_dict "
    "drops, as by self.__init__(**saved); a saved loss scale that is multiplied by the one in use; "
    "a learning rate in the state, or a parameter group that the optimizer has replaced in its own "
    "load_state_dict; a load_state_dict that takes values out of the saved dict, and a state_dict "
    "that changes those in use",
)
def same_bits(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under ``checkpointable`` new processes that load the state give the bits that the old
    processes go on to give.

    The state is saved with torch.save, or its state_dict if it has one. The model has one
    parameter, so that the bucket is the same in both: of 2**20 to 3 * 2**19 elements if new
    processes go on. A state with load_state_dict also gives the same bits again if its own process
    loads it three, five or seven steps later, as after a loss spike, and repeats these steps. It
    loads the same object twice, which may stay in memory, and takes its state after each repeated
    step: neither may change anything. At last it loads the state from before the first step, which
    has none of the residuals that later steps have added, and repeats three steps, or three after
    the warm-up, unless that has unrecorded steps. Three ranks do so, with models on two groups of
    two ranks and of one: a state that loads in its own process keeps its group. A subject with
    ``world_only`` is judged on WORLD alone.

    Under ``rescaled(call=NAME)`` the loss scale changes before the state is saved, and once more
    before its own process loads it: then the scale goes back as well, as that of a GradScaler which
    loads its state, without a call. Of a fused hook the trainer's optimizer is saved and loaded,
    too, and has another rate in the steps after that.
    """
    saved, resumed, rolled_back = runs.values()
    _require_resumed(saved, resumed, found)
    _require_repeated(rolled_back, found)


def _require_resumed(saved: Run, resumed: Run, found: Found) -> None:
    """Require a resumed run to have the bits of the run that it continues."""
    later = range(saved.scenario.resume.saves_at, len(saved.scenario.steps))
    for one, other in zip(saved.ranks, resumed.ranks, strict=True):
        pair = f"on rank {one.rank}, the run that went on and the run that resumed"
        require_same(_within(one, later).tensors, other.tensors, pair, found)


def _require_repeated(run: Run, found: Found) -> None:
    """Require the steps after a process has loaded its state to repeat those after it was saved."""
    if any(rank.first("cannot_roll_back") for rank in run.ranks):
        return
    resume, end = run.scenario.resume, len(run.scenario.steps)
    saved, loaded, starts_over = resume.saves_at, resume.rolls_back_at, resume.starts_over_at
    again = min(loaded - saved, (starts_over or end) - loaded)
    _require_repeated_steps(run, found, range(saved, saved + again), loaded, "the saved state")
    if starts_over and not found.failures:
        first = range(end - starts_over)
        _require_repeated_steps(run, found, first, starts_over, "the state before the first step")


def _require_repeated_steps(run: Run, found: Found, steps: range, loaded: int, which: str) -> None:
    """Require some steps to have the same bits from the step on before which a state is loaded."""
    back = steps.start - loaded
    for rank in run.ranks:
        first = _within(rank, steps).tensors
        again = _within(rank, range(loaded, loaded + len(steps))).tensors
        renamed = {_moved(name, back): tensor for name, tensor in again.items()}
        pair = (
            f"on rank {rank.rank}, steps and their repetition after the same process loaded {which}"
        )
        require_same(first, renamed, pair, found)


def _moved(name: str, steps: int) -> str:
    """Return the name of the same tensor in another step."""
    step, _, rest = name.partition("/")
    return f"{int(step) + steps}/{rest}"


@rule(
    "11.3",
    "Resumes parameter by parameter",
    on=(SAVED, RESUMED, *RESUMED_ELSEWHERE),
    owns=(SAVED, RESUMED, *RESUMED_ELSEWHERE),
    refusable=RESUMED_ELSEWHERE,
    claimed="checkpointable",
    reads_all_runs=True,
    needs=("11.2",),
    since="1.2",
    source="torch documentation, DistributedDataParallel: buckets are rebuilt after the first "
    "step, and a new process starts over",
    remedy="state that is kept by bucket, or by a parameter's address: keep it by the parameter's "
    "place in the model; a rank or a number of ranks in the saved state: ask the group for it; a "
    "number of the next step with other partners that is not in the state",
)
def by_parameter(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under ``checkpointable`` the steps before and after the change of processes, taken as one
    run, are right under the subject's claims.

    So are the parameters of a fused hook, at the rate that it claims throughout, or at the rate of
    the trainer's optimizer, which is another one from the save on. The model has 11 parameters or
    more, so that names with numbers have another order as texts. A new process has them in one
    bucket, until DDP rebuilds its buckets after the first step: then there are two or more, whose
    largest size is drawn from the seed. So bits may differ here, and a parameter is not in the
    bucket from which its state was saved. The new processes save the loaded state and load it once
    more before their first step, as jobs do that are preempted at once. Under ``local`` three or
    four ranks save and load, each a state of its own: they all meet within 24 steps after the load,
    and get the mean over all ranks at a claimed period.

    Training scripts let rank 0 save, load that state on every rank, and may resume with another
    number of ranks: two save, and three or four resume. A hook that is neither lossy nor fused has
    no memory of its rank, so that its results are right then, too. Or it refuses such a state with
    an error on every rank.
    """
    saved, resumed, *elsewhere = runs.values()
    if not _require_joined(saved, resumed, claims, found):
        return
    for other in elsewhere:
        at = other.scenario.resume.saves_at
        later = [step for step in other.steps("crafted", "normal") if step >= at]
        if not require_steps(other, claims, found, later):
            last = found.failures[-1]
            by = f"resumed by {other.world} ranks, all from the state of rank 0 of {saved.world}"
            found.failures[-1] = replace(last, actual=f"{by}: {last.actual}")
            return


def _require_joined(saved: Run, resumed: Run, claims: Claims, found: Found) -> bool:
    """Require the steps of two runs, taken as one, to be right; return whether they are."""
    at = saved.scenario.resume.saves_at
    pairs = zip(saved.ranks, resumed.ranks, strict=True)
    ranks = [_joined(one, other, at, len(saved.scenario.steps)) for one, other in pairs]
    joined = Run(saved.scenario, saved.world, ranks)
    require_steps(joined, claims, found, joined.steps("crafted"))
    if claims.fused:
        _require_optimizer(joined, claims, found)
    if claims.mixes and not found.failures:
        require_meeting(joined, claims, found, first=at + 1)
        if found.failures:
            found.failures[-1].actual += " [after new processes have loaded the state]"
    return not found.failures


def _require_optimizer(run: Run, claims: Claims, found: Found) -> None:
    """Require the steps of the claimed optimizer, at its rate or at the trainer's throughout."""
    at_claimed = Found()
    require_optimizer(run, claims, at_claimed)
    after = rate_after_save(run.scenario)
    tried = at_claimed
    if at_claimed.failures and after is not None:
        saves_at = run.scenario.resume.saves_at
        rates = [run.scenario.fused_rate] * saves_at
        rates += [after] * (len(run.scenario.steps) - saves_at)
        tried = Found()
        require_optimizer(run, claims, tried, rates)
    found.checked(tried.checks)
    if tried.failures:
        found.failures += at_claimed.failures


@rule(
    "11.4",
    "Loads as plain data",
    on=(RESUMED_ONE,),
    claimed="checkpointable",
    needs=("11.2",),
    level=SHOULD,
    since="1.2",
    source="torch documentation, torch.load: weights_only",
    remedy="objects in the state: return a state_dict of plain data and tensors, or call "
    "torch.serialization.add_safe_globals",
)
def plain_data(run: Run, claims: Claims, found: Found) -> None:
    """Under ``checkpointable`` the state loads with ``weights_only=True``: a checkpoint is no place
    for code."""
    for rank in run.ranks:
        for loaded in rank.all("loaded"):
            expected = "a state that torch.load(weights_only=True) takes"
            found.require(loaded["weights_only"], expected, f"rank {rank.rank}: {loaded['why']}")


def _within(rank: RankRecord, steps: range) -> RankRecord:
    """Return the part of a record that belongs to some steps."""
    tensors = {
        name: tensor
        for name, tensor in rank.tensors.items()
        if int(name.partition("/")[0]) in steps
    }
    events = [event for event in rank.events if event["step"] in steps]
    return replace(rank, tensors=tensors, events=events)


def _joined(saved: RankRecord, resumed: RankRecord, at: int, end: int) -> RankRecord:
    """Return the record of the steps before ``at`` from one process, and of the rest from
    another."""
    before = _within(saved, range(at))
    after = _within(resumed, range(at, end))
    return replace(
        before, tensors=before.tensors | after.tensors, events=before.events + after.events
    )


@rule(
    "11.5",
    "Keeps what it holds back of unused parameters",
    on=(FEEDBACK_UNUSED,),
    owns=(FEEDBACK_UNUSED,),
    claimed="holds_back",
    needs=("13.1",),
    since="1.6",
    source="torch documentation, DistributedDataParallel, find_unused_parameters: the gradient of "
    "a parameter that no rank has used stays as it was",
    remedy="the residual of a parameter whose gradient is all zeros on this rank: send zeros, and "
    "keep the residual as it is until the rank uses the parameter again; a vote of ranks without "
    "group=, or one that ends if all parameters were used at first",
)
def keeps_unused(run: Run, claims: Claims, found: Found) -> None:
    """Under ``keeps_unused`` the gradients that DDP leaves sum to the means, although DDP drops the
    result of a parameter that no rank has used in a step.

    A model trains on two of three ranks; the third one takes part in nothing, and no vote of the
    two may wait for it. All parameters are used in 60 to 150 steps, whose gradients are so small
    that next to nothing is held back. In each later step no rank uses one of five parameters, which
    rest in turn, for one to three steps; others are used by one rank alone then. Each has a bucket
    of its own, or there are two or three in a bucket, and DDP drops the result of one. For half of
    the seeds a step has two to four micro-batches, each with parameters of its own. A hook without
    the claim may send a part of its residual in such a step, which is lost: an expert of a mixture
    loses it in most steps. The certificate names that limit.
    """
    if claims.lossy == DIFFERENCE:
        found.does_not_apply()
    elif not claims.keeps_unused:
        found.does_not_apply(
            "with find_unused_parameters a part of the residual is lost in a step in which no rank "
            "uses the parameter: keeps_unused is not claimed"
        )
    elif require_own_group(run, found):
        require_all_delivered(run, claims, found, _DROPPED)


_DROPPED = (
    "in a step in which no rank used the parameter, the residual was sent in a result that DDP "
    "drops, or was thrown away"
)


@rule(
    "11.6",
    "Holds back gradients in the units of the loss scale",
    on=(FEEDBACK_RESCALED, FEEDBACK_OVERFLOWN, FEEDBACK_RESTING),
    owns=(FEEDBACK_RESCALED, FEEDBACK_OVERFLOWN, FEEDBACK_RESTING),
    claimed="holds_back",
    needs=("13.1", "11.5"),
    since="1.6",
    source="torch documentation, torch.amp.GradScaler.update: the scale doubles after 2,000 steps "
    "and halves after an overflow",
    remedy="multiply every residual, velocity and estimate by the factor that each call is given",
)
def rescaled(run: Run, claims: Claims, found: Found) -> None:
    """Under ``rescaled(call=NAME)`` the gradients sum to the means in units without the loss scale,
    which changes three times: by a factor of 2**-7 to 2**-10, by 2**3 or more, and by any.

    The trainer calls the function with the factor before the next forward; for the first factor
    twice, with two factors that make it up, as for a model that rests while another one trains
    under the same GradScaler. One parameter has 2**16 to 2**17 elements, and two or more share a
    bucket in each run. If ``keeps_unused`` is claimed, too, or ``compressed(feedback=ef21)``, the
    scale also changes in a run in which each parameter rests in turn, as in 11.5.
    In another run the scale falls by 2**-7 or less after a step that overflows on one rank, as
    GradScaler lets it. The hook may lose then what it held back: what it has sent of that since is
    in the new units.
    Without a call no hook can know of the change: what it holds back is added to gradients of
    another scale. The certificate names that limit.
    """
    if not claims.rescaled:
        found.does_not_apply(
            "under GradScaler its state stays in units of the old loss scale: "
            "rescaled(call=NAME) is not claimed"
        )
    elif run.scenario.name == FEEDBACK_RESTING.name and (
        claims.lossy != DIFFERENCE and not claims.keeps_unused
    ):
        found.does_not_apply()
    elif claims.lossy == DIFFERENCE:
        require_near_estimates(run, claims, found, _OLD_UNITS)
    elif run.scenario.name == FEEDBACK_OVERFLOWN.name:
        require_small_loss(run, claims, found, _OLD_UNITS)
    else:
        require_all_delivered(run, claims, found, _OLD_UNITS)


_OLD_UNITS = "residuals, velocities or estimates are still in units of the old loss scale"


@rule(
    "11.7",
    "Keeps two models apart in one backward",
    on=(JOINT, JOINT_ALIKE),
    owns=(JOINT, JOINT_ALIKE),
    needs=("11.1", "1.8", "2.7"),
    since="1.6",
    source="generators and discriminators, actors and critics, distillation: one loss, and one "
    "backward through several models under DDP",
    remedy="buffers, lists of pending work and counters that modules or classes keep between two "
    "calls, and the group, its size or the optimizer: the next call may be for the other "
    "model, and a bucket of the same group, number, dtype and size",
)
def joint(run: Run, claims: Claims, found: Found) -> None:
    """The losses of two models are added, and one backward goes through both. Each model has a hook
    and a state of its own, and gets its own mean, while calls for buckets of both follow one
    another.

    In one run a model is on WORLD, of three or four ranks, and the other one on a group of all of
    them but one, as experts are beside dense layers: each callback belongs to the group of its own
    call. In the other run two models of the same shapes, as twin critics are, have the same group,
    so that each bucket has a like one with the same number. Of a fused hook, the trainer's
    optimizers for the two models have different rates (``scenarios/learning_rates.py``): each model
    is stepped at the rate that is claimed, or at that of its own optimizer.

    Under ``world_only`` the models of the second run alone are judged.
    A subject given as one object, instead of its class or factory, is shared by both models on
    purpose: the rule does not apply to it.
    """
    require_models_and_twins(run, claims, found)


@rule(
    "11.8",
    "Resumes with the same bits after hundreds of steps",
    on=(SAVED_LATE, RESUMED_LATE, ROLLED_BACK_LATE),
    owns=(SAVED_LATE, RESUMED_LATE, ROLLED_BACK_LATE),
    claimed="checkpointable",
    reads_all_runs=True,
    needs=("11.2",),
    since="2.0",
    source="torch documentation, DDP Communication Hooks: How to Checkpoint Communication Hook "
    "State; jobs that are preempted go on from any step",
    remedy="a number of the epoch, or of the round, that changes seldom and is not in the state, "
    "or that a load leaves as it is; a count of steps that is saved in too few bits; residuals in "
    "a dtype that is narrower than the one in use: of half precision, or of float32 for gradients "
    "of float64; flat tensors for buckets of "
    "several parameters, which a load leaves as they are",
)
def same_bits_late(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under ``checkpointable`` new processes that load a state of step 203 to 703, or of later ones
    after a longer warm-up, give the bits that the old processes go on to give.

    A state with load_state_dict also gives the same bits again if its own process loads it 300 to
    500 steps after it was saved. Parameters are of float16 in one of these two runs, and of
    bfloat16 in the other one, which is drawn; so are their sizes, 257 to 1,019, and the numbers of
    steps. There is one parameter if new processes go on. If one process does, there are five to
    eight, in two buckets, with three or more in one, and another one of float64.
    """
    saved, resumed, rolled_back = runs.values()
    _require_resumed(saved, resumed, found)
    if not found.failures:
        _require_repeated(rolled_back, found)
