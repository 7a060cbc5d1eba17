"""Section 17: joins in the loops of real programs: settings of torch, groups, nested contexts."""

from conformance.judging.common_rules import require_error_of_collective
from conformance.judging.oracles.join import (
    NOT_A_JOINABLE,
    applies_to_context,
    is_context,
    members,
    require_agreement,
    require_keywords,
    require_no_hooks,
    require_post_hooks,
    require_raised,
    require_steps,
)
from conformance.judging.oracles.join_loops import (
    refuses_to_be_entered_again,
    require_came_to_its_end,
    require_collectives_of_group,
    require_modes,
    require_thrown,
)
from conformance.judging.oracles.join_numbers import require_numbers
from conformance.judging.oracles.join_outside import require_outside
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.failing_collectives import JOINABLE as FAILING
from conformance.scenarios.join_loop_draws import (
    DISABLED,
    EVEN_ON_GROUPS,
    RAISES,
    THROWS,
    loop_contexts,
)
from conformance.scenarios.joins_in_loops import ENTERED, MODES, TWO_GROUPS
from conformance.scenarios.joins_in_training import NUMBERS
from conformance.subjects.claims import Claims


@rule(
    "17.31",
    "Modes, random generators and gradients stay as they are",
    on=(MODES,),
    owns=(MODES,),
    needs=("17.9", "17.10", "17.24"),
    since="1.6",
    source="torch documentation, Module.eval: the same as train(False), for all parts; Locally "
    "disabling gradient computation; torch.distributed.algorithms.join, Join.__exit__, which calls "
    "hooks in the modes of its caller",
    remedy="a call of train(), eval() or requires_grad_(); torch.no_grad(), inference_mode() or "
    "autocast() around the calls of hooks, or around the body; modes, rates or settings that are "
    "saved on entering and put back, although the body has changed them",
)
def modes(run: Run, claims: Claims, found: Found) -> None:
    """In the body of a context, in main and post hooks, and after the context, modes of torch, the
    mode of training of every module and requires_grad of every parameter are those of the code
    around the context. A context leaves random generators and gradients as its body has left them.

    Modes of torch are those of autograd and autocast, the default dtype and device, deterministic
    algorithms and the number of threads. In four contexts the code around has drawn ones. Each
    module of a DDP model is in a drawn mode of training, and parameters without gradients are
    frozen or not, as drawn for each context. The nine contexts include one that an exception ends,
    one with throw_on_early_termination, and a disabled one. Modules and parameters are read at the
    collectives of the join, too. The bodies draw from the generators of torch, Python and NumPy,
    and keep the gradients of the model. Each body also changes modes of training, requires_grad,
    hyperparameters and settings of torch for good, as it begins or as it ends, as drawn, and these
    changes last. A joinable has a joinable of the kit beside it, which reads the modes; a join must
    not change those of the joinable's own modules and parameters.
    """
    require_modes(run, found)


@rule(
    "17.32",
    "Contexts on two groups of a process are independent",
    on=(TWO_GROUPS,),
    owns=(TWO_GROUPS,),
    needs=("17.7", "17.8", "17.9", "17.10", "17.11", "17.18", "17.20"),
    since="1.6",
    source="torch documentation, torch.distributed.new_group; torch.distributed.algorithms.join, "
    "Join: the group is that of its joinables; a model on all ranks and one on fewer",
    remedy="a group, a rank, a number of ranks or of joinables that is kept in a class, a module "
    "or a cache; a current context in a global variable, which the end of a nested one resets; a "
    "collective without group= that comes only as a context throws",
)
def two_groups(run: Run, claims: Claims, found: Found) -> None:
    """In a process that has contexts on WORLD and on a part of it in turn, each shadows the steps
    of the ranks of its own group; so does a context within a step of another one, on the other
    group.

    throw_on_early_termination ends a context on the part, and one on WORLD is thrown out of, raises
    or is disabled, as drawn. Contexts on both groups follow.

    The part, the order of the groups, the joinables and the inputs are drawn. A joinable on each of
    the groups has the gradients, and the state afterwards, of 17.18 to 17.20.
    """
    if any(rank.first("one_object") for rank in run.ranks):
        found.does_not_apply("the target is one object, and makes none for another group")
        return
    contexts = loop_contexts(run.scenario, run.world)
    for member in members(run):
        require_collectives_of_group(member, found)
        ending = contexts[member.context].ending
        if ending == THROWS:
            require_thrown(member, found)
            continue
        if ending == RAISES:
            require_raised(member, "ArithmeticError", found)
        else:
            require_steps(run, member, found)
        if ending in (RAISES, DISABLED):
            require_no_hooks(member, found)
        elif is_context(run):
            require_post_hooks(run, member, found)
    require_agreement(run, found)
    if not is_context(run):
        require_numbers(run, found, EVEN_ON_GROUPS)


