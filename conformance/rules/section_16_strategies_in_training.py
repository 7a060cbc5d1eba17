"""Section 16, continued: sync strategies as training uses them."""

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
from conformance.judging.oracles.strategy import require_means
from conformance.judging.oracles.strategy_buffers import require_buffers
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.conditions_together import STRATEGY as CONDITIONS
from conformance.scenarios.failing_collectives import STRATEGY
from conformance.scenarios.kinds_in_clusters import STRATEGY as CLUSTERS
from conformance.scenarios.kinds_under_default_dtypes import STRATEGY as DEFAULT_DTYPES
from conformance.scenarios.probes_of_kinds import STRATEGY as PROBE
from conformance.scenarios.strategy_training import (
    ABANDONED,
    AUTOCAST,
    AUTOCAST_HALF,
    BUFFERS,
    COMPLEX,
    EMPTY,
    GRADIENT_DTYPES,
    GROUP_BUFFERS,
    LARGE,
    LARGE_DTYPES,
    LONG,
    MANY,
    OWN_BUFFERS,
    PARTS,
    PASSES,
    PENALTIES,
    RECOVERED,
    REWRAPPED_BUFFERS,
    SECOND,
    SPECIAL,
    TWO,
)
from conformance.subjects.claims import Claims

COMPOSER = "MosaicML Composer, composer.distributed.ddp_sync_context"
TORCH = "torch documentation, DistributedDataParallel"


@rule(
    "16.20",
    "Models are as large as in training",
    on=(LARGE,),
    owns=(LARGE,),
    needs=("16.4",),
    since="1.2",
    source=f"{TORCH} (bucket_cap_mb); flat buffers and chunks of strategies",
    remedy="chunks of a fixed size, of which the last is left out; limits on the number of "
    "parameters; a path for large gradients that takes those that a rank happens to have",
)
def large(run: Run, claims: Claims, found: Found) -> None:
    """Every element of the gradients of a model of some hundred parameters is averaged: 170 to 400
    small ones, one of 2**17 to 2**18 elements and one of 2**20 to 2**21. Two more have one size,
    2**16 to 2**20 elements, and in each step another rank leaves out each; not under ``all_used``.

    The numbers are drawn from the session's seed.
    """
    require_means(run, found)


@rule(
    "16.21",
    "Values that are not finite, or nearly not, give their mean",
    on=(SPECIAL,),
    owns=(SPECIAL,),
    needs=("16.10",),
    since="1.2",
    source="IEEE 754; float16 ends at 65,504; torch.amp.GradScaler, which looks for infinities in "
    "the synchronised gradients of every rank",
    remedy="a sum in float16 before the division; code that replaces NaN or infinities, or leaves "
    "out ranks that have some; clipping; zeros that are taken for no gradient; a division by their "
    "norm; means of a step that wait for step() of the optimizer: a GradScaler does not call it",
)
def special_values(run: Run, claims: Claims, found: Found) -> None:
    """NaN and infinities of any rank reach all ranks at their elements alone, the mean of float16
    gradients near 40,000 is finite, and so are scaled ones, by 2**16 and 2**-24. Gradients that are
    zeros on one rank count as any others do, and those that are zeros on all ranks stay zeros: an
    optimizer skips a parameter without a gradient. After NaN and infinities no optimizer steps, and
    later steps give their own means.

    The order of these values, and the rank that has them, are drawn from the session's seed.
    """
    require_means(run, found)


@rule(
    "16.22",
    "A rank may have nothing to do in a micro-batch",
    on=(EMPTY,),
    owns=(EMPTY,),
    needs=("16.4", "16.10"),
    since="1.2",
    source="empty batches on one rank: its context is entered, and nothing happens in it",
    remedy="collectives that begin in the backward, and wait for one on every rank; an average "
    "that is left out, or gradients that are cleared, because no rank has had a backward",
)
def empty(run: Run, claims: Claims, found: Found) -> None:
    """If a rank has neither a forward nor a backward in some micro-batches, the last one among
    them, it counts with zeros, and ends with the same gradients as the others.

    In two steps, which are drawn, no rank has a backward in some micro-batch, as if all ranks had
    left out a loss that is not finite: in one step it is the last micro-batch, and in the other an
    earlier one. A drawn part of the ranks has a forward there. What has accumulated before is
    averaged all the same.

    DDP needs a backward on every rank: with the claims ``find_unused`` and ``all_used`` the rule
    does not apply.
    """
    if claims.has("all_used") or claims.has("find_unused"):
        found.does_not_apply(f"under {claims} every rank has a backward")
        return
    require_means(run, found)


