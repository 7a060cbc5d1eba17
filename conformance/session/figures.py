"""The pictures of a report, from the runs and the judgements of a session.

A picture is left out if the session has no data for it. Nothing here takes part in a verdict.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from conformance.errors import ConformanceError
from conformance.judging.oracles.error_curves import (
    ErrorCurve,
    bin_labels,
    error_curve,
    errors_at_scale,
)
from conformance.judging.run_failures import failed_run
from conformance.records.run import Run
from conformance.scenarios.hook import AT_SCALE, ORDERED, TRAINING
from conformance.scenarios.long_runs import ENDURANCE
from conformance.session.charts import Chart, draw
from conformance.session.report_parts import advice_of
from conformance.session.session import Session

# Bars of a chart: the rest is left out, and counted.
_MOST_BARS = 24
# The shortest bar of margins, as a share of the longest one.
_THINNEST = 1 / 200


@dataclass(frozen=True)
class Figure:
    """A picture of a report.

    Attributes:
        name: its anchor.
        title: its title.
        text: the same in words, for people who do not see it, and its source.
        chart: the data.
    """

    name: str
    title: str
    text: str
    chart: Chart

    @property
    def svg(self) -> str:
        return draw(self.chart)


def figures(session: Session) -> list[Figure]:
    """Return the pictures of a session."""
    if session.engine is None:
        return []
    makers: tuple[Callable[[Session, dict[str, Run]], Iterator[Figure]], ...] = (
        _errors,
        _growth,
        _bytes,
        _losses,
        _margins,
        _costs,
    )
    runs = {run.name: run for run in session.engine.runs}
    return [figure for make in makers for figure in make(session, runs)]


# --- errors ---------------------------------------------------------------------------------------


def _errors(session: Session, runs: dict[str, Run]) -> Iterator[Figure]:
    """Yield the errors by step, and their distribution."""
    assert session.engine is not None
    curve = _first_curve(session, runs)
    if curve is None or not any(point.error for point in curve.points):
        return
    labels = [str(point.at) for point in curve.points]
    errors = [point.error for point in curve.points]
    bounds = [point.bound for point in curve.points]
    wrong = sum(
        1
        for point in curve.points
        if not point.error <= (math.inf if point.bound is None else point.bound)
    )
    thinned = ""
    if len(curve.points) < curve.steps:
        thinned = f" Each point is the worst of {math.ceil(curve.steps / len(curve.points))} steps."
    without = sum(error == 0 for error in errors)
    yield Figure(
        "error-by-step",
        "Error by step, beside its bound",
        f"Run {curve.run}, {curve.steps} steps: {curve.what}. {_count(wrong, 'point')} above the "
        f"bound; {without} without any error, which a logarithmic axis does not show.{thinned}",
        Chart("line", labels, _present({"error": errors, "bound": bounds}), "step", "", True),
    )
    if sum(curve.bins):
        total = sum(curve.bins)
        over = curve.bins[-1]
        yield Figure(
            "error-distribution",
            "Distribution of the errors",
            f"Run {curve.run}: {total} elements by their error, as a share of its bound. "
            f"{curve.bins[0]} have no error at all, {over} exceed the bound.",
            Chart(
                "column",
                bin_labels(),
                {"elements": [float(number) or None for number in curve.bins]},
                "error / bound",
                "elements",
                True,
            ),
        )


def _first_curve(session: Session, runs: dict[str, Run]) -> ErrorCurve | None:
    """Return the errors of the long run, or of the plainest one at the largest world size."""
    assert session.engine is not None
    claims = session.engine.claims
    plainest = session.engine.plan.plainest.name
    wanted = [run for run in runs.values() if run.scenario.name == ENDURANCE.name]
    wanted += sorted(
        (run for run in runs.values() if run.scenario.name == plainest),
        key=lambda run: -run.world,
    )
    for run in wanted:
        # Alone, a rank has its own gradients, without any error.
        if session.subject.kind == "hook" and run.finished and run.world > 1:
            curve = error_curve(run, claims)
            if curve is not None:
                return curve
    return None


def _growth(session: Session, runs: dict[str, Run]) -> Iterator[Figure]:
    """Yield the error by the number of simulated ranks."""
    assert session.engine is not None
    run = next((run for run in runs.values() if run.scenario.name == AT_SCALE.name), None)
    curve = errors_at_scale(run, session.engine.claims) if run and run.finished else None
    if curve is None:
        return
    points = curve.points
    worst = max(points, key=lambda point: point.error)
    series: dict[str, Sequence[float | None]] = {
        "error": [point.error for point in points],
        "bound": [point.bound for point in points],
    }
    yield Figure(
        "growth",
        f"Growth of the error from {points[0].at} to {points[-1].at} simulated ranks",
        f"Largest {curve.what}, on random gradients. It is largest among {worst.at} ranks: "
        f"{worst.error:.2g}. These ranks share one process.",
        Chart("line", [str(point.at) for point in points], _present(series), "ranks", "", True),
    )


# --- bytes, losses, costs -------------------------------------------------------------------------


def _bytes(session: Session, runs: dict[str, Run]) -> Iterator[Figure]:
    """Yield the bytes of each step of one rank, beside those of its gradients."""
    sizes = sorted(
        (run for run in runs.values() if run.scenario.name == ORDERED.name and run.finished),
        key=lambda run: run.world,
    )
    sent: list[tuple[int, int, int]] = []
    for run in sizes[:1]:
        for rank, step, collectives, gradients in run.bytes_sent():
            if rank == 0 and gradients:
                sent.append((step, sum(size for _, size in collectives), gradients))
    if not sent:
        return
    ours = [float(size) for _, size, _ in sent]
    vanilla = [float(gradients) for _, _, gradients in sent]
    share = sum(ours) / sum(vanilla)
    yield Figure(
        "bytes",
        "Bytes by step, beside vanilla DDP",
        f"Run {sizes[0].name}, rank 0: bytes given to collectives in each step. Vanilla DDP sends "
        f"the gradients as they are. In all, {share:.3g} times its bytes.",
        Chart(
            "column",
            [str(step) for step, _, _ in sent],
            {"subject": ours, "vanilla": vanilla},
            "step",
            "bytes",
        ),
    )


def _losses(session: Session, runs: dict[str, Run]) -> Iterator[Figure]:
    """Yield the losses of a small training, beside vanilla DDP's on the same batches."""
    assert session.engine is not None
    trained = sorted(
        (run for run in runs.values() if run.scenario.name == TRAINING.name and run.finished),
        key=lambda run: run.world,
    )
    if not trained:
        return
    run = trained[0]
    ours = _losses_of(run)
    if not ours:
        return
    series = {"subject": ours}
    text = "There is no run of vanilla DDP to compare with."
    vanilla = _vanilla_losses(session, run)
    if vanilla:
        series["vanilla"] = vanilla
        apart = max(abs(one - other) for one, other in zip(ours, vanilla, strict=True))
        text = f"The largest distance from vanilla DDP on the same batches is {apart:.2g}."
    yield Figure(
        "loss",
        "Loss of a small training, beside vanilla DDP",
        f"Run {run.name}: {run.scenario.summary}; mean loss over ranks. {text} Batches are random: "
        "the curves show whether both train alike, not how well a model learns.",
        Chart("line", [str(step) for step in range(len(ours))], series, "step", "loss"),
    )