@rule(
    "17.33",
    "A context object can be entered again",
    level=SHOULD,
    on=(ENTERED,),
    owns=(ENTERED,),
    needs=("17.5", "17.7", "17.10"),
    since="1.6",
    source="Python documentation, contextlib, Reusable context managers; torch's Join can be "
    "entered again, and a generator's context refuses",
    remedy="a count of shadowed steps, or a list of hooks, that the constructor sets and __enter__ "
    "does not; settings of joinables that __exit__ has put back",
)
def entered_again(run: Run, claims: Claims, found: Found) -> None:
    """A context object that is entered four or five times shadows the steps of other ranks each
    time, and calls all post hooks with a right is_last_joiner; or it raises an exception on every
    rank when it is entered for the second time. Each call of a join_hook gets the keyword arguments
    of the constructor.

    The inputs are drawn, and an exception ends one of the bodies. No documentation of torch
    promises that a join can be entered again, and a training loop that makes a context for every
    epoch does not need it.
    """
    if not applies_to_context(run, found):
        return
    if refuses_to_be_entered_again(run):
        found.does_not_apply("it refuses to be entered again")
        return
    contexts = loop_contexts(run.scenario, run.world)
    for member in members(run):
        if contexts[member.context].ending == RAISES:
            require_raised(member, "ArithmeticError", found)
            require_no_hooks(member, found)
            continue
        require_came_to_its_end(member, found)
        if list(member.events("asked")):
            require_keywords(run, member, found)
        require_steps(run, member, found)
        require_post_hooks(run, member, found)
    require_agreement(run, found)


@rule(
    "17.34",
    "Raises if a collective fails",
    on=FAILING,
    owns=FAILING,
    needs=("17.7", "17.10", "17.23"),
    since="1.6",
    source="torch documentation, torch.distributed.Work.wait: a failed collective raises; the same "
    "as 12.1 of hooks",
    remedy="an except clause around a collective or around the calls of hooks; a context that ends "
    "errors; a failure that is taken for the end of all inputs",
)
def fails(run: Run, claims: Claims, found: Found) -> None:
    """If the call of a collective raises on one rank, an error leaves the context on that rank: the
    collective's own, or one that names it. The collective is one of the context or of a joinable,
    in a step, in a shadow or in a post hook.

    From a drawn context on, the first, the second or the third collective of the rank fails, each
    in a run of its own. In a context with one joinable of the kit these are the collective of its
    notification, that of a main hook, and the one in which the context finds out whether any rank
    trains. In three more runs it is a collective of a post hook: the first one on a rank that joins
    last, the first one on a rank that joins early, and any one there. These runs do not apply to a
    joinable whose post hook issues none.
    """
    require_error_of_collective(run, "the context", found)


@rule(
    "17.36",
    "Steps before the first context average as those in it",
    on=(NUMBERS,),
    needs=("17.18",),
    since="2.0",
    source="torch documentation, torch.distributed.algorithms.join, Join.notify_join_context: "
    "outside of a context it does nothing; an epoch with even inputs needs no context",
    remedy="hooks, a group or a flag that join_hook() sets up, and without which a step keeps each "
    "rank's own gradients, or steps by them; a model that join_hook() hands out; buffers",
)
def before_contexts(run: Run, claims: Claims, found: Found) -> None:
    """In the steps of a new joinable before any context, as many as the first context has on all
    ranks, gradients are means or sums over all ranks, as in that context; and parameters, buffers,
    state_dict() and an optimizer's state are then the same on two ranks, to the bit, as far as they
    are at the end of its body and after each join. Or an error on every rank refuses the steps.

    Gradients that are left after a step do not show which gradients the optimizer has used, and
    clipped gradients are no means. The rule does not apply if the context shows neither gradients
    that are means or sums, nor state that both ranks hold alike."""
    if is_context(run):
        found.does_not_apply(NOT_A_JOINABLE)
        return
    require_outside(run, found)