@rule(
    "16.23",
    "Two models do not mix",
    on=(TWO,),
    owns=(TWO,),
    needs=("16.4", "16.10"),
    since="1.2",
    unless="counts",
    source="training of two models in one process, such as a GAN",
    remedy="counts, gradients, handles or notes on gradients that have come, or a flag for the "
    "first micro-batch of a step, if they are kept in the module or in the strategy, and not by "
    "model; notes on all models that end with an error of one",
)
def two(run: Run, claims: Claims, found: Found) -> None:
    """If the micro-batches of two models come in a drawn order, each model gets its own means. So
    does each if its context is inside that of the other model, or around it.

    The last micro-batch of one model comes between the two of the other one. Some parameters of
    each model are used before it alone, and some after it alone; which, is drawn for each step.
    Under ``all_used`` every micro-batch uses all of them.

    A drawn micro-batch of one model raises an exception before its backward, on all ranks, while
    the other model is in the midst of its step, and comes again: notes on the other model stay.
    """
    require_means(run, found)


@rule(
    "16.24",
    "Buffers stay those of the first rank",
    on=(BUFFERS, OWN_BUFFERS, GROUP_BUFFERS, REWRAPPED_BUFFERS),
    owns=(BUFFERS, OWN_BUFFERS, GROUP_BUFFERS, REWRAPPED_BUFFERS),
    needs=("16.2", "16.25", "16.26"),
    since="1.2",
    source=f"{TORCH} (broadcast_buffers): buffers are sent from rank 0 in every iteration; under "
    "no_sync they are not",
    remedy="model.require_forward_param_sync, which a forward under no_sync leaves False: set it "
    "to True when the step ends; or broadcast model.buffers(), from the first rank of "
    "model.process_group and not from rank 0, in any mode of the model: each buffer in its own "
    "dtype, those of frozen layers too; read the list anew in every step, since a list that is "
    "kept lacks new buffers, and state_dict() lacks some; copy a contiguous copy back into its "
    "buffer. Send no buffers if model.broadcast_buffers is False, and none in hooks that stay on "
    "the module: one rank alone may evaluate it. Put a changed option back in a finally",
)
def buffers(run: Run, claims: Claims, found: Found) -> None:
    """Each step begins with the buffers of the first rank on all ranks, as under DDP, so that those
    of a BatchNorm do not drift apart; gradients are the means.

    The buffers are running statistics, counts in int64, int32 and uint8, sums in float64 of more
    than 24 bits, values in float16 and bfloat16, a mask of bools, and complex numbers of both
    dtypes, where DDP sends these; each forward changes them by numbers that are drawn for each
    rank, which no narrower dtype holds. Drawn ones are transposed, channels_last, or a slice of a
    larger tensor. The running statistics are another tensor after each forward, and state_dict()
    lacks one of the counts. Drawn ones lie in layers that train nothing: one whose parameters are
    all frozen, as those of a BatchNorm may be, and two without parameters.

    In two drawn steps the model is in evaluation mode, and one of these layers at least is in
    training mode; in another one it is the other way round. A layer in evaluation mode leaves its
    buffers as they are, and may be left out when buffers are sent.

    Before two drawn steps one rank alone, which is drawn, has a forward of the module inside of DDP
    in evaluation mode, as the main process of many scripts has: a hook there that sends something
    waits for the others.

    A drawn step of one run goes on after a forward that is followed by an exception, and another
    one is given up: buffers are those of the first rank from the next whole step but one on; not
    under ``counts``.

    A strategy may send buffers in every micro-batch too, or when the step ends. If DDP was made
    with broadcast_buffers=False, each rank keeps buffers of its own. Buffers of a model on a
    subgroup are those of the group's first rank, also if the network was trained on other groups
    before; its gradients are judged by 16.9.
    """
    if run.scenario.name in (BUFFERS.name, OWN_BUFFERS.name):
        require_means(run, found)
    require_buffers(run, found)


