"""Section 15, continued: the state of an optimizer wrapper, saved and restored."""

from collections.abc import Mapping, Sequence

import torch

from conformance.judging.oracles.loaded_states import require_refused_by_all
from conformance.judging.oracles.optimizer import note_other_names, require_right
from conformance.judging.oracles.optimizer_calls import (
    require_own_entries,
    require_right_with_rates,
)
from conformance.judging.oracles.optimizer_gradients import construction
from conformance.judging.oracles.optimizer_repeats import require_repeated
from conformance.judging.oracles.optimizer_steps import right_steps
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.optimizer import RELOADED, RESUMED, SAVED, SAVED_CLOSED, recipient
from conformance.scenarios.optimizer_late_training import late_params
from conformance.scenarios.optimizer_loops import RESET, RESET_EARLY
from conformance.scenarios.optimizer_repeats import ALL as REPEATED
from conformance.scenarios.optimizer_repeats import is_repeated
from conformance.scenarios.optimizer_states import RESTORED_OPTIONS, RESTORED_RATES
from conformance.subjects.claims import Claims

BASIC = ("15.1", "15.2", "15.3")
OPTIONS_ALONE = (
    "options that were rewritten before a load are not judged: it takes neither an optimizer nor a "
    "class of optimizers"
)
KEEPS_STATES = (
    "states from before parameters were trained are not restored: it has consolidate_state_dict(), "
    "and torch's optimizer that has it keeps later ones"
)


@rule(
    "15.13",
    "Continues from a checkpoint",
    on=(RESUMED, SAVED),
    owns=(RESUMED, SAVED),
    needs=BASIC,
    source="torch documentation, PostLocalSGDOptimizer.load_state_dict, consolidate_state_dict; "
    "torch.distributed.checkpoint, which calls load_state_dict(state_dict=...); microsoft/dion "
    "#109; pytorch #63340, #78988",
    remedy="state_dict() has to hold the wrapped optimizer's state and the averager's step; "
    "indices of parameters across ranks; a rank in the state: it is that of the rank that saved; "
    "arguments that come by keyword, which *args does not hold",
)
def checkpoint(run: Run, claims: Claims, found: Found) -> None:
    """New processes that load the state_dict() of step 13 continue as if there had been no break.
    One or two drawn parameters are trained only some steps after the save.

    Momentum continues, and so does the averager's count of steps: a warm-up does not begin again. A
    subject with consolidate_state_dict() collects its state on the group's first rank, and all
    ranks load that one. Of other subjects each rank saves and loads its own. But if a subject
    averages gradients, and all ranks have saved the same tensors, bit by bit, then all ranks load
    the state of the first one, as trainers write a checkpoint on one rank. An error on all the
    others may refuse it: each rank loads its own then.

    Arguments come by position on some ranks, and by keyword on others, under torch's names:
    load_state_dict(state_dict=...), consolidate_state_dict(to=...), or without an argument for the
    first rank. The way of each rank is drawn from the session's seed; later calls take turns. A
    call that the signature does not take is left out: it raises a TypeError in training.
    """
    note_other_names(run, found)
    require_refused_by_all(run, found)
    require_right(run, found)


@rule(
    "15.14",
    "Its state can be restored in the same process",
    on=(RELOADED, RESTORED_RATES, RESTORED_OPTIONS, RESET, RESET_EARLY, *REPEATED),
    owns=(RELOADED, RESTORED_RATES, RESTORED_OPTIONS, RESET, RESET_EARLY, *REPEATED),
    refusable=REPEATED,
    needs=(*BASIC, "15.6", "15.13"),
    source="torch documentation, Optimizer.load_state_dict and torch.optim.lr_scheduler",
    remedy="load_state_dict of the wrapped optimizer makes new param_groups: the wrapper's have to "
    "be these, not the old ones; options of the groups that are kept as they are: torch's load "
    "replaces all of them; states of parameters that have none in the loaded state are gone; "
    "load_state_dict of torch.optim.Optimizer rounds a state in float32 to the dtype of its "
    "parameter: put the loaded values back in their own dtype; copies of parameters in float32 "
    "that are made in the first step: make them in load_state_dict, too; lists of groups or "
    "parameters that a load makes, and that a later add_param_group does not reach",
)
def reloaded(run: Run, claims: Claims, found: Found) -> None:
    """load_state_dict() in the same process restores the state of the matching state_dict(), and a
    learning-rate schedule that writes to param_groups afterwards takes effect.

    So does a schedule that fills tensors of learning rates in place, those of Adam or AdamW, which
    is drawn. The steps that are saved and restored are drawn from the session's seed then, and the
    restored rates count in the first step. So do all other options of each group, of SGD and of
    Adam or AdamW, which have been rewritten since the state was saved: a trainer that goes back to
    a good state goes back to its options, too. A group that is added after a load, before a drawn
    step, is stepped and averaged with the others, and has the options that are written to it. The
    user's own entries in parameter groups are restored as well. A state from the beginning, or from
    before some parameters were trained, leaves these without a state. Subjects with
    consolidate_state_dict() are not judged by that: torch's keeps such states.

    In models of bfloat16 and of float16, steps that are repeated from the restored state give the
    same bits as before: a state in float32 goes on as if it had not been saved, and so do copies of
    parameters in float32. This holds too if a state without any moments is loaded before, and if
    an optimizer of a new model loads the state, as in new processes. An error on every rank may
    refuse these models. Not judged are bits that differ after every load of the same state, as by
    random numbers.
    """
    is_of_options = run.scenario.variant == RESTORED_OPTIONS.variant
    if is_of_options and not construction(run)["takes_any"]:
        found.leaves_out(OPTIONS_ALONE)
        return
    if run.scenario.variant == RESET.variant and run.ranks[0].first("consolidates"):
        found.leaves_out(KEEPS_STATES)
        return
    require_right_with_rates(run, found)
    require_own_entries(run, found)
    if is_repeated(run.scenario):
        require_repeated(run, found)


