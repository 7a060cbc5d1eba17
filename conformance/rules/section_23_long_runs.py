"""Section 23: runs as long as training's schedules."""

from conformance.judging.oracles import (
    long_run_draws,
    long_run_parameters,
    long_run_residuals,
    long_run_sent,
    long_run_silence,
    long_run_weights,
    long_runs,
    slopes,
)
from conformance.judging.oracles.long_runs import LongRecord
from conformance.judging.requirements import require_few_bytes, sees_collectives
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.late_steps import SENT_LATE
from conformance.scenarios.long_runs import ENDURANCE
from conformance.scenarios.profiles import CUDA
from conformance.subjects.claims import CONTRACTION, DIFFERENCE, FEEDBACK, LOCAL, UNBIASED, Claims

_NEEDS = ("1.1", "1.2", "1.5", "2.1")
_COUNTS = "a count of steps or calls: a warm-up, a schedule, a restart, a counter that overflows"


@rule(
    "23.1",
    "Gives the right result in every step of a long run",
    on=(ENDURANCE,),
    owns=(ENDURANCE,),
    needs=_NEEDS,
    since="1.6",
    source="Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, lemma 3: residuals are "
    "bounded, however long a run is; torch documentation, PowerSGDState: start_powerSGD_iter",
    remedy=f"{_COUNTS}, a collective that one rank starts at every so many steps; a restart, or "
    "another partner, that a rank chooses by the length of its own gradients; residuals that "
    "are dropped, scaled or forgotten now and then, or when the model is evaluated; a parameter "
    "that is given up after many steps of zeros, or after the first ones; a share of few elements "
    "that is rounded to 0; a forward that a hook on the module takes for the one of the step: one "
    "without gradients, one whose loss is given up, one of two losses that are added; a collective "
    "at every so many forwards of a rank",
)
def every_step(run: Run, claims: Claims, found: Found) -> None:
    """In a run of 1,200 to 1,500 steps after the warm-up, and of more under ``--steps``, every
    step's result is right: the mean, or a result that the claim allows.

    The number of steps, the period of the gradients and the places of special steps are drawn from
    the seed. Exact results are compared as in 2.1 and 2.2. Under ``compressed`` the sum of all
    results so far is the sum of all means but for the residuals, whose limit follows from
    ``delta`` and does not grow with the run; at the end, after small gradients, it is so up to a
    256th of a step, but for what still comes out. A hook may hold back parts of updates: results
    and means are then multiplied by the learning rate of the trainer's optimizer, which falls
    during the run. Under ``compressed(feedback=ef21)`` and ``compressed(feedback=False)`` each
    result is as near to the mean as ``delta`` demands; without feedback each element is also sent
    in at least as many steps as it is among the largest in, if ``delta`` is 0.055 or more
    (``judging/oracles/long_run_sent.py``). Otherwise a part of each bucket is delivered in every
    other step, and in the steps between, as ``delta`` is promised for each (``judging/oracles/
    long_run_silence.py``). Under ``unbiased`` the errors of all steps cancel out in six
    directions, and so do those of 96 steps in which gradients are 8 times as large as in the 60
    steps before, or more; one parameter has 1 to 8 elements, and none is zero for good; claimed
    noise does not fade; under ``local`` each result is a weighted mean (see ``judging/oracles/
    long_runs.py``). A run that ends early or hangs fails this rule.

    Unless results are lossy, one parameter's gradients are zero on all ranks for 150 to 350 steps,
    and then return. If the hook does not step parameters, another one's are zero in the first 2 to
    300 steps. In a warm-up of two steps or more, before lossy results with feedback, one
    rank's gradients overflow in one step.

    Under ``compressed(feedback=ef21)`` and ``local`` one rank's gradients are 2**3 to 2**9 times as
    large as usual in three to six single steps, fewer if ``delta`` is small: it decides nothing
    alone then.

    Every 5 to 40 steps the model is evaluated, on all ranks or on one alone: between two steps, by
    eval(), forwards under no_grad or inference_mode, and train(); or by such forwards between the
    forward and the backward of a step (``scenarios/evaluations.py``). Up to half of the steps have
    two to six forwards with gradients, whose losses are given up or added, or reentrant checkpoints
    (``scenarios/forwards.py``); the last ones all have six forwards. In one to six steps one rank
    alone gives up forwards. Gradients are zeroed in place
    for 20 to 120 steps, then freed for as many, and so on (``scenarios/kept_gradients.py``).
    """
    record = LongRecord(run, claims)
    if not record.complete(found):
        return
    if not claims.lossy:
        long_runs.require_exact(record, range(record.feed.rounds), found)
        return
    exact = LongRecord(run, claims.of_warmup)
    if claims.warmup and not long_runs.require_exact(exact, range(record.warm_up), found):
        return
    if claims.lossy == UNBIASED:
        if long_run_draws.require_unbiased(record, found) and claims.noise:
            long_run_draws.require_lasting_noise(record, claims, found)
    elif claims.lossy == LOCAL:
        long_run_weights.require_weights(record, found)
    elif claims.lossy == FEEDBACK:
        long_run_residuals.require_delivered(record, found)
    elif not long_runs.require_lossy(record, found):
        return
    elif claims.lossy == DIFFERENCE:
        long_run_silence.require_something_of_each_step(record, found)
    elif claims.lossy == CONTRACTION:
        long_run_sent.require_all_sent(record, found)


