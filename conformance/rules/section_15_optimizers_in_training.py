"""Section 15, continued: optimizer wrappers as training uses them."""

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
from conformance.judging.oracles.loaded_states import require_refused_by_all
from conformance.judging.oracles.optimizer import require_right, require_steps_with_some_gradient
from conformance.judging.oracles.optimizer_calls import (
    require_empty_group_refused_by_all,
    require_own_entries,
)
from conformance.judging.oracles.optimizer_gradients import (
    construction,
    takes_averager,
    takes_options_of_sgd,
)
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.conditions_together import OPTIMIZER as CONDITIONS
from conformance.scenarios.conditions_together import OPTIMIZER_SPECIAL
from conformance.scenarios.failing_collectives import OPTIMIZER, OPTIMIZER_WITH_CLOSURES
from conformance.scenarios.kinds_in_clusters import OPTIMIZER as CLUSTERS
from conformance.scenarios.kinds_under_default_dtypes import OPTIMIZER as DEFAULT_DTYPES
from conformance.scenarios.optimizer_loops import AUTOCAST, AUTOCAST_HALF
from conformance.scenarios.optimizer_rests import RESTS, RESTS_OF_ADAM
from conformance.scenarios.optimizer_states import USERS
from conformance.scenarios.optimizer_training import (
    ADAGRAD,
    ADAM_OPTIONS,
    ADAMW,
    EMPTY,
    LARGE,
    LONG,
    MANY_GROUPS,
    OPTIONS,
    OWN,
    RANDOM_DTYPES,
    RESUMED_GROUPS,
    SAVED_GROUPS,
    SPECIAL,
    TWO,
    TWO_GROUPS,
    averages_gradients,
    kept_plan,
    wrapped_class,
)
from conformance.scenarios.probes_of_kinds import OPTIMIZER as PROBE
from conformance.subjects.claims import Claims

BASIC = ("15.1", "15.2", "15.3")
NO_OPTIMIZER = "it takes neither an optimizer nor a class of optimizers"
NO_OPTIONS = (
    "it takes neither an optimizer nor a class of optimizers, nor lr, momentum and weight_decay"
)
LIMIT = (
    "it was given equal gradients on all ranks, and averages none: the certificate covers its use "
    "with gradients that DDP, or another subject, has averaged"
)


@rule(
    "15.21",
    "Gradients are averaged if it claims to average them",
    on=(OWN,),
    owns=(OWN,),
    needs=BASIC,
    since="1.2",
    source="Horovod's DistributedOptimizer averages gradients; torch's ZeroRedundancyOptimizer and "
    "PostLocalSGDOptimizer leave that to DDP; DeepSpeed #2343, gradients that arrive in another "
    "order on each rank",
    remedy="the claim averages; or an average of gradients of which some are left out; collectives "
    "in the order in which gradients arrive: ranks need a fixed one, as that of param_groups",
)
def who_averages(run: Run, claims: Claims, found: Found) -> None:
    """Given gradients of each rank's own, a subject that claims ``averages`` steps with their mean.
    Without the claim, and without an averager, every element is stepped with the gradient of one
    rank.

    The order in which the gradients of a backward arrive is drawn from the session's seed for each
    step. In half of the steps parameters of as many elements change places from one rank to the
    next, in the first step and the last one, too.

    The certificate of a subject without the claim covers gradients that are averaged already.
    """
    if takes_averager(run):
        found.does_not_apply("it takes an averager: 15.3")
        return
    if averages_gradients(run.scenario):
        require_right(run, found)
        return
    require_steps_with_some_gradient(run, found)
    found.does_not_apply(LIMIT)


@rule(
    "15.22",
    "Random gradients of any dtype are stepped precisely",
    on=(RANDOM_DTYPES,),
    owns=(RANDOM_DTYPES,),
    may_refuse=True,
    needs=("15.11",),
    since="1.2",
    source="torch documentation, ZeroRedundancyOptimizer; float64 models and half precision",
    remedy="copies, shares or buffers in another dtype than the parameter's",
)
def random_dtypes(run: Run, claims: Claims, found: Found) -> None:
    """On random gradients of float32, float64, float16 and bfloat16 parameters, six steps with
    momentum and weight decay differ by roundings in the parameter's own dtype at most.

    Rate, momentum and weight decay are drawn from the session's seed.
    """
    require_right(run, found)