@rule(
    "16.41",
    "Each of two models has the buffers of the first rank",
    on=(TWO,),
    needs=("16.23", "16.24"),
    since="2.0",
    unless="counts",
    source="training of two models in one process, such as a GAN",
    remedy="a flag for all models that says whether buffers are sent: keep one for each model",
)
def buffers_of_two(run: Run, claims: Claims, found: Found) -> None:
    """If the micro-batches of two models come in a drawn order, each step of either begins with its
    buffers of the first rank on all ranks. The buffers are those of 16.24.
    """
    require_buffers(run, found)


@rule(
    "16.25",
    "A step may be given up",
    on=(ABANDONED,),
    owns=(ABANDONED,),
    needs=("16.2", "16.10"),
    since="1.2",
    unless="counts",
    source="training loops that skip the rest of a step, after a loss of NaN or at the end of an "
    "epoch; torch.amp.GradScaler, which does not step after an overflow; torch documentation, "
    "torch.nn.Module.zero_grad and torch.optim.Optimizer.zero_grad",
    remedy="counts of micro-batches, gradients set aside, or sums in float32, that only a last "
    "micro-batch resets, or a hook on one of the calls that clear gradients, or on step() of an "
    "optimizer: begin anew after each last micro-batch, and accumulate in the gradients themselves",
)
def abandoned(run: Run, claims: Claims, found: Found) -> None:
    """If a step is given up before its last micro-batch, and gradients are cleared, the next step
    gives the means. So does the step after a whole one whose gradients the optimizers do not take.

    In all runs the trainer does not call step() of its optimizers after steps that are given up,
    that end by an exception, or whose gradients are not finite. Here, in long runs, with
    optimizers that take turns, and if conditions come together, it also leaves out one or more of
    the other steps, and at most a half of them, which are drawn.

    In all runs the trainer has three ways to clear gradients: the model's ``zero_grad``,
    those of its optimizers, and ``p.grad = None`` for each parameter. They come in turn, in a drawn
    order; steps that are given up have different ones.

    Here, and in 16.8, 16.9, 16.14, 16.22, 16.23, 16.26, 16.29, 16.36 and a run of 16.27, drawn
    parameters have float16 or bfloat16, one at least: sums in float32 beside them end with the
    gradients.
    """
    require_means(run, found)


@rule(
    "16.26",
    "A step may go on after an exception",
    on=(RECOVERED,),
    owns=(RECOVERED,),
    needs=("16.14",),
    since="1.2",
    unless="counts",
    source="training loops that skip a micro-batch that runs out of memory; torch documentation, "
    "torch.Tensor.backward: gradients are in .grad once they have accumulated",
    remedy="state that is changed when a context begins, and restored only if it ends well; code "
    "for one class of exceptions; state that ends with the last micro-batch, also if that fails "
    "and comes again; notes on gradients that an exception drops, of earlier "
    "micro-batches or of the failed one: these gradients are there",
)
def recovered(run: Run, claims: Claims, found: Found) -> None:
    """If a micro-batch raises an exception on all ranks, and the step goes on with the next one,
    gradients are the means of all that has accumulated.

    In steps of 3 or 4 micro-batches some parameters are used before the failed one alone, some
    after it alone, and some in it alone: which, is drawn.

    The exception comes before the backward, after the backward of a first loss, after a first pass
    with drawn ``inputs``, or in the midst of a backward. The gradients that are there by then stay,
    and the trainer keeps them. One of these ways has torch.OutOfMemoryError, which is drawn, and
    one another error that trainers catch; the others have drawn exceptions. Each comes twice, once
    in a step's first micro-batch. With the claims ``find_unused`` and ``all_used`` it comes before
    the backward.

    In two steps more, which are drawn, the last micro-batch fails before its backward, and comes
    again as the last one.
    """
    for rank in run.ranks:
        for event in rank.all("failed"):
            found.require(
                event["same"],
                "the exception that was raised inside",
                f"rank {rank.rank}, step {event['step']}: {event['came']} came out",
            )
    require_means(run, found)