@rule(
    "15.15",
    "The consolidated state is the local optimizer's",
    on=(SAVED, SAVED_CLOSED),
    owns=(SAVED_CLOSED,),
    needs=(*BASIC, "15.7"),
    source="torch documentation, ZeroRedundancyOptimizer.consolidate_state_dict and state_dict; "
    "pytorch #54736, #60284",
    remedy="the mapping from a rank's share to all parameters, also if some have no state, or if "
    "another rank than the first one collects them; state that a rank has not sent, or "
    "that is out of date, as one that step(closure) leaves alone",
)
def consolidated(run: Run, claims: Claims, found: Found) -> None:
    """After consolidate_state_dict(to) the state_dict() of that rank is that of a local optimizer
    on all parameters: the momentum of each, by its number, and the parameter groups.

    One or two parameters are trained after that alone: frozen until then, or without a gradient, as
    drawn. They have no momentum, or zeros, and those behind them keep their numbers.

    An optimizer that takes neither an optimizer nor its class may have a name of its own for the
    momentum, the same for all parameters.

    It is the group's first rank. In one run it is the last one, the state has been consolidated
    before, and all steps since have a closure.
    """
    rank = run.ranks[recipient(run.scenario, len(run.ranks))]
    event = rank.first("consolidated")
    if event is None:
        found.does_not_apply("it has no consolidate_state_dict()")
        return
    actual = f"rank {rank.rank}: state_dict() returned something else"
    if not found.require(event["form"], "a dict with state and param_groups", actual):
        return
    step = run.scenario.resume.saves_at - 1
    options = construction(run)["options"]
    momentum = options.get("momentum", 0.0)
    indices = list(range(len(run.scenario.params)))
    groups = [{"lr": options["lr"], "momentum": momentum, "params": indices}]
    place = f"rank {rank.rank}, step {step}"
    got_groups = [{name: group.get(name) for name in groups[0]} for group in event["groups"]]
    found.require(got_groups == groups, f"param_groups {groups}", f"{place}: {event['groups']}")
    # SGD without momentum has no state.
    momenta = right_steps(run)[rank.rank, step].momenta if momentum else []
    late = late_params(run.scenario)
    name = "momentum_buffer"
    if not construction(run)["takes_any"]:
        name = _name_of_momentum(rank.tensors, f"{step}/state/", momenta)
    for index, right in enumerate(momenta):
        expected = f"the momentum of p{index}"
        tensor = rank.tensors.get(f"{step}/state/{index}/{name}")
        if index in late:
            expected = f"no momentum of p{index}, or zeros: it has had no gradient"
            if tensor is None:
                found.checked(1)
                continue
        if tensor is None:
            found.require(False, expected, f"{place}: state[{index}] has no {name}")
            continue
        found.checked(1)
        got = tensor.reshape(-1).double()
        same = torch.equal(got, right)
        owners = [other for other, values in enumerate(momenta) if torch.equal(got, values)]
        cause = "" if same or not owners else f"it is the momentum of p{owners[0]}"
        actual = f"{place}: state[{index}] has another {name}"
        found.require(same, expected, actual, cause)


def _name_of_momentum(
    tensors: Mapping[str, torch.Tensor], prefix: str, momenta: Sequence[torch.Tensor]
) -> str:
    """Return the name of the entry that is the right momentum of most parameters: torch's name, if
    none is.

    Args:
        tensors: those of a rank; in a state, their names are a prefix, a number and the entry's.
        prefix: the beginning of their names.
        momenta: the right ones.
    """
    counts = {"momentum_buffer": 0}
    for path, tensor in sorted(tensors.items()):
        number, _, name = path.removeprefix(prefix).partition("/")
        if path.startswith(prefix) and number.isdecimal() and int(number) < len(momenta):
            is_right = torch.equal(tensor.reshape(-1).double(), momenta[int(number)])
            counts[name] = counts.get(name, 0) + is_right
    return max(counts, key=counts.__getitem__)
