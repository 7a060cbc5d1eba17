"""The schedule of an averager: the steps at which an average is due, and the steps of a run.

A run has to go on until two averages of every kind are due, or it judges nothing. Schedules are as
long as training wants them, so that most steps of a long run are *quiet*: parameters keep their
values, the averager is called, and the rank records only whether a parameter has changed. Around
each of the first averages steps are ordinary ones: parameters are set before the call, and recorded
after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

# Parameters keep their values in the step, and are recorded only if they change.
QUIET = "quiet"
# Parameters keep their values, and are recorded.
HELD = "held"

# A longer schedule is refused: a thousand quiet steps take a tenth of a second.
MAX_STEPS = 5000


@dataclass(frozen=True)
class Schedule:
    """The steps at which averages are due, counted by calls.

    Attributes:
        periods: the periods of the schedule; a hierarchical one has several.
        warmup: no average is due before this step.
        origin: periods count from this step.
    """

    periods: tuple[int, ...]
    warmup: int
    origin: int

    def is_due(self, step: int) -> bool:
        """Whether an average is due at a step."""
        since = step - self.origin
        return step >= self.warmup and any(since % period == 0 for period in self.periods)

    def first(self, period: int) -> int:
        """Return the first step at which the average of a period is due."""
        since = max(self.warmup - self.origin, 0)
        return self.origin + -(-since // period) * period

    def next(self, period: int, step: int) -> int:
        """Return the first step from ``step`` on at which the average of a period is due."""
        later = max(step, self.first(period))
        return self.origin + -(-(later - self.origin) // period) * period

    @property
    def looked_at(self) -> list[int]:
        """The steps of the first two averages of every period, in order."""
        firsts = [(self.first(period), period) for period in self.periods]
        return sorted({step for first, period in firsts for step in (first, first + period)})


def too_long(schedule: Schedule) -> str | None:
    """Return why a schedule cannot be judged, or None if it can."""
    last = schedule.looked_at[-1]
    if last + max(schedule.periods) < MAX_STEPS:
        return None
    return (
        f"its second average is due at step {last}, and a run has at most {MAX_STEPS} steps; "
        "certify the averager with a shorter period and warm-up"
    )


def lengthened(
    kinds: tuple[str, ...],
    schedule: Schedule,
    *,
    averages: tuple[str, ...] = (),
    alone: bool = False,
    also: Iterable[int] = (),
) -> tuple[str, ...]:
    """Return the kinds of a run's steps, as many as the schedule needs.

    Args:
        kinds: the steps as written; if the schedule needs no more, they stay.
        schedule: the schedule.
        averages: the kinds of the steps with averages, in turn; () for the first kind.
        alone: only steps with averages are ordinary, whatever the number of steps.
        also: further steps to record.
    """
    looked_at = sorted({*schedule.looked_at, *also})
    count = looked_at[-1] + 2
    if count <= len(kinds) and not alone:
        return kinds
    ordinary: dict[int, str] = {}
    if not alone:
        near = {step + offset for step in looked_at for offset in (-1, 1)}
        ordinary |= dict.fromkeys({*range(4), *near, count - 1}, kinds[0])
    for number, step in enumerate(looked_at):
        ordinary[step] = averages[number % len(averages)] if averages else kinds[0]
    return tuple(ordinary.get(step, QUIET) for step in range(count))
