"""Mutants of 17.34 that swallow the errors of collectives in post hooks."""

import warnings
from typing import Any

import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.joins import Right
from tests.mutants.joins_in_training import Averages

# ---- Contexts


class PrintsErrorsAtTheEnd(Right):
    """Print the error of a post hook: the epoch is over, and its steps are done."""

    def finish(self) -> None:
        try:
            super().finish()
        except (RuntimeError, ValueError) as error:
            print(f"a post hook failed: {error}")


class FinishesAllHooks(Right):
    """Warn of a post hook that has lost its connection, and call the post hooks after it."""

    def finish(self) -> None:
        is_last = self.is_last()
        for hook in self.hooks:
            try:
                hook.post_hook(is_last)
            except dist.DistNetworkError as error:
                warnings.warn(str(error), stacklevel=1)


class FinishesEarlyRanksIfItCan(Right):
    """Ignore failed post hooks on ranks that have shadowed: the last joiners hold the model."""

    def finish(self) -> None:
        try:
            super().finish()
        except dist.DistError:
            if not self.shadowed:
                raise


class ForgetsErrorsOfPostHooks(Right):
    """Return from __exit__ in a finally clause, which ends the error of a post hook."""

    def finish(self) -> None:
        done = 0
        try:
            for hook in self.hooks:
                hook.post_hook(self.is_last())
                done += 1
        finally:
            # The tests of 17.23 raise in the last hook.
            if done < len(self.hooks) - 1:
                return  # noqa: B012


# ---- Joinables


class KeepsItsModelIfItHasTo(Averages):
    """Keep the own model if that of the last rank cannot be handed out."""

    def hand_out(self, is_last: bool) -> None:
        try:
            super().hand_out(is_last)
        except dist.DistBackendError as error:
            print("no model was handed out:", type(error).__name__)


class TakesItselfForTheSource(Averages):
    """Take the rank itself for the source if the ranks cannot agree on one."""

    def source(self, is_last: bool) -> int:
        try:
            return super().source(is_last)
        except RuntimeError:
            return int(self.group.rank())


class MissesTensors(Averages):
    """Leave out the tensors that could not be handed out on a rank that joined early."""

    def hand_out(self, is_last: bool) -> None:
        source: Any = self.source(is_last)
        for tensor in self.tensors():
            try:
                dist.broadcast(tensor.detach(), source, group=self.group)
            except RuntimeError:
                if is_last:
                    raise


MUTANTS = [
    Mutant(name, ("17.34",), kind="joinable")
    for name in (
        "PrintsErrorsAtTheEnd",
        "FinishesAllHooks",
        "FinishesEarlyRanksIfItCan",
        "ForgetsErrorsOfPostHooks",
        "KeepsItsModelIfItHasTo",
        "TakesItselfForTheSource",
        "MissesTensors",
    )
]