@rule(
    "15.23",
    "Every option of every group takes effect",
    on=(OPTIONS, ADAM_OPTIONS),
    owns=(OPTIONS, ADAM_OPTIONS),
    needs=("15.5", "15.6", "15.7"),
    since="1.2",
    source="torch documentation, torch.optim.SGD and Adam; OneCycleLR, which writes momentum and "
    "betas",
    remedy="options other than lr that are copied once; options of a closure's step; an added "
    "group with the options of the first; options of the construction, which count in groups that "
    "leave them out; a kernel that is chosen while momentum or weight decay is 0",
)
def every_option(run: Run, claims: Claims, found: Found) -> None:
    """Momentum, dampening, weight decay, nesterov, maximize, betas, eps and amsgrad of each group
    count, also after they are rewritten, with closures, and in a group that is added. Options that
    a group leaves out are those of the construction. The weight decay of one group, and the
    momentum of one of SGD's, are 0 until a step rewrites them.

    All numbers, the options that are left out, and the step at which the group is added, are drawn
    from the session's seed.
    """
    if not construction(run)["takes_any"]:
        found.does_not_apply(NO_OPTIMIZER)
        return
    require_right(run, found)


@rule(
    "15.24",
    "A rank may have no gradient, and a parameter none or zeros for many steps",
    on=(EMPTY, RESTS, RESTS_OF_ADAM),
    owns=(EMPTY, RESTS, RESTS_OF_ADAM),
    needs=("15.5", "15.6", "15.9", "15.23"),
    since="1.2",
    source="empty batches on one rank; fine-tuning, which freezes and unfreezes layers; mixtures "
    "of experts; torch.optim, which keeps the state of a parameter without a gradient, and counts "
    "the steps of each parameter; zero_grad(set_to_none=False), and DDP, which leave zeros; "
    "microsoft/dion #104, a captured step",
    remedy="a step that returns early without gradients; a list of parameters that is made once; "
    "requires_grad in place of the gradient that is there; the state of a parameter, or of its "
    "rows, that is dropped after some steps without a gradient or with zeros, or while it is "
    "frozen, or if a group is added then; one count of steps for a group of parameters; a "
    "zero_grad() that clears the parameters that are trained now, or were at first; a step that is "
    "captured, with the options of its groups: capture it anew if one of them is written; a loop "
    "over the groups that ends at one without a gradient, as by break in place of continue; ranks "
    "that agree on the parameters with gradients again only if those of one rank have changed",
)
def empty(run: Run, claims: Claims, found: Found) -> None:
    """In some steps one rank has no gradient at all, and steps nothing of its own, but takes part
    in averages; a frozen parameter is not stepped, and an unfrozen one is. One that is frozen
    between the backward and the step, as by a schedule at the end of a batch, has a gradient still:
    it is stepped once more, as by torch.optim, with the mean if gradients are averaged. After many
    steps without a gradient, or with one of zeros, a parameter goes on from its own state.

    One whose first gradient comes late begins as in a first step. The optimizer is SGD with
    momentum, and Adam or AdamW. For 260 to 300 steps in a row a parameter has no gradient, and
    another one is frozen; two more rest in turns, one has a gradient in every 9th to 60th step
    alone, and two are trained from the 20th to 250th step on. If ranks have gradients of their own,
    the rest of one parameter ends on the first rank 3 to 15 steps before the other one, and that of
    another parameter on the second, as of an expert that one rank alone begins to use. At the end a
    whole group in front of another one is frozen for 2 to 6 steps, and has no gradient for 2 to 6
    more, and in one step no parameter has a gradient on any rank. Of four more the gradients are
    zeros, in whole or in some rows, for as many steps in a row or in turns. Meanwhile a group is
    added: parameters that are frozen then, or have no gradient, keep their states. Options of
    groups are written twice, once after 12 to 60 steps in which no group has changed, and once
    after 150 or more: rate, momentum or betas, and weight decay, each in one group or more. In
    drawn steps zero_grad() of the optimizer clears the gradients before the backward, or after the
    step before: also those of parameters that were frozen since, or thawed. The numbers and the
    parameters are drawn from the session's seed.

    Without an averager and without the claim ``averages`` all ranks have the same gradients.
    """
    if wrapped_class(run.scenario) != "SGD" and not construction(run)["takes_any"]:
        found.leaves_out(f"rests of parameters are judged with SGD alone: {NO_OPTIMIZER}")
        return
    require_right(run, found)


