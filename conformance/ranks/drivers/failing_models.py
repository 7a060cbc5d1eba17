"""Trains one model after another with a hook, until a collective of each fails on all ranks."""

import datetime
from typing import Any

import torch.distributed as dist

from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.injected import outcome_of
from conformance.ranks.instruments.raising_collective import RaisingCollective
from conformance.ranks.models.ddp_model import DDPModel
from conformance.ranks.models.probe import scripted_gradients
from conformance.ranks.resolve import Resolved
from conformance.records.files import MODEL_MADE
from conformance.scenarios.failing_models import FailingModel, failing_models


class FailingModels:
    """The models of one rank.

    Args:
        driver: of this rank. Its recorder receives a ``fault`` event for each model, and its
            collectives are counted in each step, so that one of them fails.
        resolved: the subject.
        option: the option that names the subject, for errors.
    """

    def __init__(self, driver: RankDriver, resolved: Resolved, option: str) -> None:
        self._driver = driver
        self._scenario = driver.scenario
        self._resolved = resolved
        self._option = option

    def train(self) -> None:
        """Train each of the models until it fails."""
        for number, failing in enumerate(failing_models(self._scenario)):
            self._train_one(number, failing)

    def _train_one(self, number: int, failing: FailingModel) -> None:
        """Train one model until it fails, and record how the failure shows."""
        scenario = failing.scenario
        self._driver.recorder.event("trains_model", number=number, dtype=failing.dtype)
        group: Any = dist.group.WORLD
        if not scenario.world_only:
            # In a group of its own, no collective of an earlier model is still waited for.
            group = dist.new_group(list(range(self._driver.world)))
        with self._driver.doing(MODEL_MADE):
            model = DDPModel(
                scenario, group, self._driver.device, names_group=not scenario.world_only
            )
        # Its memory may be that of a collective that is not over.
        _LEFT.append(model)
        model.register(self._resolved, self._option, self._driver.doing)
        raising = RaisingCollective(failing.place, is_issued=True, at_end=failing.fails_at_end)
        self._driver.collectives.raising = raising
        first = scenario.unrecorded_steps + scenario.fault.step
        last = first + scenario.fault.attempts - 1
        for step in range(last + 1):
            self._driver.recorder.step = step
            raising.begin_step()
            if step >= first:
                raising.arm(is_last_attempt=step == last)
                if self._fails(model, failing, raising, f"{number}/{step}", is_last=step == last):
                    break
            elif not self._takes(model, failing):
                break
            raising.end_step()
        self._driver.collectives.raising = RaisingCollective()
        if model.case.close:
            with self._driver.doing("close"):
                model.case.close()

    def _takes(self, model: DDPModel, failing: FailingModel) -> bool:
        """Train a step without a failure; return False if the subject refuses complex numbers."""
        if not failing.dtype.startswith("complex"):
            with self._driver.doing("backward"):
                self._step(model)
            return True
        try:
            self._step(model)
        except Exception as error:
            self._driver.recorder.event(
                "refuses_dtype", dtype=failing.dtype, message=str(error)[:500]
            )
            return False
        return True

    def _fails(
        self,
        model: DDPModel,
        failing: FailingModel,
        raising: RaisingCollective,
        attempt: str,
        *,
        is_last: bool,
    ) -> bool:
        """Train a step that may fail; return whether it has failed on any rank."""
        raised: BaseException | None = None
        try:
            self._step(model)
        except BaseException as error:
            raised = error
        raising.end_step()
        has_failed = bool(raising.raised_at)
        if has_failed:
            self._driver.signals.set(f"failed/{attempt}", "1")
        self._driver.signals.set(f"tried/{attempt}/{self._driver.rank}", "1")
        tried = [f"tried/{attempt}/{rank}" for rank in range(self._driver.world)]
        self._driver.signals.wait(tried, datetime.timedelta(seconds=self._driver.timeout))
        is_over = bool(self._driver.signals.check([f"failed/{attempt}"]))
        if raised is not None and not is_over:
            with self._driver.doing("backward"):
                raise raised
        if has_failed or (is_last and not is_over):
            self._driver.recorder.event(
                "fault",
                fault=self._scenario.fault.kind,
                dtype=failing.dtype,
                sizes=failing.sizes,
                at_end=failing.fails_at_end,
                place=raising.raised_at,
                unused=not has_failed,
                **outcome_of(raised),
            )
        return is_over

    def _step(self, model: DDPModel) -> None:
        """Train one step, with the trainer's calls around it."""
        step = self._driver.recorder.step
        if model.case.on_step:
            model.case.on_step(step)
        grads = scripted_gradients(
            model.scenario.params,
            self._scenario.steps[0],
            self._driver.world,
            self._driver.rank,
            step % _DIFFERENT_STEPS,
            self._driver.device,
        )
        model.ddp(grads).backward()
        if model.case.after_backward:
            model.case.after_backward()
        model.end_step(step, self._driver.doing)


_LEFT: list[DDPModel] = []
_DIFFERENT_STEPS = 5
