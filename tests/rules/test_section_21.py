"""The rules of CUDA devices, delays and graphs, on hand-written records and fake streams.

No test needs a device.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.judging.oracles.mean import mean
from conformance.judging.rule import Rule
from conformance.judging.verdict import Found, Verdict
from conformance.ranks.drivers import cuda_graph as graphs
from conformance.ranks.instruments import stream_delays as streams
from conformance.records.run import Run
from conformance.scenarios.hook import BUCKETS, GRAPH, MANY_STEPS, ORDERED, STREAMS, VALUES
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims
from tests.made_runs import event, made_run

EXACT = parse_claims("exact")
LOSSY = parse_claims("compressed")


def judge(rule: Rule, records: Run | dict[str, Run], claims: Any = EXACT) -> Found:
    found = Found()
    rule.check(records, claims, found)
    return found


def early(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return the mean, but the rank's own gradient on rank 1 at step 3."""
    if (rank, step) == (1, 3):
        return run.fed(rank, step, index)
    return mean(run, rank, step, index)


def both(result: Callable[..., torch.Tensor] = mean) -> dict[str, Run]:
    return {"buckets@2": made_run(scenario=BUCKETS), "streams@2": made_run(result, STREAMS)}


@pytest.mark.parametrize("claims", [EXACT, LOSSY], ids=str)
def test_a_result_that_is_read_too_early_is_refused(rules: dict[str, Rule], claims: Any) -> None:
    right = judge(rules["21.1"], both(), claims)
    assert right.verdict() is Verdict.PASS
    assert right.checks > 10
    wrong = judge(rules["21.1"], both(early), claims)
    assert wrong.verdict() is Verdict.FAIL
    assert wrong.failures[0].cause.startswith("right if no stream is late")


@pytest.mark.parametrize(
    "claims",
    [
        "compressed",
        "compressed(delta=0.25), warmup(2)",
        "unbiased",
        "local, warmup(2)",
        "compressed(feedback=ef21)",
    ],
)
def test_lossy_runs_begin_alike(rules: dict[str, Rule], claims: str) -> None:
    """The runs with and without delays share steps beyond the warm-up, which are compared."""
    lossy = parse_claims(claims)
    plain = adapt_scenario(BUCKETS, lossy)
    delayed = adapt_scenario(STREAMS, lossy)
    assert len(delayed.steps) <= len(plain.steps) + 1
    alike = [one == other for one, other in zip(plain.steps, delayed.steps, strict=False)]
    assert all(alike[: lossy.warmup + 4])
    assert "zero_all" not in delayed.steps
    assert plain.params == delayed.params


def test_a_missing_record_is_refused(rules: dict[str, Rule]) -> None:
    records = both()
    records["streams@2"].ranks[1].tensors.clear()
    for claims in (EXACT, LOSSY):
        assert judge(rules["21.1"], records, claims).verdict() is Verdict.FAIL


def test_other_orders_of_sums_are_no_early_reads(rules: dict[str, Rule]) -> None:
    records = both(lambda run, rank, step, index: mean(run, rank, step, index) * (1 + 1e-5))
    assert judge(rules["21.1"], records, LOSSY).verdict() is Verdict.PASS


def test_on_a_device_a_future_may_be_complete_at_once(rules: dict[str, Rule]) -> None:
    """There its value is not read in the hook, which would wait. On the CPU it is, and is final."""
    run = made_run(scenario=ORDERED)
    for rank in run.ranks:
        for returned in rank.all("returned"):
            returned |= {"done": True, "digest": None}
    assert judge(rules["1.6"], run).verdict() is Verdict.FAIL
    for rank in run.ranks:
        for value in rank.all("value"):
            value |= {"device": "cuda:0", "bucket_device": "cuda:0"}
    assert judge(rules["1.6"], run).verdict() is Verdict.PASS
    next(run.ranks[1].all("rest"))["digest"] = "written later"
    assert judge(rules["1.6"], run).verdict() is Verdict.FAIL


