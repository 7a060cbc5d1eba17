"""Section 14, continued: averagers of parameters as training uses them."""

from conformance.judging.common_rules import (
    AUTOCAST_OPERATIONS,
    DEFAULT_DTYPE,
    ON_MORE_RANKS,
    TOGETHER,
    TOGETHER_REMEDY,
    keeps_no_more,
    raises_if_collective_fails,
    right_beside_own_numbers,
)
from conformance.judging.oracles.averager import (
    require_dtypes,
    require_parameters_left,
    require_right,
    require_same_gradients,
)
from conformance.judging.oracles.averager_like import EVALUATED, require_like, require_restored
from conformance.judging.oracles.loaded_states import require_refused_by_all
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.averager_loops import OVERFLOWS, ROWS
from conformance.scenarios.averager_training import (
    AUTOCAST,
    AUTOCAST_HALF,
    CHANGING,
    CHANGING_LATE,
    DRIFTING,
    IDLE,
    LARGE,
    LONG,
    MOVED,
    NEAR_LIMIT,
    RESUMED_EARLY,
    ROLLED_BACK,
    ROLLED_TO_START,
    SAVED_EARLY,
    SPECIAL,
    TWO,
    TWO_GROUPS,
)
from conformance.scenarios.conditions_together import AVERAGER as CONDITIONS
from conformance.scenarios.failing_collectives import AVERAGER
from conformance.scenarios.kinds_in_clusters import AVERAGER as CLUSTERS
from conformance.scenarios.kinds_under_default_dtypes import AVERAGER as DEFAULT_DTYPES
from conformance.scenarios.probes_of_kinds import AVERAGER as PROBE
from conformance.subjects.claims import Claims


@rule(
    "14.15",
    "Models are as large as in training",
    on=(LARGE,),
    owns=(LARGE,),
    needs=("14.1", "14.2", "14.8", "14.12"),
    baseline="like",
    since="1.2",
    source="flat buffers and chunks, as in hooks_ref.model_averaging and torch.nn.utils.vector",
    remedy="chunks of a fixed size, of which the last or all but the first are left out; limits on "
    "the number of parameters",
)
def large(run: Run, claims: Claims, found: Found) -> None:
    """Every element of a model of some hundred parameters is averaged: 170 to 400 small ones, one
    of 2**17 to 2**18 elements and one of 2**20 to 2**21, after one of bfloat16 and one of float16
    of 2**16 to 2**17, with crafted and with random values. Their gradients keep their bits. If an
    averager writes averages into the parameters for an evaluation, every element has the same bits
    after it as before.

    The numbers are drawn from the session's seed.
    """
    require_right(run, claims, found, must_change=True, evaluated=True)
    require_same_gradients(run, found)
    require_restored(run, found)


@rule(
    "14.16",
    "Values that are not finite, or nearly not, give their mean",
    on=(SPECIAL, NEAR_LIMIT, OVERFLOWS),
    owns=(SPECIAL, NEAR_LIMIT, OVERFLOWS),
    needs=("14.7", "14.8", "14.12"),
    baseline="like",
    since="1.2",
    source="IEEE 754; float16 ends at 65,504; torch's averagers divide before they sum; "
    "torch.amp.GradScaler, which skips a step if gradients overflow and leaves parameters as they "
    "are",
    remedy="a sum in float16 before the division; code that replaces NaN or infinities; a decision "
    "that one rank takes alone; an average that is left out if gradients are not finite",
)
def special_values(run: Run, claims: Claims, found: Found) -> None:
    """NaN and infinities of any rank reach all ranks at their elements alone, the mean of float16
    values near 40,000 is finite, and ordinary values are averaged as before afterwards.

    The order of these values, and the rank that has them, are drawn from the session's seed. So are
    the sizes of two large parameters of float16 near 40,000: 2**16 to 2**20 elements, and 2**20 to
    2**21. Outer steps with momentum meet such values in the first average alone, since a later step
    may leave the range of float16. Gradients keep their bits.

    In a further run parameters are finite, and gradients are not, as in a step that a GradScaler
    skips: each average is due as any other. The values are NaN, infinities or the largest finite
    number of the dtype, in one element, in one parameter or in all, on one rank or on all; all of
    it is drawn.
    """
    require_right(run, claims, found, must_change=True, evaluated=True)
    require_same_gradients(run, found)


