"""Section 15, continued: what training does between the steps of an optimizer wrapper."""

from conformance.judging.oracles.optimizer import require_right
from conformance.judging.oracles.optimizer_calls import require_calls_under_scaler
from conformance.judging.oracles.optimizer_clipping import require_clipped_steps
from conformance.judging.oracles.optimizer_gradients import takes_averager
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.optimizer import AFTER_LOAD, PLAIN
from conformance.scenarios.optimizer_backwards import ALL as BACKWARDS
from conformance.scenarios.optimizer_backwards import ASSIGNED, EARLY
from conformance.scenarios.optimizer_clipping import CLIPPED
from conformance.scenarios.optimizer_loops import (
    RENEWED,
    WRITTEN,
    WRITTEN_DTYPES,
    WRITTEN_ONE_DTYPE,
)
from conformance.scenarios.optimizer_states import SCALED
from conformance.scenarios.optimizer_training import averages_gradients
from conformance.subjects.claims import Claims

ALONE = (
    "overflows of one rank alone are not judged: this takes an averager, and the attribute "
    "_step_supports_amp_scaling, since a GradScaler does not call other optimizers then"
)
NOT_SCALED = (
    "a GradScaler cannot be used with it, and raises an exception: no parameter in its "
    "param_groups has a gradient"
)
NOT_RENEWED = (
    "parameters that are replaced in param_groups are not judged: it averages neither parameters "
    "nor gradients, or its param_groups do not hold the parameters themselves"
)
NOT_SYNCHRONIZED = (
    "a backward after synchronize() is not judged: it has not both synchronize() and "
    "skip_synchronize()"
)
NO_GRADIENT_DTYPES = (
    "gradients of another dtype than their parameters are not judged: this torch has no "
    "torch.Tensor.grad_dtype"
)
NO_CLIPPING = "it has no clip_grad_norm() or clip_grad_norm_() that takes a norm alone"
IN_BACKWARD = (
    "gradients that no backward has accumulated are not judged: it averages or changes gradients "
    "before step()"
)


@rule(
    "15.38",
    "Steps that a GradScaler skips are left out, and no others",
    on=(SCALED,),
    owns=(SCALED,),
    needs=("15.1", "15.2", "15.3", "15.5"),
    since="1.6",
    source="torch documentation, torch.amp.GradScaler and Automatic Mixed Precision examples, "
    "Working with Unscaled Gradients; GradScaler.step, _step_supports_amp_scaling",
    remedy="param_groups with the parameters themselves, whose gradients a GradScaler unscales; a "
    "count of steps that no step() was called for; grad_scale and found_inf, if the optimizer has "
    "_step_supports_amp_scaling, also for the parameters of an added group; gradients that are "
    "cleared before the averager is called",
)
def under_scaler(run: Run, claims: Claims, found: Found) -> None:
    """With a GradScaler around the optimizer, parameters are those of the unscaled gradients, which
    are clipped in some steps. A step whose gradients overflow on all ranks moves nothing, and the
    averager is not called, or on all ranks in each of these steps. If it is called, parameters
    still have their gradients: averagers such as torch's leave out those without one.

    In some steps a parameter has no gradient on any rank. There are two groups with rates of their
    own, and a third one is added at a drawn step. Once the second group alone overflows, and later
    the added one alone.

    An optimizer with the attribute _step_supports_amp_scaling is called in every step. If it takes
    an averager, the gradients of one rank alone overflow in a further step: the other ranks step,
    and all ranks call the averager. Without this attribute nothing is promised for such a step,
    since that rank does not call the optimizer. The steps, scales and clipped magnitudes are drawn
    from the session's seed; in the last steps the scale is below 1, as after many overflows.

    If param_groups hold no parameter with a gradient, but slices that are copied in step(), a
    GradScaler raises an exception, and no step is silently wrong. The rule does not apply
    then, unless the optimizer declares its support of GradScaler by _step_supports_amp_scaling.
    """
    if all(rank.first("not_scaled") for rank in run.ranks):
        found.does_not_apply(NOT_SCALED)
        return
    if not run.ranks[0].one("scaler")["alone"]:
        found.note(ALONE)
    if takes_averager(run):
        require_calls_under_scaler(run, found)
    require_right(run, found)