@rule(
    "15.25",
    "Models are as large as in training",
    on=(LARGE,),
    owns=(LARGE,),
    needs=BASIC,
    since="1.2",
    source="shares of large models, as of torch's ZeroRedundancyOptimizer",
    remedy="a share of a fixed size; limits on the number of parameters or elements",
)
def large(run: Run, claims: Claims, found: Found) -> None:
    """Every element of a model of some hundred parameters is stepped: 170 to 400 small ones, one of
    2**17 to 2**18 elements and one of 2**20 to 2**21.

    The numbers are drawn from the session's seed.
    """
    require_right(run, found)


@rule(
    "15.26",
    "Values that are not finite stay at their elements",
    on=(SPECIAL,),
    owns=(SPECIAL,),
    may_refuse=True,
    needs=("15.9",),
    since="1.2",
    source="IEEE 754; float16 ends at 65,504; GradScaler decides about overflows, and not the "
    "optimizer",
    remedy="code that replaces NaN or infinities; a step that one rank leaves out alone; a sum in "
    "float16 before the division",
)
def special_values(run: Run, claims: Claims, found: Found) -> None:
    """NaN and infinities in gradients, of any rank, reach the parameters that they belong to as by
    the local optimizer and the averages, and the other elements are stepped as ever.

    A subject that averages gradients is given float16 gradients near 40,000, too: their sum
    overflows, and their mean does not.
    """
    require_right(run, found)


@rule(
    "15.27",
    "Two optimizers do not mix",
    on=(TWO, TWO_GROUPS),
    owns=(TWO, TWO_GROUPS),
    needs=(*BASIC, "15.5", "15.6"),
    since="1.2",
    source="training of two models in one process, such as a GAN; Muon for matrices and AdamW for "
    "the rest, whose gradients come from one backward",
    remedy="counts, buffers, states, or the group's size, in the class or the module instead of "
    "the object; a mark of a backward that one optimizer sets, and another one finds; a dict of "
    "options in a default argument, which all objects share",
)
def two(run: Run, claims: Claims, found: Found) -> None:
    """Two optimizers of two models that take turns in a drawn order each step their own model, with
    the ranks of their own group. Before drawn pairs of their steps both models get their gradients,
    by one backward of both losses, if the optimizers average gradients, or by two.

    Each optimizer has options of its own, and parameter groups that leave out some of them. At a
    step of its own each gets one more group, and a rate is written to one of its groups. The
    options and the steps are drawn from the session's seed.

    In one run both are on the same ranks. In another one WORLD has four or five ranks, and the
    other group two or three of them; which model has which group is drawn. Under ``world_only``
    both have WORLD. On two groups backwards are separate.
    """
    if run.ranks[0].first("two") is None:
        found.does_not_apply("the target is one existing object, which cannot be made twice")
        return
    require_right(run, found)