@rule(
    "16.27",
    "Several backward passes in a context work, or are refused",
    on=(SECOND, PASSES, PARTS, PENALTIES),
    owns=(SECOND, PASSES, PARTS, PENALTIES),
    may_refuse=True,
    needs=("16.2", "16.10"),
    since="1.2",
    source="torch documentation, torch.Tensor.backward (retain_graph, inputs) and "
    "torch.autograd.grad: two losses of one micro-batch, adversarial examples, gradient penalties",
    remedy="an average that is made when gradients arrive, or when a backward pass ends: a later "
    "pass, such as one more than in earlier contexts, adds to it. Average when the context ends",
)
def second(run: Run, claims: Claims, found: Found) -> None:
    """If each context holds several passes of autograd, gradients are the means of all that these
    have added; or an error on every rank refuses them.

    One run has two forwards, each with its backward. One has two backwards through the output of
    one forward, or after two forwards. In one ``torch.autograd.grad()`` of drawn parameters comes
    before the backward, or the backward has two passes with drawn ``inputs``. The last
    micro-batches of steps have both ways in turn.

    In a run of 10 to 24 steps contexts have one pass each until a drawn step, in which the last one
    has two; later drawn ones have more, of all parameters or of some, and at last one has three.

    DDP averages the first gradient of a parameter after its last forward alone: with the claims
    ``find_unused`` and ``all_used`` the second run has the ways of the third, and passes of the
    last one begin with a forward.
    """
    require_means(run, found)


@rule(
    "16.28",
    "Complex gradients work, or are refused",
    on=(COMPLEX,),
    owns=(COMPLEX,),
    may_refuse=True,
    needs=("16.2",),
    since="1.2",
    source="torch documentation, Complex Numbers, autograd; DDP averages complex gradients",
    remedy="flat buffers of a real dtype; view_as_real before a collective",
)
def complex_gradients(run: Run, claims: Claims, found: Found) -> None:
    """Complex gradients beside real ones are means in both parts; or an error on every rank refuses
    them."""
    require_means(run, found)


@rule(
    "16.29",
    "Long runs average as short ones do",
    on=(LONG,),
    owns=(LONG,),
    needs=("16.2", "16.26"),
    since="1.2",
    source="runs of training have many thousand steps",
    remedy="a count or a buffer that ends after some number of micro-batches; hooks on the module "
    "that take an evaluation for a micro-batch, or its mode for the end of training",
)
def long_run(run: Run, claims: Claims, found: Found) -> None:
    """In each of 120 to 240 steps of two micro-batches, by the session's seed, gradients are the
    means. In one step of five an exception comes from the first micro-batch, as in 16.26; not under
    ``counts``.

    Before drawn steps the model is evaluated: eval(), forwards under no_grad, and train(). Others
    have such forwards before their last micro-batch, in either mode. A third of the former are
    forwards of the module inside of DDP, on one drawn rank alone.
    """
    require_means(run, found)


fails = raises_if_collective_fails(
    "16.30", call="the strategy's context", on=STRATEGY, needs=("16.2", "16.5")
)

kept = keeps_no_more("16.31", on=(LONG,), needs=("16.29",))


@rule(
    "16.32",
    "Gives means on five to eight ranks, and on any groups",
    on=CLUSTERS,
    owns=CLUSTERS,
    needs=("16.2", "16.9"),
    since="1.6",
    source=ON_MORE_RANKS,
    remedy="a divisor from LOCAL_WORLD_SIZE; means of the nodes' means; tables and buffers for "
    "four ranks; a constant distance between the ranks of a group",
)
def on_clusters(run: Run, claims: Claims, found: Found) -> None:
    """On five or seven ranks on nodes of unequal size, six or eight ranks on equal nodes, and
    groups of four and two ranks without a constant distance, gradients are the means. torchrun's
    variables describe the nodes; all of it is drawn."""
    require_means(run, found)