@rule(
    "15.39",
    "Parameters may be written, or replaced, between steps",
    on=(WRITTEN, WRITTEN_ONE_DTYPE, WRITTEN_DTYPES, RENEWED),
    owns=(WRITTEN, WRITTEN_ONE_DTYPE, WRITTEN_DTYPES, RENEWED),
    refusable=(WRITTEN_ONE_DTYPE, WRITTEN_DTYPES, RENEWED),
    needs=("15.1", "15.2", "15.3", "15.14", "15.22"),
    since="1.6",
    source="torch documentation, torch.nn.Module.load_state_dict and torch.optim.Optimizer, whose "
    "step() reads the parameters in param_groups; weights that are clipped, or swapped with their "
    "moving averages; NVIDIA apex, amp O2: masters of half precision",
    remedy="copies of parameters, as masters in float32 or flat buffers, or their .data, that are "
    "taken once: read the parameters in each step, and compare all of their elements; a list of "
    "parameters that is made once: read param_groups in each step",
)
def written(run: Run, claims: Claims, found: Found) -> None:
    """Each step begins from the parameters as they are then, in float32, float64, float16 and
    bfloat16: after load_state_dict of the model, a copy to .data, or one element that is written in
    place. Parameters that take the place of others in param_groups are stepped, or an error on
    every rank refuses them.

    One of these comes before the first step, and another one after everything was restored to an
    earlier step. A model has one dtype, or all four; the two models of other dtypes than float32
    may be refused with an error on every rank. Parameters of these models get new memory, too, as
    by ``p.data = ...``. Parameters are replaced in an optimizer that averages parameters or
    gradients; new ones are stepped without a state, as in torch.optim, and averaged. The steps, the
    ways, the parameters, the dtype and the options are drawn from the session's seed.
    """
    if run.scenario.variant == RENEWED.variant:
        averages = takes_averager(run) or averages_gradients(run.scenario)
        if not averages or any(rank.first("not_renewed") for rank in run.ranks):
            found.leaves_out(NOT_RENEWED)
            return
    require_right(run, found)


@rule(
    "15.41",
    "Runs no hook of a step twice",
    on=(PLAIN,),
    needs=("15.1", "15.2", "15.3"),
    since="1.6",
    source="torch documentation, Optimizer.register_step_pre_hook; hooks clip gradients, or divide "
    "them by a number of tokens",
    remedy="a dict of hooks that the wrapper shares with the optimizer inside: both run it; a "
    "subclass of an optimizer whose step calls super().step(): torch runs hooks around both, "
    "unless the subclass says `step.hooked = True`, torch's mark of a step whose hooks are run",
)
def hooks_once(run: Run, claims: Claims, found: Found) -> None:
    """A hook that is registered by register_step_pre_hook, or register_step_post_hook, runs once in
    a step at most, with a closure or without. If it runs, it runs after ``load_state_dict()``, too.
    15.18 judges whether it runs at all.
    """
    calls = [
        (rank.rank, kind, count)
        for rank in run.ranks
        for event in rank.all("as_optimizer")
        for kind, count in event["hook_calls"].items()
        if count or event["hook_calls"][kind.removesuffix(AFTER_LOAD)]
    ]
    if not calls:
        found.does_not_apply("it runs no hooks of a step")
    for rank, kind, count in calls:
        found.checked(1)
        found.require(
            count == 1,
            "a hook that runs once in a step",
            f"rank {rank}: a {kind} hook ran {count} times",
        )