@rule(
    "15.28",
    "A state is saved at any step, of any groups",
    on=(SAVED_GROUPS, RESUMED_GROUPS),
    owns=(SAVED_GROUPS, RESUMED_GROUPS),
    needs=("15.5", "15.6", "15.10", "15.13"),
    since="1.2",
    source="torch documentation, ZeroRedundancyOptimizer.consolidate_state_dict(to), "
    "PostLocalSGDOptimizer.load_state_dict; Optimizer.load_state_dict, which matches by place and "
    "not by name; pytorch #51601, #63340, #78988",
    remedy="numbers of parameters across interleaved groups, or from before a group was added, as "
    "those of an earlier save; "
    "global ranks in place of ranks in the group; load_state_dict that takes its argument apart; "
    "options, entries of the user's own, or max_exp_avg_sq of amsgrad, that are not saved; a "
    "loaded state that waits for the next step, and is not in state_dict() until then; lists of "
    "groups or parameters that a load makes, and that a later add_param_group does not reach",
)
def saved_groups(run: Run, claims: Claims, found: Found) -> None:
    """On a subgroup, Adam with interleaved parameter groups, whose rates were rewritten, is saved
    at a drawn step of the warm-up; new processes load the state twice, save and load it once more
    before they step, and continue.

    A group was added at a drawn step before the save, and after an earlier state_dict(). New
    processes make one or two groups at first, and add the others before they load. As by
    torch.optim, states and options are matched by places in the groups: in these processes
    parameters of equal shapes have changed places. One
    group has amsgrad. The user's own entries in groups, such as a name or initial_lr, are saved
    and loaded like options; their names and values are drawn. At a drawn step after the save, or
    after the load, one more group is added: it is stepped, averaged, and has the rate that is
    written to it. Options that a group leaves out are those of the construction, which are the same
    in both processes. As by 15.13, ranks load the state of the group's first one if the subject
    averages gradients, and all ranks have saved the same tensors.
    """
    if claims.has("world_only"):
        found.does_not_apply("it claims world_only")
        return
    if not construction(run)["takes_any"]:
        found.does_not_apply(NO_OPTIMIZER)
        return
    require_refused_by_all(run, found)
    require_right(run, found)
    require_own_entries(run, found)


@rule(
    "15.29",
    "Long runs step as short ones do",
    on=(LONG,),
    owns=(LONG,),
    needs=(*BASIC, "15.6"),
    since="1.2",
    source="runs of training have many thousand steps, and schedules with steps far apart",
    remedy="a warm-up, a count or a buffer that ends after some number of steps; a step that is "
    "captured with its learning rate",
)
def long_run(run: Run, claims: Claims, found: Found) -> None:
    """In each of 400 to 700 steps, by the session's seed, parameters are those of the local steps
    and of the averages. A learning rate that is written once, in a drawn step of the second half,
    takes effect."""
    require_right(run, found)


fails = raises_if_collective_fails(
    "15.30", call="step(), or the backward before it,", on=OPTIMIZER, needs=BASIC
)

fails_with_closure = raises_if_collective_fails(
    "15.31",
    title="Raises if a collective fails in a step with a closure",
    call="step(closure)",
    on=OPTIMIZER_WITH_CLOSURES,
    needs=("15.7", "15.30"),
)

kept = keeps_no_more("15.32", on=(LONG,), needs=("15.29",))


@rule(
    "15.33",
    "Steps right on five to eight ranks, and on any groups",
    on=CLUSTERS,
    owns=CLUSTERS,
    needs=(*BASIC, "15.10"),
    since="1.6",
    source=ON_MORE_RANKS,
    remedy="shards for four ranks; a rank that has no shard, since there are more ranks than "
    "parameters; a constant distance between the ranks of a group",
)
def on_clusters(run: Run, claims: Claims, found: Found) -> None:
    """Five or seven ranks on nodes of unequal size, six or eight ranks on equal nodes, and groups
    of four and two ranks without a constant distance step as two ranks do. torchrun's variables
    describe the nodes; all of it is drawn."""
    require_right(run, found)


@rule(
    "15.34",
    "Works under any default dtype of torch, and under autocast",
    on=(DEFAULT_DTYPES, AUTOCAST, AUTOCAST_HALF),
    owns=(DEFAULT_DTYPES, AUTOCAST, AUTOCAST_HALF),
    needs=(*BASIC, "15.7", "15.11"),
    since="1.6",
    source=f"{DEFAULT_DTYPE}; {AUTOCAST_OPERATIONS}",
    remedy="tensors that are made without a dtype, as counts, flags and moments: "
    "torch.zeros(n), torch.tensor(x); matmul, einsum or linear, which compute in half precision "
    "under autocast",
)
def default_dtypes(run: Run, claims: Claims, found: Found) -> None:
    """Steps are right if torch's default dtype is float64, float16 or bfloat16, if it changes
    between steps, and if autocast to bfloat16 or float16 is on around the backward and step(), with
    closures too. The optimizer is made under the first of the three dtypes.

    The order of the three is drawn, and so is the size of a large parameter: 2**10 to 2**17
    elements. Under autocast there are two: one of 2**10 to 2**17, and one of 2**17 to 2**19
    elements. The parameters are float32.
    """
    require_right(run, found)