@rule(
    "23.2",
    "Gives all ranks the same bits in every step of a long run",
    on=(ENDURANCE,),
    needs=(*_NEEDS, "23.1"),
    since="1.6",
    source="torch documentation, DistributedDataParallel: all replicas begin and stay the same",
    remedy="a rank that decides alone, by its own values or its own count, when it sends",
)
def same_bits(run: Run, claims: Claims, found: Found) -> None:
    """Results are the same on all ranks, bit for bit, in every step of a long run."""
    if claims.lossy == LOCAL:
        found.does_not_apply(f"replicas differ, because the subject claims {claims}")
        return
    record = LongRecord(run, claims)
    if record.complete(found):
        long_runs.require_same_bits(record, found)


@rule(
    "23.3",
    "Draws other numbers in every step of a long run",
    on=(ENDURANCE,),
    needs=(*_NEEDS, "23.1"),
    since="1.6",
    source="Alistarh et al., QSGD, NeurIPS 2017: the draws of all steps are independent",
    remedy="a generator that is seeded in each step, or with the step modulo a number; a pool of "
    "masks or noise",
)
def independent_in_time(run: Run, claims: Claims, found: Found) -> None:
    """Under ``unbiased`` the errors of a step are not correlated with those of any number of steps
    before.

    Noise that comes again does not average out. Draws that follow from those of an earlier step are
    refused, too, also if they are its opposite (antithetic variates). The limit for each lag is 7
    times the root sum of squares of the products, plus 12 times the largest; by chance one of all
    lags exceeds it with probability below 1e-7 (see ``judging/oracles/long_runs.py``).
    """
    if claims.lossy != UNBIASED:
        found.does_not_apply()
        return
    record = LongRecord(run, claims)
    if record.complete(found):
        long_run_draws.require_independent(record, found)


@rule(
    "23.4",
    "Draws other numbers on every rank",
    on=(ENDURANCE,),
    needs=(*_NEEDS, "23.1"),
    level=SHOULD,
    since="1.6",
    source="Alistarh et al., QSGD, NeurIPS 2017: the variance falls with the number of ranks",
    remedy="a generator that all ranks seed alike; values that are lost on all ranks, whatever is "
    "drawn",
)
def independent_among_ranks(run: Run, claims: Claims, found: Found) -> None:
    """Under ``unbiased``, if all W ranks feed the same gradients, the variance of the mean is W
    times that of a step in which one rank feeds them, and not W squared times."""
    if claims.lossy != UNBIASED:
        found.does_not_apply()
        return
    record = LongRecord(run, claims)
    if record.complete(found):
        long_run_draws.require_own_noise(record, found)


