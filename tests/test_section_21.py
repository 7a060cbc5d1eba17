"""The rules of CUDA devices on records written by hand, and the delays on streams that do nothing: neither needs a device."""

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
from conformance.scenarios.hook import BUCKETS, GRAPH, LONG, ORDERED, STREAMS, VALUES
from conformance.session.plan import adapt_scenario
from conformance.subjects.claims import parse_claims
from tests.made_runs import event, made_run

EXACT, LOSSY = parse_claims("exact"), parse_claims("compressed")


def ask(rule: Rule, records: Run | dict[str, Run], claims: Any = EXACT) -> Found:
    found = Found()
    rule.check(records, claims, found)
    return found


def early(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Rank 1 has read what it fed at step 3, and the mean at all others."""
    return run.fed(rank, step, index) if (rank, step) == (1, 3) else mean(run, rank, step, index)


def both(result: Callable[..., torch.Tensor] = mean) -> dict[str, Run]:
    return {"buckets@2": made_run(scenario=BUCKETS), "streams@2": made_run(result, STREAMS)}


@pytest.mark.parametrize("claims", [EXACT, LOSSY], ids=str)
def test_what_is_read_too_early_is_refused(rules: dict[str, Rule], claims: Any) -> None:
    right = ask(rules["21.1"], both(), claims)
    assert right.verdict() is Verdict.PASS
    assert right.checks > 10
    wrong = ask(rules["21.1"], both(early), claims)
    assert wrong.verdict() is Verdict.FAIL
    assert wrong.failures[0].cause.startswith("right if no stream is late")


@pytest.mark.parametrize(
    "claims", ["compressed", "compressed(delta=0.25), warmup(2)", "unbiased", "local, warmup(2)", "compressed(feedback=ef21)"]
)
def test_lossy_runs_begin_alike(rules: dict[str, Rule], claims: str) -> None:
    """With and without delays, beyond the warm-up: there is something to compare."""
    lossy = parse_claims(claims)
    plain, delayed = adapt_scenario(BUCKETS, lossy), adapt_scenario(STREAMS, lossy)
    assert len(delayed.steps) <= len(plain.steps) + 1
    alike = [one == other for one, other in zip(plain.steps, delayed.steps, strict=False)]
    assert all(alike[: lossy.warmup + 4])
    assert "zero_all" not in delayed.steps
    assert plain.params == delayed.params


def test_a_record_that_is_missing_is_refused(rules: dict[str, Rule]) -> None:
    records = both()
    records["streams@2"].ranks[1].tensors.clear()
    for claims in (EXACT, LOSSY):
        assert ask(rules["21.1"], records, claims).verdict() is Verdict.FAIL


def test_other_orders_of_sums_are_no_early_reads(rules: dict[str, Rule]) -> None:
    records = both(lambda run, rank, step, index: mean(run, rank, step, index) * (1 + 1e-5))
    assert ask(rules["21.1"], records, LOSSY).verdict() is Verdict.PASS


def test_on_a_device_a_future_may_be_complete_at_once(rules: dict[str, Rule]) -> None:
    """Its value is not read in the hook, which would wait for it; on the CPU it is, and is final."""
    run = made_run(scenario=ORDERED)
    for rank in run.ranks:
        for returned in rank.all("returned"):
            returned |= {"done": True, "digest": None}
    assert ask(rules["1.6"], run).verdict() is Verdict.FAIL
    for rank in run.ranks:
        for value in rank.all("value"):
            value |= {"device": "cuda:0", "bucket_device": "cuda:0"}
    assert ask(rules["1.6"], run).verdict() is Verdict.PASS
    next(run.ranks[1].all("rest"))["digest"] = "written later"
    assert ask(rules["1.6"], run).verdict() is Verdict.FAIL


def test_a_wait_on_the_host_is_named_with_its_line(rules: dict[str, Rule]) -> None:
    run = made_run(scenario=STREAMS)
    assert ask(rules["21.2"], run).verdict() is Verdict.PASS
    run.ranks[0].events.append(event("waited_for_device", 2, call=2, where="hook.py:7: if flag.item():"))
    found = ask(rules["21.2"], run)
    assert [failure.actual for failure in found.failures] == ["rank 0, step 2: it waits in hook.py:7: if flag.item():"]


def states(run: Run, **rng: str) -> Run:
    """Put on record what generators were before and after the set-up; ``cuda`` is ``a`` before."""
    for rank in run.ranks:
        rank.events.insert(0, event("state", -1, at="start", rng={"torch": "a", "cuda": "a"}))
        rank.events.insert(1, event("state", -1, at="registered", rng={"torch": "a", **rng}))
    return run


def test_the_generator_of_cuda(rules: dict[str, Rule]) -> None:
    assert ask(rules["21.3"], states(made_run(), cuda="a")).verdict() is Verdict.PASS
    assert "while the subject was set up" in ask(rules["21.3"], states(made_run(), cuda="b")).failures[0].actual
    drawn = states(made_run(), cuda="a")
    next(drawn.ranks[1].all("stepped", step=2))["rng_changed"] = ["cuda"]
    assert ask(rules["21.3"], drawn).failures[0].actual == "rank 1, step 2: it changed"
    assert ask(rules["9.1"], drawn).verdict() is Verdict.PASS, "one defect, one failure"


def test_without_cuda_there_is_nothing_to_judge(rules: dict[str, Rule]) -> None:
    assert ask(rules["21.3"], states(made_run())).verdict() is Verdict.NOT_RUN
    assert ask(rules["21.4"], made_run(scenario=LONG)).verdict() is Verdict.NOT_RUN


def measured(lent: Callable[[int], int], reserved: Callable[[int], int]) -> Run:
    """A run in which each rank's allocator has lent out and reserved that many bytes after each step."""
    run = made_run(scenario=LONG)
    for rank in run.ranks:
        rank.events += [
            event("memory", step, tensors=0, allocated=0, cuda=lent(step), reserved=reserved(step)) for step in range(len(LONG.steps))
        ]
    return run


@pytest.mark.parametrize(
    ("lent", "reserved", "said"),
    [
        (lambda step: 1 << 20, lambda step: 20 << 20, ""),
        (lambda step: min(step, 5) << 20, lambda step: (20 + 20 * (step > 7)) << 20, ""),  # warms up, and takes one more piece
        (lambda step: step << 20, lambda step: 200 << 20, "tensors on the device grew"),
        (lambda step: 1 << 20, lambda step: (step * step) << 20, "reserved memory grew at 6 of the last 6 steps"),
        (lambda step: 1 << 20, lambda step: (step // 2) << 20, "reserved memory grew at 3 of the last 6 steps"),
    ],
)
def test_memory_of_the_device(rules: dict[str, Rule], lent: Callable[[int], int], reserved: Callable[[int], int], said: str) -> None:
    found = ask(rules["21.4"], measured(lent, reserved))
    assert found.checks == 4
    assert [said in failure.actual for failure in found.failures] == [True, True] if said else found.failures == []


def test_replays_of_a_graph(rules: dict[str, Rule]) -> None:
    assert ask(rules["21.5"], made_run(scenario=GRAPH)).verdict() is Verdict.PASS
    assert ask(rules["21.5"], made_run(early, GRAPH)).verdict() is Verdict.FAIL
    for claims in ("compressed", "poststep(call=flush)", "fused(SGD, lr=0.1)"):
        assert ask(rules["21.5"], made_run(scenario=GRAPH), parse_claims(claims)).verdict() is Verdict.NOT_APPLICABLE


def test_ranks_are_late_in_turn_and_one_way_each() -> None:
    assert {streams.late(rank, 0) for rank in range(4)} == {""}
    for step in range(1, 5):
        assert {streams.late(rank, step) for rank in (0, 1)} == {"compute", "communication"}
        assert streams.late(0, step) != streams.late(0, step + 1)
    assert VALUES.delayed is False
    assert STREAMS.delayed is True


class _Cuda:
    """As much of torch.cuda as the delays ask for; it writes down on which stream something sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept: list[str] = []
        self.mode: int | str = 0
        cuda, made = self, iter(range(1000))

        class Stream:
            def __init__(self, priority: int = 0) -> None:
                self.name = f"pool {next(made)}"

            def synchronize(self) -> None:
                pass

        class StreamContext:
            def __init__(self, stream: Any) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                cuda.streams.append(self.stream.name)

            def __exit__(self, *_: object) -> None:
                cuda.streams.pop()

        self.streams, self.Stream, self.StreamContext = ["backward's"], Stream, StreamContext
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


def test_delays_lie_in_front_of_what_the_hook_puts_on_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, lines = _Cuda(monkeypatch), list[str]()
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
    assert set(late[:-2]) >= {f"pool {number}" for number in range(2 * streams.POOL)}, "every stream of the pool, of both priorities"
    assert len(set(late[-2:])) == 2, "and what the hook enters, in each of its calls"
    assert lines == []
    assert cuda.streams == ["backward's"]


def test_who_waits_on_the_host_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, lines = _Cuda(monkeypatch), list[str]()
    monkeypatch.setattr(streams, "_CALLS", ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize")))
    delays, before = streams.Streams(0, torch.device("cpu"), [3], lines.append), torch.cuda.synchronize
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
    """Eleven eager steps, one that is captured, and then none but replays, of what lies in the same memory."""
    said: list[str] = []
    captured: list[Callable[[], None]] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)

    @contextlib.contextmanager
    def capturing(graph: Any, stream: Any) -> Iterator[None]:
        said.append("captures")
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
            said.append(f"backward of {[None if grad is None else grad.item() for grad in grads]}")
            steps.append(backward)

        return SimpleNamespace(backward=backward)

    graphs.train_captured(
        stream,
        ddp,
        lambda: said.append("forgets"),
        lambda step, kind: [torch.full((), 10.0 + step), None],
        [(0, "crafted"), (1, "crafted")],
        lambda step, kind: said.append(f"begins {step}"),
        lambda step: said.append(f"keeps {step}"),
    )
    eager = ["forgets", "backward of [10.0, None]"] * graphs.WARM_UPS
    replays = ["begins 0", "backward of [10.0, None]", "keeps 0", "begins 1", "backward of [11.0, None]", "keeps 1"]
    assert said == [*eager, "forgets", "captures", "backward of [10.0, None]", *replays]
    assert graphs.WARM_UPS == 11