def test_a_wait_on_the_host_is_named_with_its_line(rules: dict[str, Rule]) -> None:
    run = made_run(scenario=STREAMS)
    assert judge(rules["21.2"], run).verdict() is Verdict.PASS
    line = "hook.py:7: if flag.item():"
    run.ranks[0].events.append(event("waited_for_device", 2, call=2, where=line))
    found = judge(rules["21.2"], run)
    assert [failure.actual for failure in found.failures] == [f"rank 0, step 2: it waits in {line}"]


def states(run: Run, **rng: str) -> Run:
    """Record the generators' states before and after the set-up; that of CUDA is ``a`` before."""
    for rank in run.ranks:
        rank.events.insert(0, event("state", -1, at="start", rng={"torch": "a", "cuda": "a"}))
        rank.events.insert(1, event("state", -1, at="registered", rng={"torch": "a", **rng}))
    return run


def test_the_generator_of_cuda(rules: dict[str, Rule]) -> None:
    assert judge(rules["21.3"], states(made_run(), cuda="a")).verdict() is Verdict.PASS
    changed = judge(rules["21.3"], states(made_run(), cuda="b"))
    assert "while the subject was set up" in changed.failures[0].actual
    drawn = states(made_run(), cuda="a")
    next(drawn.ranks[1].all("stepped", step=2))["rng_changed"] = ["cuda"]
    assert judge(rules["21.3"], drawn).failures[0].actual == "rank 1, step 2: it changed"
    assert judge(rules["9.1"], drawn).verdict() is Verdict.PASS, "one defect, one failure"


def test_without_cuda_there_is_nothing_to_judge(rules: dict[str, Rule]) -> None:
    assert judge(rules["21.3"], states(made_run())).verdict() is Verdict.NOT_RUN
    assert judge(rules["21.4"], made_run(scenario=MANY_STEPS)).verdict() is Verdict.NOT_RUN


def measured(lent: Callable[[int], int], reserved: Callable[[int], int]) -> Run:
    """Return a run whose allocators have lent and reserved that many bytes after each step."""
    run = made_run(scenario=MANY_STEPS)
    for rank in run.ranks:
        for step in range(len(MANY_STEPS.steps)):
            sizes = {"cuda": lent(step), "reserved": reserved(step)}
            rank.events.append(event("memory", step, tensors=0, allocated=0, **sizes))
    return run


