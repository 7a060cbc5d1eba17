"""The states of a hook that a run saves, and loads again in the same process."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from conformance.ranks.models.ddp_model import DDPModel
from conformance.records.recorder import Recorder
from conformance.scenarios.learning_rates import rate_after_save
from conformance.scenarios.model import Scenario


class HookStates:
    """Saves and loads the state of one rank's hook as the scenario's ``resume`` says.

    Args:
        scenario: the scenario.
        model: the model with the hook and its state.
        folder: the rank's own folder.
        recorder: receives an event if a state cannot be loaded.
        doing: attributes errors to activities.
    """

    def __init__(
        self,
        scenario: Scenario,
        model: DDPModel,
        folder: Path,
        recorder: Recorder,
        doing: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._scenario = scenario
        self._model = model
        self._folder = folder
        self._recorder = recorder
        self._doing = doing

    @property
    def _first(self) -> Path:
        """The folder of the state from before the first step."""
        return self._folder / "first"

    def before_step(self, step: int) -> bool:
        """Save or load what is due before a step; return False if a state cannot be loaded."""
        resume = self._scenario.resume
        if step == 0 and resume.starts_over_at:
            self._first.mkdir()
            with self._doing("save_state"):
                self._model.save(self._first)
        if step and step == resume.rolls_back_at and not self._load(self._folder):
            return False
        starts_over = bool(step) and step == resume.starts_over_at
        return not starts_over or self._load(self._first)

    def after_step(self, step: int) -> None:
        """Save the state if that is due after a step."""
        resume = self._scenario.resume
        if step == resume.saves_at - 1:
            with self._doing("save_state"):
                self._model.save(self._folder)
        elif 0 < resume.rolls_back_at <= step:
            # The same steps were made without it before: saving a state must change nothing.
            with self._doing("save_state"):
                self._model.saved_state()

    def step_of_trainer(self, step: int) -> int:
        """Return the number of a step as the trainer counts it, which may have gone back."""
        resume = self._scenario.resume
        if resume.starts_over_at and step >= resume.starts_over_at:
            step -= resume.starts_over_at
        elif resume.rolls_back_at and step >= resume.rolls_back_at:
            step -= resume.rolls_back_at - resume.saves_at
        return step + self._scenario.unrecorded_steps

    def learning_rate(self, step: int) -> float | None:
        """Return the rate that the trainer's optimizer has in a step; None if it never changes."""
        after = rate_after_save(self._scenario)
        if after is None:
            return None
        number = self.step_of_trainer(step) - self._scenario.unrecorded_steps
        return after if number >= self._scenario.resume.saves_at else self._scenario.fused_rate

    def _load(self, folder: Path) -> bool:
        if not self._model.can_be_loaded:
            self._recorder.event("cannot_roll_back")
            return False
        with self._doing("roll_back"):
            self._model.load(folder, twice=True)
        return True
