"""Section 17: joinables that train the same steps in one context and in several."""

from conformance.judging.oracles.join import NOT_A_JOINABLE, is_context
from conformance.judging.oracles.join_outdated import require_nothing_outdated
from conformance.judging.oracles.join_parts import require_same_in_parts
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.joins_in_parts import IN_PARTS, TWO_JOINED
from conformance.subjects.claims import Claims

TUTORIAL = (
    "torch documentation, Distributed Training with Uneven Inputs Using the Join Context Manager"
)


@rule(
    "17.37",
    "Ranks that train use nothing that is out of date",
    on=(IN_PARTS, TWO_JOINED),
    owns=(IN_PARTS, TWO_JOINED),
    needs=("17.7", "17.18", "17.20"),
    since="2.0",
    source="torch.nn.parallel.DistributedDataParallel under Join, whose buffers come from a rank "
    "that has not joined; test_zero_join_cpu, which sets a joined rank's gradients",
    remedy="a shadowed step that sends the buffers or weights of a rank that has joined, or that "
    "steps a share of the model by that rank's last gradients; a joined rank that decides by its "
    "old values for other ranks, such as which weights are trained. Send the values of a rank that "
    "trains, or update them in each shadowed step",
)
def nothing_outdated(run: Run, claims: Claims, found: Found) -> None:
    """Ranks that train do not depend on values of a joined rank that its own steps have changed and
    its shadowed steps leave as they are.

    A context with uneven inputs is run again, with a new joinable, in which such values on the
    joined rank go back by one step after its first shadow: gradients, tensors of floating-point
    numbers that ranks hold alike after even inputs, such as parameters, buffers, the state of an
    optimizer, or the last mean, elements of such tensors, and numbers in floating point among its
    attributes. After later shadows, the elements of its gradients, parameters and their states in
    an optimizer change places and get smaller, as drawn: a choice by such values, as of weights
    above a threshold, is another one then. This is done in contexts with up to 9 steps, and on two
    ranks with 62 to 72 steps, as for weights that go back to those of rank 0 now and then; in
    these, elements change places from the 25th to the 35th shadow on. The parameters, buffers,
    state_dict() and the state of an optimizer on the rank that trains are then the same at the end
    of its body, to the bit. Each of two ranks joins early, and on three ranks any two. Shadows that
    keep a value up to date change it, and it is left alone. So is a tensor that each rank has for
    itself, such as a sum of its own inputs.
    """
    if is_context(run):
        found.does_not_apply(NOT_A_JOINABLE)
        return
    require_nothing_outdated(run, found)


@rule(
    "17.38",
    "Two contexts with even inputs train as one",
    on=(IN_PARTS,),
    needs=("17.7", "17.9", "17.18", "17.20"),
    since="2.0",
    source=f"{TUTORIAL}: one context per epoch; the same as 17.1: even inputs train as without "
    "the context",
    remedy="a gradient that a shadowed step leaves, and the next step adds to; an update that is "
    "made in the next step, and dropped as the context ends; momentum "
    "that join_hook() or post_hook() clears, join_hook() after an exception, or post_hook() in a "
    "context without inputs; a schedule that writes to groups which load_state_dict() has "
    "replaced; a part of the state that a checkpoint lacks; an optimizer of a model that a join "
    "has replaced; a step that is counted, or begun, before notify_join_context(), which raises an "
    "error with throw_on_early_termination",
)
def same_in_parts(run: Run, claims: Claims, found: Found) -> None:
    """The parameters that a joinable trains have the same bits after each step whether or not a
    context with even inputs ends between two steps. The same holds if an exception or
    throw_on_early_termination ends a context, if a context is disabled, or if no rank has an input
    in it. After a join, also of uneven inputs, the hyperparameters that an optimizer changes go on
    changing, and the optimizer still has the parameters that get gradients.

    With throw_on_early_termination all ranks stop before the same step, also those that have inputs
    left. Parameters, buffers and the state of an optimizer that ranks hold alike after each step of
    other contexts are therefore the same on all ranks at the end of the contexts that follow: one
    of 2 or 3 steps after a drawn rank has run out of inputs, and one of about a hundred after
    another rank has, twice.

    A context in which no rank has an input changes no parameter or buffer, and no state of an
    optimizer, that ranks hold alike, as far as two joins of even inputs, after as many contexts,
    leave them. There is a second such context, and parameters are then the same after each step.

    After uneven inputs, a context with 2 to 5 even ones is run twice, with a joinable each: as it
    is, and after the kit has cleared the gradients of ranks that joined early. If the steps of the
    joinable leave no gradient, the parameters are the same after each step: no shadowed step has
    left one to which the next step adds.

    The same context is run once more by a new joinable, which has loaded the state of the other one
    after the join: its parameters are the same after each step. Each rank saves a state, and loads
    its own. It is so if the class has state_dict() and load_state_dict() of its own, and no
    exception leaves one of them. A state that has the values of the model alone leaves the rest to
    the trainer, and is not judged. One that has tensors, but no parameters, leaves the model to the
    trainer: the kit copies it.

    The number of steps, and those at which contexts end, are drawn. A schedule is read in 100 to
    140 steps after two joins. Inputs, a loss and rates may follow the number of contexts, and a
    join may compute a state, such as a mean of models, or hand out values in which ranks differ:
    such a joinable is not judged by its parameters.
    """
    if is_context(run):
        found.does_not_apply(NOT_A_JOINABLE)
        return
    require_same_in_parts(run, found)