@rule(
    "14.17",
    "Two averagers do not mix",
    on=(TWO, TWO_GROUPS),
    owns=(TWO, TWO_GROUPS),
    needs=("14.1", "14.2", "14.12"),
    baseline="like",
    since="1.2",
    source="training of two models in one process, such as a GAN, or a student and its teacher; "
    "two moving averages of one model, with different decays",
    remedy="counts, buffers, states, or the group's size, in the class or the module instead of "
    "the object, or in attributes of the parameters",
)
def two(run: Run, claims: Claims, found: Found) -> None:
    """Two averagers of two models that take turns in a drawn order each keep their own schedule and
    state, and each averages over its own group.

    In one run both are on the same ranks. In another one WORLD has four or five ranks, and the
    other group two or three of them; which model has which group is drawn. Two moving averages
    (``like(EMAModelAverager, ...)``) on the same ranks are of one model. Under ``hierarchical``
    and ``world_only`` both have WORLD.
    """
    if run.ranks[0].first("one_object"):
        found.does_not_apply("the target is one existing object, which cannot be made twice")
        return
    require_right(run, claims, found, must_change=True, evaluated=True)


@rule(
    "14.18",
    "The model may change",
    on=(CHANGING, CHANGING_LATE, MOVED, IDLE),
    owns=(CHANGING, CHANGING_LATE, MOVED, IDLE),
    refusable=(MOVED, IDLE),
    needs=("14.4", "14.12"),
    baseline="like",
    since="1.2",
    source="fine-tuning: layers are frozen, unfrozen and added; torch documentation, "
    "average_parameters(params), which takes the parameters in every call; Module.to(), and "
    "load_state_dict(assign=True)",
    remedy="a list of parameters or buffers that is made in the first call and used again: always, "
    "or while the number of trained elements is the same, or while the new list is the beginning "
    "of the old one, or once it has been the same for some averages; averages that are kept by the "
    "position among the trained parameters, which changes; p.data of an earlier call: after "
    "model.to() the parameter has another tensor; a return before the step is counted if no "
    "parameter is trainable",
)
def changing(run: Run, claims: Claims, found: Found) -> None:
    """If parameters are frozen, unfrozen, added or left out between calls, each average is that of
    the parameters that are passed to that call.

    At a drawn step one parameter is unfrozen and another of the same shape is frozen. At a later
    step a third parameter is added. From a still later one on, that third one and another are no
    longer passed. In another run the same changes come after 17 to 150 averages.

    A subject that is made with the parameters keeps these; none is added or left out
    then. Until a parameter is added, the averages to evaluate with are judged as well. An averager
    may leave out frozen parameters: the average of one that was unfrozen may begin anew, and that
    of one that was frozen may stay as it is, or be the parameter itself.

    In a further run each parameter gets new memory before the second average and before the third
    one, as by ``p.data = ...``; some get another dtype with it, as by ``model.to(dtype)``, and some
    are replaced by another parameter, as by ``load_state_dict(assign=True)``. The steps, parameters
    and dtypes are drawn. An averager that is made with the parameters, or that keeps a state by
    parameter, keeps its parameters; one with a state gets dtypes with a state of float32 alone. An
    error on every rank may refuse such a model.

    In another run all parameters are frozen in drawn steps, as a GAN's discriminator is in the
    turns of the generator, and in others none are given. Such a call changes nothing, and is
    counted as any other: averages after it are due at the same steps. So are the later ones if an
    average is due in such a call itself. With a state no average is due in these calls. An error
    on every rank may refuse them.
    """
    require_right(run, claims, found, must_change=True, evaluated=True)
    require_dtypes(run, found)