@rule(
    "23.5",
    "Goes on to hear the ranks that it has heard",
    on=(ENDURANCE,),
    needs=(*_NEEDS, "23.1"),
    since="1.6",
    source="Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS "
    "2017: the graph is connected over any window of steps",
    remedy="a rotation that comes to its end, a topology that is drawn once, a period that grows: "
    "with the steps, as the learning rate falls, or with the length of gradients; one bucket "
    "that is communicated ever more seldom",
)
def mixing(run: Run, claims: Claims, found: Found) -> None:
    """Under ``local`` a rank whose gradient has weight in the first 200 steps after the warm-up has
    weight again at least every 200 steps, or twice as long as between its first three times; under
    ``local(period=k)`` every k steps. In any 48 steps, twice the 24 of the claim, weights connect
    every rank with every other one, directly or through others. Each parameter is judged by
    itself, if it has four elements or more for each rank.

    The learning rate of the trainer's optimizer falls by a factor of 2**20 during the run, and for
    260 steps each gradients are 2**20 times smaller and 2**17 times larger.
    """
    if claims.lossy != LOCAL:
        found.does_not_apply()
        return
    record = LongRecord(run, claims)
    if not record.complete(found):
        return
    heard = long_run_weights.require_weights(record, found)
    if heard is not None:
        long_run_weights.require_mixing(record, heard, found)


@rule(
    "23.6",
    "Steps the parameters as its fused optimizer does in a long run",
    on=(ENDURANCE,),
    claimed="fused",
    needs=(*_NEEDS, "13.6", "23.1"),
    since="1.6",
    source="torch documentation, torch.optim; Kingma and Ba, Adam, ICLR 2015: bias corrections",
    remedy="counts in the optimizer's state: bias corrections, schedules; state that is reset; "
    "a learning rate of the trainer's optimizer that is not read in each step, or is replaced by a "
    "default if it is 0; a parameter group that was taken before optimizer.load_state_dict; "
    "an option that ends after some steps; a size without its upper or lower limit; "
    "state that is a parameter's .grad and no copy of it; a copy of the weights that the hook "
    "steps in place of the parameters",
)
def fused(run: Run, claims: Claims, found: Found) -> None:
    """Under ``fused(...)`` every step of a long run changes the parameters as the named optimizer
    of torch.optim does, from their values before it and the gradients so far.

    Every 40 to 250 steps values that the parameters had after an earlier step are loaded into the
    model, on all ranks alike. One parameter is float64, unless ``dtypes`` excludes it: a decay of
    1e-6 a step, lost in the roundings of float32, shows there. For 110 to 140 steps gradients are
    the same, so that the sizes that an optimizer keeps grow to their limits. The learning rate of
    the trainer's optimizer begins at 1.25 to 2 times the claimed one, and falls; for 5 to 40 steps
    it is 2 to 4 times as large as before, and for as many, unless results are lossy, it is 0. One
    to three times the optimizer loads its own state, so that its parameter groups are new
    dictionaries. A hook steps at the claimed rate throughout, or at the trainer's rate of each
    step. The bound is 64 units in the last place of the sum of all changes, and two of the value.
    """
    record = LongRecord(run, claims)
    if run.scenario.long_run.steps_per_round > 1 and claims.lossy:
        found.note("parameters are not followed: a record has no gradient of each step")
        return
    if record.complete(found):
        long_run_parameters.require_optimized(record, found)