@pytest.mark.parametrize(
    ("lent", "reserved", "message"),
    [
        (lambda step: 1, lambda step: 20, None),
        # It warms up, and reserves one more piece.
        (lambda step: min(step, 5), lambda step: 20 + 20 * (step > 7), None),
        (lambda step: step, lambda step: 200, "tensors on the device grew"),
        (lambda step: 1, lambda step: step * step, "reserved memory grew at 6 of the last 6 steps"),
        (lambda step: 1, lambda step: step // 2, "reserved memory grew at 3 of the last 6 steps"),
    ],
)
def test_memory_of_the_device(
    rules: dict[str, Rule],
    lent: Callable[[int], int],
    reserved: Callable[[int], int],
    message: str | None,
) -> None:
    """Sizes are in MiB."""
    run = measured(lambda step: lent(step) << 20, lambda step: reserved(step) << 20)
    found = judge(rules["21.4"], run)
    assert found.checks == 4
    if message is None:
        assert found.failures == []
    else:
        assert [message in failure.actual for failure in found.failures] == [True, True]


def test_replays_of_a_graph(rules: dict[str, Rule]) -> None:
    assert judge(rules["21.5"], made_run(scenario=GRAPH)).verdict() is Verdict.PASS
    assert judge(rules["21.5"], made_run(early, GRAPH)).verdict() is Verdict.FAIL
    for claims in ("compressed", "poststep(call=flush)", "fused(SGD, lr=0.1)"):
        found = judge(rules["21.5"], made_run(scenario=GRAPH), parse_claims(claims))
        assert found.verdict() is Verdict.NOT_APPLICABLE


def test_ranks_are_late_in_turn_and_one_way_each() -> None:
    assert {streams.late(rank, 0) for rank in range(4)} == {""}
    for step in range(1, 5):
        assert {streams.late(rank, step) for rank in (0, 1)} == {"compute", "communication"}
        assert streams.late(0, step) != streams.late(0, step + 1)
    assert VALUES.delayed is False
    assert STREAMS.delayed is True


class _Cuda:
    """The part of torch.cuda that the delays use; it records the streams that sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept: list[str] = []
        self.mode: int | str = 0
        cuda = self
        numbers = iter(range(1000))

        class Stream:
            def __init__(self, priority: int = 0) -> None:
                self.name = f"pool {next(numbers)}"

            def synchronize(self) -> None:
                pass

        class StreamContext:
            def __init__(self, stream: Any) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                cuda.streams.append(self.stream.name)

            def __exit__(self, *_: object) -> None:
                cuda.streams.pop()

        self.streams = ["backward's"]
        for name, value in {
            "Stream": Stream,
            "StreamContext": StreamContext,
            "stream": lambda stream: torch.cuda.StreamContext(stream),
            "_sleep": lambda cycles: self.slept.append(self.streams[-1]),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
            "synchronize": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_delays_come_before_the_work_of_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(monkeypatch)
    lines: list[str] = []
    delays = streams.Streams(0, torch.device("cpu"), [3, 5], lines.append)
    delays.install()

    def step(number: int) -> list[str]:
        cuda.slept.clear()
        delays.before_backward(number)
        for _ in range(2):
            delays.before_hook()
            with torch.cuda.stream(torch.cuda.Stream()):
                pass
            delays.after_hook()
        delays.after_backward()
        with torch.cuda.stream(torch.cuda.Stream()):
            pass
        return list(cuda.slept)

    assert step(0) == []
    assert step(2) == ["backward's"]
    late = step(1)
    pool = {f"pool {number}" for number in range(2 * streams.POOL)}
    assert set(late[:-2]) >= pool, "every stream of the pool, of both priorities"
    assert len(set(late[-2:])) == 2, "and the stream that the hook enters, in each of its calls"
    assert lines == []
    assert cuda.streams == ["backward's"]


def test_waits_on_the_host_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(monkeypatch)
    lines: list[str] = []
    calls = ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"))
    monkeypatch.setattr(streams, "_CALLS", calls)
    delays = streams.Streams(0, torch.device("cpu"), [3], lines.append)
    before = torch.cuda.synchronize
    delays.before_backward(1)
    delays.before_hook()
    assert cuda.mode == "warn"
    torch.cuda.synchronize()
    torch.cuda.Stream().synchronize()
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    warnings.warn("something else", stacklevel=1)
    delays.after_hook()
    assert len(lines) == 3
    assert all(f"{__name__.rpartition('.')[2]}.py:" in line for line in lines), lines
    assert (cuda.mode, torch.cuda.synchronize) == (0, before)
    torch.cuda.synchronize()
    assert len(lines) == 3


def test_a_captured_step_is_replayed_on_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven eager steps, one that is captured, and then replays on the same memory."""
    log: list[str] = []
    captured: list[Callable[[], None]] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)

    @contextlib.contextmanager
    def capturing(graph: Any, stream: Any) -> Iterator[None]:
        log.append("captures")
        yield
        captured.append(steps.pop())

    for name, value in {
        "synchronize": lambda: None,
        "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: captured[0]()),
        "graph": capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    steps: list[Callable[[], None]] = []

    def ddp(grads: list[torch.Tensor | None]) -> Any:
        def backward() -> None:
            values = [grad and grad.item() for grad in grads]
            log.append(f"backward of {values}")
            steps.append(backward)

        return SimpleNamespace(backward=backward)

    graphs.train_captured(
        stream,
        ddp,
        lambda: log.append("forgets"),
        lambda step, kind: [torch.full((), 10.0 + step), None],
        [(0, "crafted"), (1, "crafted")],
        lambda step, kind: log.append(f"begins {step}"),
        lambda step: log.append(f"keeps {step}"),
    )
    eager = ["forgets", "backward of [10.0, None]"] * graphs.WARM_UPS
    first = ["begins 0", "backward of [10.0, None]", "keeps 0"]
    second = ["begins 1", "backward of [11.0, None]", "keeps 1"]
    assert log == [*eager, "forgets", "captures", "backward of [10.0, None]", *first, *second]
    assert graphs.WARM_UPS == 11
