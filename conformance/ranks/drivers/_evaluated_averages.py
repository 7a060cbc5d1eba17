"""The averages with which an averager would have a model evaluated."""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from conformance.ranks.drivers._equal_states import (
    changed_values,
    copies,
    same_state,
    same_values,
)
from conformance.ranks.drivers._evaluation_ends import (
    Cancelled,
    EvaluationError,
    Exits,
    Interrupted,
)
from conformance.ranks.drivers._given_parameters import Parameters
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.digest import digest
from conformance.scenarios.gradients import lay_out


class Backups:
    """The values that training goes on with, as a state may hold them during an evaluation.

    Args:
        trained: the values of the parameters before the evaluation.
        averages: those within it.
    """

    def __init__(self, trained: list[torch.Tensor], averages: list[torch.Tensor]) -> None:
        self._trained = trained
        self._averages = averages

    def accepts(self, now: Any, before: Any) -> bool:
        """Whether a part of a state is such a backup, and took the place of no average."""
        if isinstance(now, torch.Tensor):
            was_average = isinstance(before, torch.Tensor) and _is_among(before, self._averages)
            return _is_among(now, self._trained) and not was_average
        if isinstance(now, Mapping):
            now = list(now.values())
        if before is None and isinstance(now, list | tuple):
            return all(self.accepts(part, None) for part in now)
        return False


def _is_among(value: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Whether a tensor has the values of one of some others, in the dtype of that one."""
    return any(
        value.shape == other.shape and same_values(value.to(other.dtype), other)
        for other in tensors
    )


class EvaluatedAverages:
    """The averages that ``applied()`` of an averager writes into the parameters of a model.

    Args:
        driver: of the rank.
        averager: the subject.
        params: of the model.
        given: those that the averager is given from the start.
    """

    def __init__(
        self, driver: RankDriver, averager: Any, params: Parameters, given: Parameters
    ) -> None:
        self._driver = driver
        self._averager = averager
        self._params = params
        self._given = given

    def keep(
        self,
        end: type[BaseException] | None,
        name: str,
        *,
        nests: bool,
        form: Iterable[Any] | None = None,
    ) -> None:
        """Record the parameters inside an evaluation, and what it leaves behind.

        Args:
            end: the exception that ends the evaluation, if one does.
            name: of the recorded tensors.
            nests: evaluate once more inside the evaluation.
            form: the parameters in another form than a list, which the averager may refuse.
        """
        applied = getattr(self._averager, "applied", None)
        if not callable(applied):
            return  # it evaluates with the parameters themselves
        driver = self._driver
        has_begun = False
        before = copies(self._params)
        strides = [parameter.stride() for parameter in self._params]
        memory = [parameter.data_ptr() for parameter in self._params]
        gradients = self._gradients()
        state = self._state()
        is_same_state = True
        is_swallowed = False
        activity = driver.activity
        try:
            with driver.doing("applied"), applied(self._given if form is None else form):
                has_begun = True
                for index, parameter in enumerate(self._params):
                    driver.keep(f"{name}/p{index}", lay_out(parameter, "contiguous"))
                # The best checkpoint is saved while it is evaluated.
                keeps = Backups(before, copies(self._params)).accepts
                is_same_state = same_state(self._state(), state, keeps)
                if nests:
                    self._nest(applied)
                if end:
                    is_swallowed = True
                    raise end("this evaluation failed")
        except (EvaluationError, Interrupted, Cancelled, Exits):
            is_swallowed = False
            driver.activity = activity
        except Exception as error:
            # A collective of its own may be the one that the kit has let fail.
            if has_begun or driver.failing.has_failed:
                raise
            driver.activity = activity
            if form is not None:
                self.keep(end, name, nests=nests)
                return
            # There may be no average yet. If the reference has one, the rule says that none came.
            text = f"{type(error).__name__}: {str(error)[:200]}"
            driver.recorder.event("not_applied", error=text)
            return
        pairs = enumerate(zip(self._gradients(), gradients, strict=True))
        driver.recorder.event(
            "evaluated",
            failed=bool(end),
            swallowed=end.__name__ if end and is_swallowed else "",
            nests=nests,
            changed=changed_values(self._params, before),
            strides_changed=[i for i, p in enumerate(self._params) if p.stride() != strides[i]],
            moved=[i for i, p in enumerate(self._params) if p.data_ptr() != memory[i]],
            changed_gradients=[index for index, (now, kept) in pairs if now != kept],
            same_state=is_same_state,
        )

    def _nest(self, applied: Callable[..., AbstractContextManager[Any]]) -> None:
        """Evaluate inside an evaluation, and record the parameters that are no averages then."""
        averages = copies(self._params)
        try:
            with applied(self._params):
                inside = changed_values(self._params, averages)
        except Exception as error:
            # The averager may refuse to nest.
            text = f"{type(error).__name__}: {str(error)[:200]}"
            self._driver.recorder.event("not_nested", error=text)
            return
        after = changed_values(self._params, averages)
        self._driver.recorder.event("nested", inside=inside, after=after)

    def _gradients(self) -> list[tuple[bool, str | None]]:
        """Return for each parameter whether it requires a gradient, and a digest of the one that it
        has.
        """
        return [(p.requires_grad, None if p.grad is None else digest(p.grad)) for p in self._params]

    def _state(self) -> Any:
        """Return a copy of the averager's state_dict(); None if it has none."""
        has_one = hasattr(self._averager, "state_dict")
        return copy.deepcopy(self._averager.state_dict()) if has_one else None