@rule(
    "23.7",
    "Leaves parameters and generators untouched in a long run",
    on=(ENDURANCE,),
    needs=(*_NEEDS, "23.1"),
    since="1.6",
    source="torch documentation, DDP Communication Hooks: a hook handles gradients",
    remedy="parameters that are averaged, broadcast or decayed at every so many steps, or drawn "
    "towards earlier values; draws without generator= after a number of steps",
)
def untouched(run: Run, claims: Claims, found: Found) -> None:
    """No step of a long run changes a parameter, unless ``fused`` is claimed, or the state of a
    global random generator.

    The kit itself changes the parameters after each step, as the trainer's optimizer does: by
    normal values whose deviation, 2**-8 to 2**-3, is drawn from the seed. They are the same on all
    ranks; under ``local`` each rank has its own from the first step after the warm-up on. So an
    average over ranks or steps shows (``scenarios/parameter_moves.py``).
    """
    for rank in run.ranks:
        changed = rank.first("parameter_changed")
        if not claims.fused:
            actual = f"rank {rank.rank}: "
            if changed:
                actual += f"{changed['parameter']} changed in step {changed['step']}"
            found.require(changed is None, "unchanged parameters", actual)
        before = None
        for event in rank.all("checkpoint"):
            states = {name: state for name, state in event["rng"].items() if name != CUDA}
            if before is not None:
                names = [name for name, state in states.items() if before[1].get(name) != state]
                actual = (
                    f"rank {rank.rank}: {', '.join(names)} changed between steps {before[0]} and "
                    f"{event['step']}"
                )
                found.require(not names, "untouched generators", actual)
            before = event["step"], states


@rule(
    "23.8",
    "Needs no more of the process with every step",
    on=(ENDURANCE,),
    needs=(*_NEEDS, "23.1"),
    since="1.6",
    source="pytorch#63162, pytorch#45968",
    remedy="lists and dicts that collect values, futures or Work objects; files, sockets, threads "
    "and process groups that are made in a step and not closed; keys of a store that are set in a "
    "step and not deleted",
)
def no_growth(run: Run, claims: Claims, found: Found) -> None:
    """Open descriptors, threads, process groups, child processes, temporary files, keys in the
    store of process groups, Python's objects and the C library's memory do not grow with the steps.
    Keys are counted on one machine alone.

    Counts at thirteen places of a long run are compared. Caches have a third of the run to fill;
    growth counts if it goes on in the eight intervals after that (``judging/oracles/slopes.py``).
    """
    names = ["descriptors", "tasks", "groups", "children", "files", "keys"]
    # The kit keeps each collective that it waits for, so that memory grows by its own doing.
    if not run.scenario.intercepts:
        names += ["blocks", "memory"]
    for rank in run.ranks:
        slopes.require_no_growth(rank, names, found)


@rule(
    "23.9",
    "Sends no more than it claims in a thousand steps",
    on=(SENT_LATE,),
    owns=(SENT_LATE,),
    claimed="limits_bytes",
    needs=("13.7",),
    since="2.0",
    source="rule book; Lin et al., Deep Gradient Compression, ICLR 2018: the share that is sent "
    "changes with the steps",
    remedy="a share that grows with the steps, or with what is kept; steps that send everything "
    "now and then",
)
def bytes_sent_late(run: Run, claims: Claims, found: Found) -> None:
    """Under ``ratio=r`` the bytes that a rank gives to collectives in a step are at most r times
    those of its gradients in each of many steps.

    The number of steps, 1,010 to 1,210, is drawn. Those of a claimed warm-up do not count.
    """
    # A hook may send nothing in the last steps, and too much in one before.
    is_seen = any(any(totals[2:]) for _, totals, _ in run.bytes_sent_unrecorded())
    if not is_seen and not sees_collectives([run], claims, found):
        return
    require_few_bytes(run, claims, found)
    if claims.ratio is not None:
        _require_few_bytes_unrecorded(run, claims, claims.ratio, found)


def _require_few_bytes_unrecorded(run: Run, claims: Claims, ratio: float, found: Found) -> None:
    """Require that no step before those that are recorded sends more than a share."""
    # DDP groups its buckets anew before the second step.
    first = max(2, claims.steps_of_warmup)
    counted = list(run.bytes_sent_unrecorded())
    if len(counted) < len(run.ranks):
        found.lacks_evidence("a rank has no record of the bytes that it has sent")
        return
    for rank, totals, gradients in counted:
        for step, total in enumerate(totals[first:], first):
            found.require(
                total <= ratio * gradients,
                f"at most {ratio:g} of {gradients} bytes",
                f"rank {rank}, step {step} before the recorded ones: {total} bytes, "
                f"{total / gradients:.3g} times those of the gradients",
            )