@rule(
    "16.33",
    "Works under any default dtype of torch, and under autocast",
    on=(DEFAULT_DTYPES, AUTOCAST, AUTOCAST_HALF),
    owns=(DEFAULT_DTYPES, AUTOCAST, AUTOCAST_HALF),
    needs=("16.2",),
    since="1.6",
    source=f"{DEFAULT_DTYPE}; {AUTOCAST_OPERATIONS}",
    remedy="tensors that are made without a dtype, as counts and flags: torch.zeros(n), "
    "torch.tensor(1 / n); matmul, einsum or linear, which compute in half precision under autocast",
)
def default_dtypes(run: Run, claims: Claims, found: Found) -> None:
    """Gradients are means if torch's default dtype is float64, float16 or bfloat16, if it changes
    between steps, and if autocast to bfloat16 or float16 is on around every micro-batch: its
    forward, its backward and the strategy's context.

    The order of the three is drawn, and so is the size of a large parameter: 2**10 to 2**17
    elements. Under autocast there are two: one of 2**10 to 2**20, and one of 2**20 to 2**21
    elements. The parameters are float32.
    """
    require_means(run, found)


@rule(
    "16.34",
    "Any number of micro-batches works",
    on=(MANY,),
    owns=(MANY,),
    needs=("16.2",),
    since="1.6",
    unless="counts",
    source="gradient accumulation with dozens of micro-batches; torch documentation, "
    "DistributedDataParallel.no_sync",
    remedy="a count of micro-batches that wraps around, or has a largest value; an average after "
    "a number of them",
)
def many_micro_batches(run: Run, claims: Claims, found: Found) -> None:
    """After a step of 5 to 40 micro-batches gradients are the sums of their means. The numbers are
    drawn from the session's seed."""
    require_means(run, found)


@rule(
    "16.35",
    "Conditions of training come together",
    on=CONDITIONS,
    owns=CONDITIONS,
    needs=("16.2", "16.5", "16.21", "16.29", "16.32", "16.33", "16.34"),
    since="1.6",
    source=TOGETHER,
    remedy=TOGETHER_REMEDY,
)
def together(run: Run, claims: Claims, found: Found) -> None:
    """Gradients are right if conditions come together that other rules judge alone.

    One run has five to eight ranks, find_unused_parameters, views, four dtypes, a default dtype
    that changes, and steps of up to nine micro-batches that use different parameters. One has 300
    to 420 steps on two ranks under bfloat16 as the default dtype, and one NaN, infinities and
    float16 near its limit on five to eight ranks. The numbers are drawn from the session's seed.
    """
    require_means(run, found)


own_numbers = right_beside_own_numbers("16.37", (large, long_run), on=(PROBE,))


@rule(
    "16.40",
    "Gradients of another dtype than their parameters work, or are refused",
    on=(GRADIENT_DTYPES, LARGE_DTYPES),
    owns=(GRADIENT_DTYPES, LARGE_DTYPES),
    may_refuse=True,
    needs=("16.2",),
    since="2.0",
    source="torch documentation, torch.Tensor.grad_dtype: gradients accumulate in float32 for "
    "parameters of half precision",
    remedy="buffers by the dtypes of the parameters, or of their first gradients: "
    "torch.zeros_like(parameter), torch.empty(n, dtype=parameter.dtype), also those of large "
    "gradients alone; limits by torch.finfo(parameter.dtype)",
)
def gradient_dtypes(run: Run, claims: Claims, found: Found) -> None:
    """Gradients of float32 of parameters of half precision, and of float64 of narrower parameters,
    are means with the bits of their own dtype; or an error on every rank refuses them.

    The dtypes are drawn from the session's seed, and so is which parameters have the dtype as
    ``grad_dtype``, and which have None, with which the first gradient decides. Some have gradients
    of their own dtype in the first of 8 to 16 steps, and in drawn later ones. In drawn steps wider
    gradients are beyond the range of the parameter's dtype, or below its least number, as under a
    loss scale. In a run of three
    steps two parameters of half precision are large: one of 2**10 to 2**20, and one of 2**20 to
    2**21 elements. In versions of torch that have no ``grad_dtype`` the rule does not apply.
    """
    if any(event["parameters"] is None for event in run.ranks[0].all("gradient_dtypes")):
        found.does_not_apply("this torch has no torch.Tensor.grad_dtype")
        return
    require_means(run, found)