def _vanilla_losses(session: Session, run: Run) -> list[float]:
    """Return the losses of the same training without the subject; [] if there is no such run."""
    assert session.engine is not None
    try:
        vanilla = session.engine.maker.vanilla(run)
    except ConformanceError:
        return []
    return [] if failed_run(vanilla) else _losses_of(vanilla)


def _losses_of(run: Run) -> list[float]:
    """Return the mean loss of each step over ranks; [] if a rank lacks one."""
    steps = len(run.scenario.steps)
    losses = [[event["loss"] for event in rank.all("trained")] for rank in run.ranks]
    if not losses or any(len(rank) != steps for rank in losses):
        return []
    return [sum(step) / len(step) for step in zip(*losses, strict=True)]


def _margins(session: Session, _: dict[str, Run]) -> Iterator[Figure]:
    """Yield the largest error of each rule as a share of its bound."""
    margins = {
        number: judgement.margin
        for number, judgement in session.judgements.items()
        if judgement.margin
    }
    largest = max(margins.values(), default=0.0)
    visible = [number for number, margin in margins.items() if margin >= largest * _THINNEST]
    shown = sorted(visible, key=lambda number: -margins[number])[:_MOST_BARS]
    if not shown:
        return
    advice = {judgement.number for judgement in advice_of(session)}
    labels = [f"{number} (advice)" if number in advice else number for number in shown]
    yield Figure(
        "margins",
        "Largest error of each rule, as a share of its bound",
        f"{_count(len(margins), 'rule')} with bounds and an error; the largest share is "
        f"{margins[shown[0]]:.3g}, in rule {labels[0]}. {_rest(margins, shown)}".strip(),
        Chart("bar", labels, {"error / bound": [margins[number] for number in shown]}),
    )


def _costs(session: Session, runs: dict[str, Run]) -> Iterator[Figure]:
    """Yield the seconds of each run, as the clocks of its ranks have them."""
    costs = {run.name: seconds for run in runs.values() if (seconds := _seconds(run))}
    shown = sorted(costs, key=lambda name: -costs[name])[:_MOST_BARS]
    if not shown:
        return
    yield Figure(
        "cost",
        "Cost by scenario",
        f"Seconds from the first to the last event of {_count(len(costs), 'run')}, together "
        f"{sum(costs.values()):.1f}; some ran at the same time. {_rest(costs, shown)}".strip(),
        Chart("bar", shown, {"seconds": [costs[name] for name in shown]}, "", "seconds"),
    )


def _seconds(run: Run) -> float:
    times = [event["time"] for rank in run.ranks for event in rank.events]
    numbers = [time for time in times if isinstance(time, (int, float))]
    return max(numbers) - min(numbers) if numbers else 0.0


def _present(
    series: Mapping[str, Sequence[float | None]],
) -> dict[str, Sequence[float | None]]:
    """Return the series that have a value."""
    return {name: values for name, values in series.items() if any(values)}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _rest(all_of: dict[str, float], shown: list[str]) -> str:
    hidden = len(all_of) - len(shown)
    return f"The {len(shown)} largest are shown." if hidden else ""