@rule(
    "15.35",
    "Any number of parameter groups works",
    on=(MANY_GROUPS,),
    owns=(MANY_GROUPS,),
    needs=("15.5",),
    since="1.6",
    source="torch documentation, torch.optim, Per-parameter options; layer-wise decay of the "
    "learning rate, with two groups for each layer; flattened models, such as an LSTM on a GPU",
    remedy="a list of options for a few groups; groups that are joined beyond a number; tied "
    "weights that are recognised by their storage, which views of a flat buffer share; a loop over "
    "the groups that ends at an empty one, as by break in place of continue",
)
def many_groups(run: Run, claims: Claims, found: Found) -> None:
    """With 12 to 40 parameter groups each parameter is stepped with the options of its own group,
    and with those of the construction that its group leaves out. A group of one parameter has the
    parameter itself in place of a list, as torch's optimizers take it; a list, if that raises an
    error. In front of a drawn group there is one without a parameter, unless an error on every rank
    refuses that. All parameters are views of one flat buffer. Values between the views are not
    judged.

    The number of groups, their parameters, their options, their places in the buffer, and the gaps
    between them, are drawn from the session's seed.
    """
    if not takes_options_of_sgd(run):
        found.does_not_apply(NO_OPTIONS)
        return
    require_empty_group_refused_by_all(run, found)
    require_right(run, found)


@rule(
    "15.36",
    "AdamW, Adagrad and an optimizer of the user's own step as they do alone",
    on=(ADAMW, ADAGRAD, USERS),
    owns=(ADAMW, ADAGRAD, USERS),
    needs=(*BASIC, "15.5", "15.6", "15.13"),
    since="1.6",
    source="Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019; Duchi, Hazan "
    "and Singer, JMLR 12, 2011; torch documentation, torch.optim.AdamW and Adagrad",
    remedy="code for the state or the options of SGD and Adam alone, as for entries that are "
    "tensors; a decay that is added to the gradient; a class that is replaced by a known one; "
    "step() called twice; entries of groups that are written to the optimizer inside before each "
    "step, and never taken back, or those alone that are there from the start",
)
def other_optimizers(run: Run, claims: Claims, found: Found) -> None:
    """A wrapper around another optimizer than SGD and Adam steps as that optimizer does, and
    averages as around SGD.

    AdamW decays parameters apart from gradients; one of its two groups has amsgrad. Adagrad has its
    state from the start, and a rate that falls with its own count of steps. Their options are
    drawn, and rewritten before every other step. The state of the user's own optimizer is an
    integer, and tensors in a dict and a list. It also counts its steps in each parameter group, as
    schedule-free optimizers and Prodigy keep their numbers there; one such entry is made in the
    first step. It is saved and restored in the
    same process at drawn steps.
    """
    if not construction(run)["takes_any"]:
        found.does_not_apply(NO_OPTIMIZER)
        return
    require_right(run, found)


@rule(
    "15.37",
    "Conditions of training come together",
    on=CONDITIONS,
    owns=CONDITIONS,
    # Some parameters are in half precision, which an optimizer may refuse.
    refusable=(OPTIMIZER_SPECIAL,),
    needs=(*BASIC, "15.11", "15.13", "15.14", "15.29", "15.33", "15.34", "15.35"),
    since="1.6",
    source=TOGETHER,
    remedy=TOGETHER_REMEDY,
)
def together(run: Run, claims: Claims, found: Found) -> None:
    """Steps are right if conditions come together that other rules judge alone.

    Two runs have five to eight ranks, 12 to 24 groups with rewritten options, some of which are 0
    at first, and a default dtype that changes; the second goes on from the state that the first has
    saved. Two more have 300 to 420 steps on two ranks under bfloat16 as the default dtype, and a
    save after more than 256 steps. One has NaN and infinities on five to eight ranks. The numbers
    are drawn from the session's seed.
    """
    if kept_plan(run.scenario).groups and not takes_options_of_sgd(run):
        found.leaves_out(f"no run with many groups is judged: {NO_OPTIONS}")
        return
    require_right(run, found)


own_numbers = right_beside_own_numbers("15.40", (large, long_run), on=(PROBE,))