@rule(
    "15.43",
    "Gradients of several backwards add up, and those that a trainer writes or changes count",
    on=BACKWARDS,
    owns=BACKWARDS,
    refusable=BACKWARDS,
    needs=("15.1", "15.8", "15.9", "15.21"),
    claimed="averages",
    since="2.0",
    source="torch documentation, torch.autograd.backward, which accumulates gradients in leaves, "
    "Optimizer.zero_grad, Module.zero_grad and torch.nn.utils.clip_grad_norm_; Horovod's "
    "backward_passes_per_step and synchronize(), whose step() averages again unless it is within "
    "skip_synchronize(); torch.Tensor.grad_dtype; torch.autograd.grad, whose results PCGrad and "
    "MAML write; embeddings of which new rows alone are trained",
    remedy="a hook that moves a gradient into a buffer, and frees it: let p.grad be a view of the "
    "buffer, which clipping scales, and begin anew if p.grad is another tensor; a factor of a "
    "parameter's gradient in place of p.grad itself; sums in float32 of gradients in half "
    "precision, which clipping does not reach; the version of a "
    "tensor, which .data does not change; a gradient that is sent once it is there, and not again: "
    "average in step(), or offer synchronize(); gradients that are averaged if a hook of the "
    "backward has seen them: torch.autograd.grad calls no such hook; a mark of averaged gradients "
    "that step() alone takes back, although a batch that is given up has no step, or one more "
    "backward adds to the averaged tensor in place; torch.zeros_like(p), or a buffer of the dtype "
    "of p, for a gradient of another dtype; one callback for each step: a reentrant checkpoint is "
    "a graph task of its own, which ends before other gradients arrive; a mark that the end of a "
    "backward takes back, although a backward that raises an error has no such end; elements in "
    "the order of memory, in which p and p.grad may differ",
)
def several_backwards(run: Run, claims: Claims, found: Found) -> None:
    """After two or three backwards a step is that on the sum of their gradients, whichever
    parameters each of them reaches; gradients that zero_grad() of the optimizer or of the model has
    dropped, or p.grad = None, count in no step. Changes of p.grad before the step, the same on all
    ranks, count, whether p.grad is changed in place, in p.grad.data, or is replaced: a factor,
    zeros in some rows, a factor of each element, values that are added.

    Parameters are of float32; and of bfloat16 and of float16, with gradients that are changed. The
    steps, the changes, and the parameters of each backward, are drawn from the session's seed; in
    one run gradients arrive in drawn orders, as in 15.21. Of a backward that is dropped, one
    parameter has no gradient in the step that follows, and stays as it is. An error on every rank
    may refuse several backwards, dropped gradients, or half precision. If an optimizer has
    synchronize() and skip_synchronize(), as Horovod's, the first is called before gradients are
    scaled, and the step is within the second. Of some backwards that are dropped, synchronize() has
    averaged the gradients, if an optimizer has it, and skip_synchronize() may have been entered
    without a step: the gradients of the next batch are averaged too, by its synchronize() or by
    step(). So are those of one more backward that comes after synchronize(), and adds to the
    averaged gradients in place, by another synchronize(), or by step() outside of
    skip_synchronize(), as Horovod does; an error on every rank may refuse it.

    Gradients that no backward has accumulated count as others do: each rank writes its own to
    p.grad, for some parameters or for all, in place, in p.grad.data or as another tensor, and
    step() averages them. They are not judged if an optimizer averages gradients, or changes them,
    before step(), as in hooks of the backward; an error on every rank may refuse them. In another
    run their memory layouts are drawn for each parameter and step, the same on all ranks: that of
    the parameter, its dimensions in the other order, or a slice of one flat vector.

    Two backwards that are dropped raise an error on all ranks at the same gradient, which is drawn,
    and is not the first one to arrive. The trainer catches the error and clears the gradients.

    A part of the parameters may be in a reentrant activation checkpoint, all ranks alike: their
    gradients arrive before those of all others, or after them. The part is drawn, and an error on
    every rank may refuse it.

    Gradients of another dtype than their parameters, by ``grad_dtype``, count with the bits and the
    range of their own: float32 or float64 for weights of float16 and bfloat16, float64 for float32.
    Digits that cancel between ranks are below those of the weight's dtype, and in some steps
    gradients are too large or too small for float16. An error on every rank may refuse them.
    """
    if run.ranks[0].first("no_gradient_dtypes"):
        found.leaves_out(NO_GRADIENT_DTYPES)
        return
    is_early = run.scenario.variant == EARLY.variant
    if is_early and any(rank.first("not_synchronized") for rank in run.ranks):
        found.leaves_out(NOT_SYNCHRONIZED)
        return
    is_assigned = run.scenario.variant == ASSIGNED.variant
    if is_assigned and any(rank.first("before_step") for rank in run.ranks):
        found.leaves_out(IN_BACKWARD)
        return
    require_right(run, found)


@rule(
    "15.44",
    "Clips by the norm of all gradients",
    on=(CLIPPED,),
    owns=(CLIPPED,),
    may_refuse=True,
    needs=("15.1", "15.5", "15.9"),
    unless="averages",
    since="2.0",
    source="Hugging Face's Trainer, Lightning and fairseq, which call clip_grad_norm() of an "
    "optimizer that has it; torch.nn.utils.clip_grad_norm_; fairscale #167, norms of shares that "
    "were combined wrongly",
    remedy="the norm of this rank's share alone: add up the squares of all shares, and take the "
    "root once; norms that are added; the norm of one group, or of the "
    "parameters of the construction alone; a factor that stays for later steps",
)
def clips(run: Run, claims: Claims, found: Found) -> None:
    """If an optimizer has clip_grad_norm(max_norm), or clip_grad_norm_(max_norm), the next step is
    that with gradients that are multiplied by min(1, max_norm / norm), for the norm of all
    gradients of all parameters, on every rank. If a number is returned, it is that norm, or the
    norm after clipping.

    It is called before two thirds of the steps. In half of these max_norm is 0.1 to 0.9 of the
    norm, in the others 1.2 to 4 of it. Gradients are equal on all ranks; with an averager they are
    each rank's own, and so is the norm. A group is added between two of these steps; its parameters
    have no gradients before. In half of the steps one parameter has no gradient. The
    numbers are drawn from the session's seed, and so are the sizes of gradients; each parameter
    has a share in the norm. A method that requires more arguments is not judged; an error on every
    rank may refuse the call.
    """
    if any(rank.first("clips_not") for rank in run.ranks):
        found.does_not_apply(NO_CLIPPING)
        return
    require_clipped_steps(run, found)