@rule(
    "14.19",
    "A state is saved at any step, and loaded again",
    on=(SAVED_EARLY, RESUMED_EARLY, ROLLED_BACK, ROLLED_TO_START),
    owns=(SAVED_EARLY, RESUMED_EARLY, ROLLED_BACK, ROLLED_TO_START),
    needs=("14.11", "14.12"),
    baseline="like",
    since="1.2",
    source="torch documentation, PostLocalSGDOptimizer: unless the averager's step is restored, "
    "its warm-up begins again; training that goes back to a checkpoint after a loss of NaN",
    remedy="a state that exists from the first average on only; load_state_dict that takes its "
    "argument apart; momentum, or a next step with an average, that is not among the loaded state; "
    "a loaded state that waits for the next step, and is not in state_dict() until then; a loaded "
    "state that is added to what is there; the rank, or the group, of the process that has saved",
)
def saved_early(run: Run, claims: Claims, found: Found) -> None:
    """An averager continues its schedule if its state is saved at a drawn step of the warm-up, and
    new processes load it twice, save it, and load the new copy. Under ``periodic`` and
    ``hierarchical`` all ranks load the state of rank 0, which often writes the checkpoint, unless
    every other rank refuses it with an error; then each loads its own. If the same averager loads
    an earlier state, it continues as if the steps since then had not been. As in 14.11, parameters
    stay as they are.

    A schedule without a warm-up is saved between the first two averages, and so is a state that the
    same averager loads; that of a hierarchical one is saved right before an average of its longest
    period. In between come a drawn number of steps, with at least one average. The
    averager also goes back to a state that was saved before its first step, if it has one. An
    averager without state_dict() or load_state_dict() is not judged by that run.
    """
    rank = run.ranks[0]
    event = rank.first("saved") or rank.first("loaded") or rank.first("not_rolled_back")
    if event and event.get("nothing"):
        found.does_not_apply(
            "it has neither state_dict() nor a count: its schedule begins anew after a checkpoint"
        )
        return
    if rank.first("not_rolled_back"):
        reason = "it lacks state_dict() or load_state_dict(): no run that goes back is judged"
        if run.scenario.family == ROLLED_TO_START.name:
            reason = "it has no state that can be saved before its first step"
        found.leaves_out(reason)
        return
    require_refused_by_all(run, found)
    require_parameters_left(run, found)
    require_right(run, claims, found, must_change=True, evaluated=True)


@rule(
    "14.20",
    "A moving average keeps moving",
    on=(DRIFTING,),
    owns=(DRIFTING,),
    needs=("14.12",),
    claimed="like",
    baseline="like",
    since="1.2",
    source="bfloat16 has 8 bits: with a decay of 0.999 the change of one step is lost",
    remedy="the dtype in which the average is kept: float32 for half precision, also after "
    "load_state_dict()",
)
def drifting(run: Run, claims: Claims, found: Found) -> None:
    """If parameters stay after one change, the moving average approaches them in up to 200 averages
    as that of the reference does, in every dtype. Soon after the change, at a drawn step, the
    averager loads the state that it has just saved, if it has one.

    The reference keeps it in float32 or wider, so that the bound beside the roundings of a result
    is small: a hundred changes that are each lost in bfloat16 exceed it.
    """
    if not claims.reference.startswith("EMAModelAverager"):
        found.does_not_apply("the reference keeps no moving average")
        return
    require_like(run, claims, found, EVALUATED)


@rule(
    "14.21",
    "Long runs average as short ones do",
    on=(LONG,),
    owns=(LONG,),
    needs=("14.1", "14.2", "14.5", "14.8", "14.12", "14.20"),
    baseline="like",
    since="1.2",
    source="runs of training have many thousand steps",
    remedy="a warm-up, a count or a buffer that ends after some number of steps or averages; ranks "
    "that agree on the parameters with gradients in the first averages alone, or later only if one "
    "of them sees a change",
)
def long_run(run: Run, claims: Claims, found: Found) -> None:
    """In each of 400 to 700 steps, by the session's seed, parameters are the means that are due, or
    stay as they are. Gradients keep their bits. An averager that gossips has four ranks, others
    two. A parameter has its first gradient in a drawn average from the
    18th to the 151st one, and another one has none in 17 to 150 averages in between, if there are
    so many; both within the first two thirds of the averages. In the next 1 to 4 averages one rank
    alone has a gradient of it, which is drawn. Under ``like`` that holds for references that do not
    remember averages."""
    require_right(run, claims, found, must_change=True, evaluated=True)
    require_same_gradients(run, found)


fails = raises_if_collective_fails(
    "14.22", call="average_parameters()", on=AVERAGER, needs=("14.1", "14.2")
)

kept = keeps_no_more("14.23", on=(LONG,), needs=("14.21",))


