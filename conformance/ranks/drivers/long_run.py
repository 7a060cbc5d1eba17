"""Training for more than a thousand steps (``scenarios/long_runs.py``), recorded compactly.

The steps are ordinary steps of DDP. On the model of that scenario one takes two to three
milliseconds of a core, so that nothing else has to stand in for it. What would take longer than the
steps is left out: the observer records no events, gradients are computed once and fed again, and
the results of all steps go into one tensor for each parameter.

Now and then the model is evaluated, or values are loaded into it (``scenarios/evaluations.py``).
Some steps have several forwards (``scenarios/forwards.py``).
The optimizer's steps change nothing, and the kit moves the parameters in its place
(``scenarios/parameter_moves.py``). Its learning rate changes, and it loads its own state
(``scenarios/learning_rates.py``).
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from conformance.ranks.drivers._moving_parameters import MovingParameters
from conformance.ranks.instruments import process_state
from conformance.ranks.instruments.counts import counts
from conformance.ranks.instruments.hook_observer import Observer
from conformance.ranks.instruments.process_settings import FrozenObjects
from conformance.ranks.models.ddp_model import DDPModel
from conformance.ranks.models.probe import scripted_gradients
from conformance.records.recorder import Recorder
from conformance.scenarios.evaluations import Evaluation, evaluations, loaded_rounds
from conformance.scenarios.feed import Key, feed_of
from conformance.scenarios.forwards import Forwards, forwards_of
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.learning_rates import learning_rates, optimizer_loads
from conformance.scenarios.model import Scenario

# The counts of the process are taken at so many places after the warm-up, evenly spaced.
CHECKPOINTS = 13

Gradients = list[torch.Tensor | None]


class LongRunTrainer:
    """Trains one model for the steps of a long run.

    Args:
        scenario: the long run.
        rank: the rank in the group that trains.
        size: the number of ranks in that group.
        device: the device of gradients.
        model: the model, on which the subject is registered.
        recorder: receives the events, and the tensors at the end.
        observer: has the results of the hook, for hooks that free the gradients.
        doing: attributes errors to activities.
        begin_step: records that a step begins.
        end_step: called at the end of each step.
    """

    def __init__(
        self,
        scenario: Scenario,
        rank: int,
        size: int,
        device: torch.device,
        model: DDPModel,
        recorder: Recorder,
        observer: Observer,
        doing: Callable[[str], AbstractContextManager[None]],
        begin_step: Callable[[int, str], None],
        end_step: Callable[[], None],
    ) -> None:
        self._scenario = scenario
        self._rank = rank
        self._size = size
        self._device = device
        self._model = model
        self._parameters = model.parameters
        self._recorder = recorder
        self._observer = observer
        self._doing = doing
        self._begin_step = begin_step
        self._end_step = end_step
        self._feed = feed_of(scenario)
        self._evaluations = evaluations(scenario)
        self._forwards = forwards_of(scenario)
        self._loaded_rounds = loaded_rounds(scenario) if scenario.fused else {}
        self._rates = learning_rates(scenario)
        self._optimizer_loads = optimizer_loads(scenario)
        self._gradients: dict[Key, Gradients] = {}
        # Sums of several steps are exact in float64 if the results are.
        is_sum = scenario.long_run.steps_per_round > 1
        self._results = {
            name: self._rows(parameter, torch.float64 if is_sum else parameter.dtype)
            for name, parameter in self._parameters.items()
        }
        self._followed = {}
        if scenario.fused:
            self._followed = {
                name: self._rows(parameter, parameter.dtype)
                for name, parameter in self._parameters.items()
            }
        self._moving = MovingParameters(scenario, rank, self._parameters)

    def _rows(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self._feed.rounds, parameter.numel(), dtype=dtype)

    def train(self) -> None:
        """Train for all rounds, and record them."""
        for key in self._feed.keys:
            self._gradients[key] = self._computed(key)
        warm_up = self._scenario.long_run.warm_up
        rounds = self._feed.rounds
        checkpoints = {
            warm_up + place * (rounds - 1 - warm_up) // (CHECKPOINTS - 1)
            for place in range(CHECKPOINTS)
        }
        # Nothing of what exists is garbage: the collections at checkpoints need not look at it.
        gc.collect()
        FrozenObjects.freeze()
        for number, place in enumerate(self._feed.places):
            key = self._feed.keys[place]
            if number in self._loaded_rounds:
                self._load_values_of(self._loaded_rounds[number])
            for step in self._feed.steps_of(number):
                self._step(step, key)
                self._keep(number)
            if number in checkpoints:
                self._take_counts()
        self._record()

    def _computed(self, key: Key) -> Gradients:
        kind, number = key
        return scripted_gradients(
            self._scenario.params, kind, self._size, self._rank, number, self._device
        )

    def _step(self, step: int, key: Key) -> None:
        if step in self._optimizer_loads:
            with self._doing("load_state"):
                self._model.load_optimizer()
        if self._rates:
            self._model.set_learning_rate(self._rates[step])
        self._begin_step(step, key[0])
        evaluation = self._evaluations.get(step)
        if evaluation and not evaluation.within_step:
            self._evaluate(evaluation, key)
        case = self._model.case
        if case.on_step:
            with self._doing("on_step"):
                case.on_step(step)
        with self._doing("forward"):
            loss = self._loss(step, key)
        if evaluation and evaluation.within_step:
            self._evaluate(evaluation, key)
        with self._doing("backward"):
            loss.backward()
        if case.after_backward:
            with self._doing("after_backward"):
                case.after_backward()

    def _loss(self, step: int, key: Key) -> torch.Tensor:
        """Return the loss of a step, after all of its forwards."""
        gradients = self._gradients[key]
        forwards = self._forwards.get(step, Forwards())
        self._model.set_checkpoints(forwards.checkpoints)
        if forwards.is_given_up and forwards.rank in (None, self._rank):
            for _ in range(forwards.more):
                self._model.ddp(gradients)
        loss: torch.Tensor = self._model.ddp(gradients)
        if forwards.more and not forwards.is_given_up:
            # A sum with negative zeros is exact for zeros of either sign, too.
            zeros = [None if one is None else torch.full_like(one, -0.0) for one in gradients]
            for _ in range(forwards.more):
                loss += self._model.ddp(zeros)
        return loss

    def _evaluate(self, evaluation: Evaluation, key: Key) -> None:
        """Make forwards without gradients, on all ranks or on one."""
        if evaluation.rank not in (None, self._rank):
            return
        # DDP may communicate in a forward: one rank alone calls the module.
        model = self._model.ddp if evaluation.rank is None else self._model.model
        with self._doing("forward"):
            if evaluation.changes_mode:
                model.eval()
            with getattr(torch, evaluation.context)():
                for _ in range(evaluation.forwards):
                    model(self._gradients[key])
            if evaluation.changes_mode:
                model.train()

    def _load_values_of(self, number: int) -> None:
        """Load the values of parameters after an earlier round, as of the best weights so far."""
        values = {
            name: self._followed[name][number].reshape(parameter.shape)
            for name, parameter in self._parameters.items()
        }
        with self._doing("load_state"):
            self._model.model.load_state_dict(values)

    def _keep(self, number: int) -> None:
        """Keep the results of a step in the row of its round, and forget the gradients."""
        for name, parameter in self._parameters.items():
            row = self._results[name][number]
            gradient = parameter.grad
            if gradient is None and self._scenario.fused:
                gradient = self._observer.result_of(name)
            if gradient is None:
                row.fill_(torch.nan)
            else:
                row.add_(lay_out(gradient.detach(), "contiguous").reshape(-1).to(row.device))
        if self._followed:
            for name, parameter in self._parameters.items():
                self._followed[name][number].copy_(parameter.detach().reshape(-1))
        else:
            for name in self._moving.changed():
                self._recorder.event("parameter_changed", parameter=name)
            self._moving.move(self._recorder.step)
        self._model.end_step(self._recorder.step, self._doing)
        self._observer.forget_futures()
        self._end_step()

    def _take_counts(self) -> None:
        self._recorder.event("checkpoint", rng=process_state.rng(), **counts())

    def _record(self) -> None:
        for name, rows in self._results.items():
            self._recorder.tensor(f"long/{name}", rows)
        for name, rows in self._followed.items():
            self._recorder.tensor(f"long/parameter/{name}", rows)
