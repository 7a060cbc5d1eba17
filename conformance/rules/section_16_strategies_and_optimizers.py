"""Section 16, continued: sync strategies and the optimizers of a trainer."""

from conformance.judging.oracles.strategy import ALL_USED, record, require_means, steps
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.strategy import ACCUMULATED, FLAT, FORMS, KEPT, PLAIN, RANKS, SHARED
from conformance.scenarios.strategy_schedule import ZEROED, is_judged
from conformance.scenarios.strategy_training import ADDED, FREEZING, SWAPPED, TURNS, UNFROZEN
from conformance.subjects.claims import Claims

COMPOSER = "MosaicML Composer, composer.distributed.ddp_sync_context"
TORCH = "torch documentation, DistributedDataParallel"


@rule(
    "16.7",
    "Optimizers may share a parameter, and groups may rest",
    on=(SHARED,),
    owns=(SHARED,),
    needs=("16.2",),
    source=f"{COMPOSER}, whose forced_sync iterates over the parameters of every optimizer; torch "
    "documentation, torch.optim.Adam and SGD (momentum): their states take gradients in at any lr",
    remedy="visit each parameter once, or divide only the values that were just summed; visit the "
    "groups of any learning rate, also if they have no momentum: those of Adam have none; "
    "keys of a schedule, such as initial_lr",
)
def shared(run: Run, claims: Claims, found: Found) -> None:
    """A parameter of two optimizers is averaged once, like the others. So are the parameters of
    groups that rest, at a learning rate of 0, while others move, or all together in the first step,
    in which a warm-up begins at 0.

    The rates are drawn from the session's seed, and so are the steps in which a group rests: the
    first ones, the last ones, or some; in one step each all groups of an optimizer rest. Groups
    have the keys of a schedule: initial_lr, in those of one optimizer max_lr and min_lr, too. One
    optimizer is an SGD with momentum. The class of the other is drawn: Adam, AdamW, NAdam, RAdam,
    Adamax, Adadelta, or RMSprop, with the states of its parameters, or with none yet.
    """
    require_means(run, found)


@rule(
    "16.36",
    "Optimizers may take turns, and parameters may come later",
    on=(ADDED, TURNS, SWAPPED, FREEZING, UNFROZEN),
    owns=(ADDED, TURNS, SWAPPED, FREEZING, UNFROZEN),
    needs=("16.2", "16.5", "16.10"),
    since="1.6",
    source="torch documentation, torch.optim.Optimizer.add_param_group: layers that are frozen at "
    "first are added as training goes on; torch.optim.Optimizer.zero_grad (set_to_none); GANs; an "
    "optimizer for the body of a model, and one for its head",
    remedy="optimizers, lists of parameters, flags or buffers that are kept from the first step: "
    "other optimizers, or other param_groups, may be given since, also with as many parameters, "
    "and new gradients may lie outside of the buffers; parameters without requires_grad that are "
    "left out, although they have a gradient; sums beside the gradients that begin anew only if "
    "these are cleared when a context begins",
)
def added_parameters(run: Run, claims: Claims, found: Found) -> None:
    """Gradients are means for parameters too that no rank uses, and no optimizer has, before a
    later step, and if two optimizers of parts of one model take turns.

    A step uses the parameters of one of the two or of both, and the strategy is given the
    optimizers that step. In a further run an optimizer drops parameters and is given as many
    others; later all layers are replaced by new ones of the same shapes, and the model is wrapped
    in DDP again. In another one each micro-batch of a step freezes other parameters, as GANs do:
    gradients of earlier micro-batches count, too. In a last one ``zero_grad(set_to_none=False)``
    clears gradients, which keep their memory; some steps drop a part of them. In two to four of the
    eight steps it comes between the forward and the backward of the first micro-batch: sums that
    are kept beside the gradients end there, too. Two steps unfreeze parameters, which have their
    first gradients then. The steps and the parameters, the parts and the turns are drawn from the
    session's seed. With the claim ``all_used`` there is the last run alone, and no parameter is
    frozen.
    """
    # Under this claim one of the scenarios has a variant in which all parameters are used.
    if claims.has("all_used") and run.scenario.variant != ZEROED:
        found.leaves_out(ALL_USED)
        return
    require_means(run, found)


@rule(
    "16.39",
    "The trainer's own things stay as they are",
    on=(PLAIN, ACCUMULATED, RANKS, SHARED, KEPT, FORMS, FLAT, FREEZING),
    needs=("16.2",),
    since="2.0",
    source=f"{TORCH}: replicas begin with the same parameters, and the optimizer alone changes "
    "them; torch.optim.Optimizer.step; torch.nn.Module.train, which sets the modes of all parts",
    remedy="parameters that are sent again in a narrower dtype, or put into a new flat buffer; "
    "model.train() or requires_grad_(True) in place of the earlier modes; a state of an optimizer "
    "that is rounded; an optimizer's step() that is replaced while micro-batches accumulate, and "
    "not put back, or deleted with the one that a scheduler has put there",
)
def own_things(run: Run, claims: Claims, found: Found) -> None:
    """When the last context of a step has ended, the parameters have the bits that the trainer gave
    them, in the memory that they had, each has its requires_grad, each module its mode, and each
    optimizer its state. step() of an optimizer runs, and so does each step() that the trainer has
    put on the optimizer itself, as learning rate schedulers do.

    The values of the parameters and of the states are drawn. Some submodules of one model are in
    evaluation mode. A trainer puts its step() there before the first context, or before that of a
    drawn step, or both.
    """
    for rank, step in steps(run):
        if not is_judged(run.scenario, step):
            continue
        event = record(run, rank, step)
        changed = event["changed"]
        found.require(
            not changed,
            "parameters, requires_grad, modes and states as before",
            f"rank {rank}, step {step}: {', '.join(changed[:3])} changed, {len(changed)} in all",
        )
        # A trainer may not have called step().
        if event["steps_taken"] is None:
            continue
        found.require(
            set(event["steps_taken"]) == {1},
            "one step of each optimizer by a call of step()",
            f"rank {rank}, step {step}: one call of step() on each optimizer made these numbers of "
            f"steps: {event['steps_taken']}",
            "a method of the optimizer was replaced, and not put back",
        )
        found.require(
            set(event["own_steps"]) <= {1},
            "one call of each step() that the trainer has put on an optimizer",
            f"rank {rank}, step {step}: {event['own_steps']} calls",
            "a step() of the trainer was deleted, or replaced by an earlier one",
        )