@rule(
    "14.24",
    "Averages on five to eight ranks, and on any groups",
    on=CLUSTERS,
    owns=CLUSTERS,
    needs=("14.1", "14.2", "14.6", "14.12"),
    baseline="like",
    since="1.6",
    source=ON_MORE_RANKS,
    remedy="partners that assume a power of two; means of the nodes' means; tables and buffers for "
    "four ranks; a constant distance between the ranks of a group",
)
def on_clusters(run: Run, claims: Claims, found: Found) -> None:
    """Five or seven ranks on nodes of unequal size, six or eight ranks on equal nodes, and groups
    of four and two ranks without a constant distance average as the claim says. torchrun's
    variables describe the nodes; all of it is drawn.

    Under ``hierarchical`` there are as many ranks as the largest group takes. Under
    ``hierarchical`` and ``world_only`` there are no groups.
    """
    require_right(run, claims, found, must_change=True, evaluated=True)


@rule(
    "14.25",
    "Works under any default dtype of torch, and under autocast",
    on=(DEFAULT_DTYPES, AUTOCAST, AUTOCAST_HALF),
    owns=(DEFAULT_DTYPES, AUTOCAST, AUTOCAST_HALF),
    needs=("14.1", "14.2", "14.7", "14.8", "14.12"),
    baseline="like",
    since="1.6",
    source=f"{DEFAULT_DTYPE}; {AUTOCAST_OPERATIONS}",
    remedy="tensors that are made without a dtype: torch.zeros(n), torch.tensor(1 / n); take "
    "that of the parameter; matmul, einsum or linear, which compute in half precision under "
    "autocast",
)
def default_dtypes(run: Run, claims: Claims, found: Found) -> None:
    """Averages are right if torch's default dtype is float64, float16 or bfloat16, if it changes
    between averages, and if autocast to bfloat16 or float16 is on in every call. The averager is
    made under the first of the three dtypes.

    The order of the three is drawn, and so is the size of a large parameter: 2**10 to 2**17
    elements. Under autocast there are two: one of 2**10 to 2**20, and one of 2**20 to 2**21
    elements. The parameters are float32, and their gradients keep their bits.
    """
    require_right(run, claims, found, must_change=True, evaluated=True)
    require_same_gradients(run, found)


@rule(
    "14.26",
    "Conditions of training come together",
    on=CONDITIONS,
    owns=CONDITIONS,
    needs=("14.1", "14.2", "14.11", "14.16", "14.21", "14.24", "14.25", "14.12", "14.20"),
    baseline="like",
    since="1.6",
    source=TOGETHER,
    remedy=TOGETHER_REMEDY,
)
def together(run: Run, claims: Claims, found: Found) -> None:
    """Averages are right if conditions come together that other rules judge alone.

    Two runs have five to eight ranks, four dtypes, values of float16 near 40,000 and a default
    dtype that changes; the second goes on from the state that the first has saved. Two more have
    300 to 420 steps on two ranks under bfloat16 as the default dtype, and a save after more than
    256 steps. The numbers are drawn from the session's seed.
    """
    event = run.ranks[0].first("loaded")
    if event and event["nothing"]:
        found.leaves_out("it saves no state: no run that continues from a checkpoint is judged")
        return
    require_right(run, claims, found, must_change=True, evaluated=True)


own_numbers = right_beside_own_numbers("14.27", (large, long_run), on=(PROBE,))


@rule(
    "14.29",
    "Parameters that move in part are averaged as a whole",
    on=(ROWS,),
    owns=(ROWS,),
    needs=("14.1", "14.2", "14.7", "14.12"),
    baseline="like",
    since="2.0",
    source="Lin et al., Local SGD, ICLR 2020, algorithm 1: the mean of whole models; "
    "torch.nn.Embedding, whose padding_idx has no gradient",
    remedy="a test whether a parameter has moved: by its first and last elements, by sums or "
    "norms, or by its gradient in the step of the average alone; rows that are sent, and others "
    "that are not; an outer step that is left out if nothing has moved",
)
def moved_in_part(run: Run, claims: Claims, found: Found) -> None:
    """Matrices of which some inner rows alone have moved on each rank, and whose rows keep their
    sums, are averaged as a whole. In one average nothing has moved since the one before it.

    The rows are drawn from the session's seed, others in each step, so that a row moves in one and
    rests in the next.
    """
    require_right(run, claims, found, must_change=True, evaluated=True)
