"""Reasons and notes of rules on records that have an event, a claim or a scenario of their own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from conformance.records.run import Run
from conformance.rules import book
from conformance.scenarios.averager_training import ROLLED_TO_START
from conformance.scenarios.conditions_together import OPTIMIZER as OPTIMIZER_CONDITIONS
from conformance.scenarios.failing_collectives import AVERAGER, JOINABLE
from conformance.scenarios.failing_models import EACH_FAILS
from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer_backwards import ASSIGNED, EARLY
from conformance.scenarios.optimizer_clipping import CLIPPED
from conformance.scenarios.optimizer_loops import RENEWED, RESET
from conformance.scenarios.optimizer_repeats import REPEATED_BFLOAT16
from conformance.scenarios.optimizer_rests import RESTS_OF_ADAM
from conformance.scenarios.optimizer_states import RESTORED_OPTIONS
from conformance.scenarios.optimizer_training import plan_of
from conformance.scenarios.strategy_training import GRADIENT_DTYPES
from tests.judging.oracles import test_join as joins
from tests.made_runs import event, made_run
from tests.rules.test_messages_of_averagers import averaged
from tests.rules.test_messages_of_optimizers import changed, stepped
from tests.rules.test_messages_of_strategies import synchronised
from tests.rules.test_reasons import FUSED, reasons

Make = Callable[[], Run]


def having(make: Make, name: str, /, **fields: Any) -> Make:
    """Return a function that makes a run in which every rank has one more event in step 0."""

    def made() -> Run:
        run = make()
        for rank in run.ranks:
            rank.events.insert(0, event(name, 0, **fields))
        return run

    return made


def of_scenario(make: Make, **fields: Any) -> Make:
    """Return a function that makes a run of a changed scenario."""

    def made() -> Run:
        run = make()
        scenario: Scenario = replace(run.scenario, **fields)
        return replace(run, scenario=scenario)

    return made


def of_fault(make: Make, scenario: Scenario, **fields: Any) -> Make:
    """Return a function that makes a run with the event of a failed collective."""
    return having(of_scenario(make, fault=scenario.fault), "fault", raised=False, **fields)


def without_gradients() -> Run:
    """Return a run of a hook that frees the gradients, and is not observed."""
    run = made_run()
    for rank in run.ranks:
        rank.tensors.clear()
    scenario = replace(run.scenario, observe=replace(run.scenario.observe, hook=False))
    return replace(run, scenario=scenario)


def neither_means_nor_sums() -> Run:
    """Return a run of a joinable that makes something else of gradients."""
    run = joins.trained()
    run.ranks[0].tensors["0/0/grad/p0"] *= 0.9
    return run


def repeated_otherwise() -> Run:
    """Return a run of an optimizer whose repeated steps differ each time by a bit."""
    run = stepped(REPEATED_BFLOAT16)
    for rank in run.ranks:
        for name, values in rank.tensors.items():
            rank.tensors[name] = values.bfloat16()
    for place, again in enumerate(plan_of(REPEATED_BFLOAT16).again):
        run.ranks[0].tensors[f"{again}/parameter/p1"][place] *= 1 + 2**-7
    return run


def not_remade() -> Run:
    """Return a run of one existing object of an optimizer, which cannot be made twice."""
    run = stepped(REPEATED_BFLOAT16)
    for rank in run.ranks:
        for name, values in rank.tensors.items():
            rank.tensors[name] = values.bfloat16()
    return run


def short_rests() -> Run:
    """Return a run of an optimizer around which no Adam fits, in three steps."""
    run = stepped(replace(RESTS_OF_ADAM, steps=RESTS_OF_ADAM.steps[:3]))
    return changed(run, "made", takes_any=False)


def without_options() -> Run:
    """Return a run of an optimizer that takes a rate alone, whose groups have other options."""
    return changed(stepped(RESTORED_OPTIONS), "made", takes_any=False)


def without_momentum() -> Run:
    """Return a run of an optimizer that takes a rate alone, with many groups."""
    scenario = next(one for one in OPTIMIZER_CONDITIONS if plan_of(one).groups)
    run = stepped(replace(scenario, steps=scenario.steps[:2]))
    return changed(run, "made", takes_any=False, options={"lr": 0.1})


NONE_YET = {"unused": True, "started": 0}
IN_POST_HOOKS = next(scenario for scenario in JOINABLE if scenario.fault.in_post_hooks)

NO_MODES: dict[str, dict[str, str]] = {"modes": {}, "training": {}, "requires_grad": {}}


@pytest.mark.parametrize(
    ("number", "make", "claims", "reason"),
    [
        (
            "4.2",
            having(made_run, "keeps_ddp"),
            "",
            "states that serve DDP anew, after layers have thawed, are not judged: the subject "
            "takes the model under DDP",
        ),
        (
            "15.14",
            having(partial(stepped, RESET), "consolidates"),
            "",
            "states from before parameters were trained are not restored: it has "
            "consolidate_state_dict(), and torch's optimizer that has it keeps later ones",
        ),
        (
            "15.14",
            repeated_otherwise,
            "",
            "bits after a load are not judged: steps from one loaded state differ, as with random "
            "numbers of its own",
        ),
        (
            "15.14",
            having(not_remade, "not_remade"),
            "",
            "states that are loaded into an optimizer that was made anew are not judged: the "
            "target is one existing object, which cannot be made twice",
        ),
        (
            "15.14",
            without_options,
            "",
            "options that were rewritten before a load are not judged: it takes neither an "
            "optimizer nor a class of optimizers",
        ),
        (
            "15.24",
            short_rests,
            "",
            "rests of parameters are judged with SGD alone: it takes neither an optimizer nor a "
            "class of optimizers",
        ),
        (
            "15.37",
            without_momentum,
            "",
            "no run with many groups is judged: it takes neither an optimizer nor a class of "
            "optimizers, nor lr, momentum and weight_decay",
        ),
        (
            "15.39",
            partial(stepped, RENEWED),
            "",
            "parameters that are replaced in param_groups are not judged: it averages neither "
            "parameters nor gradients, or its param_groups do not hold the parameters themselves",
        ),
        (
            "15.43",
            having(partial(stepped, ASSIGNED), "before_step"),
            "averages",
            "gradients that no backward has accumulated are not judged: it averages or changes "
            "gradients before step()",
        ),
        (
            "15.43",
            having(partial(stepped, EARLY), "not_synchronized"),
            "averages",
            "a backward after synchronize() is not judged: it has not both synchronize() and "
            "skip_synchronize()",
        ),
        (
            "15.43",
            having(partial(stepped, EARLY), "no_gradient_dtypes"),
            "averages",
            "gradients of another dtype than their parameters are not judged: this torch has no "
            "torch.Tensor.grad_dtype",
        ),
        (
            "15.44",
            having(partial(stepped, CLIPPED), "clips_not"),
            "",
            "it has no clip_grad_norm() or clip_grad_norm_() that takes a norm alone",
        ),
        (
            "10.1",
            of_scenario(made_run, serialised=True),
            "chained",
            "the subject claims chained: with one collective at a time, its own waits cannot be "
            "observed",
        ),
        (
            "10.3",
            having(made_run, "gate"),
            "",
            "the hook waits in a way that cannot be observed, e.g. by polling: no order could be "
            "forced on it",
        ),
        (
            "12.1",
            having(made_run, "fault", raised=False, **NONE_YET),
            "",
            "the kit saw no collective in the step, and could fail none",
        ),
        (
            "12.4",
            having(made_run, "fault", raised=False, **NONE_YET),
            "",
            "the kit saw no collective in the step, and could fail none",
        ),
        (
            "12.1",
            having(made_run, "fault", raised=False, **NONE_YET),
            "local",
            "under local this rank takes part in no collective of the step",
        ),
        (
            "12.5",
            of_fault(made_run, EACH_FAILS, **NONE_YET),
            "local",
            "under local ranks took part in no collective of these steps",
        ),
        (
            "12.5",
            of_fault(made_run, EACH_FAILS, **NONE_YET),
            "",
            "the kit saw no collective in the step, and could fail none",
        ),
        (
            "14.11",
            having(averaged, "saved", nothing=True),
            "",
            "it has neither state_dict() nor a count: its schedule begins anew after a checkpoint",
        ),
        (
            "14.19",
            having(averaged, "saved", nothing=True),
            "",
            "it has neither state_dict() nor a count: its schedule begins anew after a checkpoint",
        ),
        (
            "14.19",
            having(averaged, "not_rolled_back", nothing=True),
            "",
            "it has neither state_dict() nor a count: its schedule begins anew after a checkpoint",
        ),
        (
            "14.19",
            having(averaged, "not_rolled_back"),
            "",
            "it lacks state_dict() or load_state_dict(): no run that goes back is judged",
        ),
        (
            "14.19",
            having(of_scenario(averaged, name=ROLLED_TO_START.name), "not_rolled_back"),
            "",
            "it has no state that can be saved before its first step",
        ),
        (
            "23.9",
            having(made_run, "sent", collectives=[["allreduce", 64]]),
            "compressed(ratio=0.5)",
            "a rank has no record of the bytes that it has sent",
        ),
        ("14.20", averaged, "like(GossipModelAverager)", "the reference keeps no moving average"),
        (
            "14.26",
            having(averaged, "loaded", nothing=True),
            "",
            "it saves no state: no run that continues from a checkpoint is judged",
        ),
        (
            "14.22",
            of_fault(averaged, AVERAGER[0], **NONE_YET),
            "",
            "the subject issues no collective that the kit sees",
        ),
        (
            "14.22",
            of_fault(averaged, AVERAGER[0], unused=True, started=3),
            "",
            "no collective came that the kit could fail",
        ),
        (
            "17.34",
            of_fault(joins.run, IN_POST_HOOKS, **NONE_YET),
            "",
            "its post hooks issue no collective that the kit sees",
        ),
        ("15.17", having(stepped, "not_joinable"), "", "it has no join_hook"),
        ("15.7", having(stepped, "takes_no_closure"), "", "step() takes no closure"),
        (
            "15.13",
            having(stepped, "not_called", call="load_state_dict(state_dict=...)"),
            "",
            "load_state_dict(state_dict=...) is not judged: its signature does not take this",
        ),
        (
            "15.8",
            having(stepped, "zeroed", takes_zeros=False, keeps=False, left=[], none=[]),
            "",
            "zero_grad(set_to_none=False) is not judged: zero_grad() has no such parameter",
        ),
        (
            "15.5",
            having(stepped, "adds_no_groups", model=0),
            "",
            "groups that are added are not judged: it has no add_param_group(), and gets all "
            "groups at its construction",
        ),
        ("15.31", having(stepped, "takes_no_closure"), "", "step() takes no closure"),
        (
            "16.40",
            having(partial(synchronised, GRADIENT_DTYPES), "gradient_dtypes", parameters=None),
            "",
            "this torch has no torch.Tensor.grad_dtype",
        ),
        (
            "15.41",
            having(stepped, "as_optimizer", hook_calls={"pre-step": 0, "post-step": 0}),
            "",
            "it runs no hooks of a step",
        ),
        (
            "17.32",
            having(joins.run, "one_object"),
            "",
            "the target is one object, and makes none for another group",
        ),
        (
            "2.1",
            without_gradients,
            FUSED,
            "the hook frees the gradients, and its results are not observed here",
        ),
        (
            "15.21",
            lambda: stepped(averager=True),
            "",
            "it takes an averager: 15.3",
        ),
        (
            "19.3",
            averaged,
            "draws_anew",
            "its recomputation draws new numbers, as it claims: 19.18",
        ),
        (
            "17.31",
            having(joins.run, "modes", place="before the context", **NO_MODES),
            "",
            "no hook has read the modes",
        ),
        (
            "2.10",
            made_run,
            "local",
            "replicas may only differ on three ranks or more",
        ),
        (
            "13.17",
            made_run,
            "compressed(feedback=ef21)",
            "results are estimates: each is judged by its distance from the mean",
        ),
        (
            "17.36",
            neither_means_nor_sums,
            "",
            "after even inputs its gradients are neither means nor sums over ranks",
        ),
        (
            "17.18",
            neither_means_nor_sums,
            "",
            "after even inputs its gradients are neither means nor sums over ranks",
        ),
    ],
)
def test_the_reason_is_given(number: str, make: Make, claims: str, reason: str) -> None:
    assert reason in reasons(number, make(), claims), book()[number].title
