"""The deferred process group of simulated ranks: supported collectives, and limits."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hooks_ref
from conformance.judging.verdict import Verdict
from conformance.ranks.drivers.simulated_ranks import CannotSimulate, DeferredGroup, simulate
from tests.cases import Case, own_judge

SIZE = 5
NUMEL = 10
FED = torch.arange(SIZE * NUMEL, dtype=torch.float32).view(SIZE, NUMEL)
MEAN = FED.mean(0)
Result = torch.futures.Future[torch.Tensor]


@pytest.fixture(scope="module")
def bucket() -> Iterator[Callable[[], dist.GradBucket]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(NUMEL, 1, bias=False))
    yield lambda: model.reducer._get_zeros_like_grad_buckets()[0]
    dist.destroy_process_group()


def results(
    hook: Any,
    bucket: Callable[[], dist.GradBucket],
    state: Callable[[DeferredGroup], Any] = lambda group: group,
) -> torch.Tensor:
    first, second = simulate(SIZE, lambda group: (hook, state(group)), bucket, [FED, FED])
    assert torch.equal(first, second)
    return first


def gathers(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    parts = [torch.empty_like(bucket.buffer()) for _ in range(group.size())]
    done = dist.all_gather(parts, bucket.buffer(), group=group, async_op=True).get_future()
    return done.then(lambda fut: torch.stack(parts).mean(0))


def gathers_from_all(state: None, bucket: dist.GradBucket) -> Result:
    if bucket.buffer().is_sparse:
        return hooks_ref.allreduce_hook(state, bucket)
    return gathers(dist.group.WORLD, bucket)


def gathers_into_one(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    whole = torch.empty(group.size() * NUMEL)
    work = dist.all_gather_into_tensor(whole, bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda fut: whole.view(-1, NUMEL).mean(0))


def scatters_and_gathers(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    """Its second collective is issued by the callback of its first."""
    part = torch.empty(NUMEL // group.size())
    whole = torch.empty(NUMEL)
    result = torch.futures.Future()

    def second(first: Any) -> None:
        mean = part / group.size()
        work = dist.all_gather_into_tensor(whole, mean, group=group, async_op=True)
        work.get_future().then(lambda fut: result.set_result(whole))

    work = dist.reduce_scatter_tensor(part, bucket.buffer(), group=group, async_op=True)
    work.get_future().then(second)
    return result


def reduces_and_broadcasts(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    total = bucket.buffer()
    dist.reduce(total, group=group, dst=dist.get_global_rank(group, 2), async_op=True)
    work = dist.broadcast(total, group=group, src=dist.get_global_rank(group, 2), async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0] / group.size())


def reduces_to_root(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    """Sums, and takes the mean of rank 3; the others have a wrong one."""
    total = bucket.buffer()
    done = dist.all_reduce(total, group=group, async_op=True).get_future()
    result = torch.futures.Future()

    def second(first: Any) -> None:
        mean = total / group.size() + (group.rank() != 3)
        work = dist.broadcast(mean, group=group, src=dist.get_global_rank(group, 3), async_op=True)
        work.get_future().then(lambda fut: result.set_result(mean))

    done.then(second)
    return result


# torch 2.13 deprecates two of these names.
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "hook",
    [
        hooks_ref.allreduce_hook,
        gathers,
        gathers_into_one,
        scatters_and_gathers,
        reduces_and_broadcasts,
        reduces_to_root,
    ],
)
def test_collectives(hook: Any, bucket: Callable[[], dist.GradBucket]) -> None:
    assert torch.equal(results(hook, bucket), MEAN.expand(SIZE, NUMEL))


def test_the_default_group_is_each_ranks_own(bucket: Callable[[], dist.GradBucket]) -> None:
    before = dist.group.WORLD
    seen: list[tuple[int, int]] = []

    def hook(state: None, bucket: dist.GradBucket) -> Result:
        seen.append((dist.get_rank(), dist.get_world_size()))
        return hooks_ref.allreduce_hook(dist.group.WORLD, bucket)

    assert torch.equal(results(hook, bucket, lambda group: None), MEAN.expand(SIZE, NUMEL))
    assert seen == 2 * [(rank, SIZE) for rank in range(SIZE)]
    assert dist.group.WORLD is before


def done_with(tensor: torch.Tensor) -> Result:
    future: Result = torch.futures.Future()
    future.set_result(tensor)
    return future


def waits_for_a_work(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    dist.all_reduce(bucket.buffer(), group=group)
    return done_with(bucket.buffer() / group.size())


def waits_twice(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    """Its second collective depends on the result of its first, which it waits for as a future."""
    largest = bucket.buffer().abs().max()
    work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True)
    work.get_future().then(lambda done: done.value()[0] * 1).wait()
    bucket.buffer().div_(largest)
    dist.all_reduce(bucket.buffer(), group=group)
    return done_with(bucket.buffer() * largest / group.size())


def polls(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    while not work.is_completed():
        pass
    again = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    while not again.done():
        pass
    return done_with(bucket.buffer() / group.size() ** 2)


def exchanges(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    """Each rank averages a part, and all gather the parts."""
    parts = torch.empty(NUMEL)
    dist.all_to_all_single(parts, bucket.buffer(), group=group)
    mean = parts.view(group.size(), -1).mean(0)
    whole = torch.empty(NUMEL)
    dist.all_gather_into_tensor(whole, mean, group=group)
    return done_with(whole)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("hook", [waits_for_a_work, waits_twice, polls, exchanges])
def test_hooks_that_wait(hook: Any, bucket: Callable[[], dist.GradBucket]) -> None:
    before = set(threading.enumerate())
    assert torch.allclose(results(hook, bucket), MEAN.expand(SIZE, NUMEL))
    assert set(threading.enumerate()) <= before


def waits_in_a_callback(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    def second(first: Any) -> torch.Tensor:
        dist.all_reduce(bucket.buffer(), group=group)
        return bucket.buffer()

    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(second)


def waits_for_nothing(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    torch.futures.Future().wait()
    return done_with(bucket.buffer())


def another_size_on_rank_1(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    dist.all_reduce(torch.ones(2 + (group.rank() == 1)), group=group, async_op=True)
    return hooks_ref.allreduce_hook(group, bucket)


def on_a_thread(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    made: list[Result] = []
    thread = threading.Thread(target=lambda: made.append(hooks_ref.allreduce_hook(group, bucket)))
    thread.start()
    thread.join()
    return made[0]


def never_completes(group: DeferredGroup, bucket: dist.GradBucket) -> Result:
    return torch.futures.Future()


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (waits_in_a_callback, "a callback waits"),
        (waits_for_nothing, "no rank issues"),
        (another_size_on_rank_1, "the same collectives"),
        (on_a_thread, "a thread of its own"),
        (never_completes, "no rank issues"),
    ],
)
def test_a_hook_that_cannot_be_simulated(
    hook: Any, reason: str, bucket: Callable[[], dist.GradBucket]
) -> None:
    with pytest.raises(CannotSimulate, match=reason):
        results(hook, bucket)


def test_a_last_step_that_does_not_complete(bucket: Callable[[], dist.GradBucket]) -> None:
    with pytest.raises(CannotSimulate, match="not complete"):
        simulate(SIZE, lambda group: (never_completes, group), bucket, [FED])


class _Steps:
    """A state that counts the steps of its rank."""

    def __init__(self, group: DeferredGroup) -> None:
        self.group = group
        self.steps = 0


def test_a_state_lasts_for_all_steps(bucket: Callable[[], dist.GradBucket]) -> None:
    def hook(state: _Steps, bucket: dist.GradBucket) -> Result:
        state.steps += 1
        bucket.buffer().mul_(state.steps)
        return hooks_ref.allreduce_hook(state.group, bucket)

    steps = simulate(SIZE, lambda group: (hook, _Steps(group)), bucket, [FED] * 3)
    for step, result in enumerate(steps):
        assert torch.allclose(result, (step + 1) * MEAN.expand(SIZE, NUMEL))


_scratch: dict[torch.Tensor, torch.Tensor] = {}


def scratch_in_module(state: Any, bucket: dist.GradBucket) -> Result:
    """Right, as long as each rank is a process: its results lie in the module, by parameter."""
    first = bucket.parameters()[0]
    buffer = bucket.buffer()
    if buffer.is_sparse or first not in _scratch or _scratch[first].shape != buffer.shape:
        _scratch[first] = buffer.clone()
    if buffer.is_sparse:
        return hooks_ref.allreduce_hook(state, bucket)
    return _average(_scratch[first].copy_(buffer))


def _average(buffer: torch.Tensor) -> Result:
    done = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True).get_future()
    return done.then(lambda fut: fut.value()[0])


@pytest.mark.parametrize(
    ("hook", "verdict", "text"),
    [
        ("hooks_ref:allreduce_hook", Verdict.PASS, "among 5 to 1024 ranks"),
        pytest.param(
            "tests.ranks.drivers.test_simulated_ranks:gathers_from_all",
            Verdict.PASS,
            " ranks; no more ranks: it gathers",
            marks=pytest.mark.rarely,
        ),
        (
            "tests.right.exact:another_thread",
            Verdict.NOT_APPLICABLE,
            "it starts a thread of its own",
        ),
        (
            "tests.ranks.drivers.test_simulated_ranks:scratch_in_module",
            Verdict.NOT_APPLICABLE,
            "judged on real ranks alone, not on up to 1024 simulated ones: as a test, the kit "
            "simulates 2, 3 and 4 ranks in one process, and the hook got another result there "
            "than on as many real ranks. This is no failure of the hook: if it keeps tensors in "
            "its module, all simulated ranks share them, and real ranks do not",
        ),
    ],
)
@pytest.mark.ranks
def test_right_hooks_at_scale(hook: str, verdict: Verdict, text: str) -> None:
    """A hook that can be simulated passes; for another, the rules do not apply, with a reason."""
    judgements = own_judge().judge(Case(hook, worlds=(2,), rules=("20.1", "20.2", "20.3")))
    for judgement in judgements.values():
        notes = [note for run in judgement.runs.values() for note in run.get("notes", ())]
        assert judgement.verdict is verdict
        assert text in (notes[0] if notes else judgement.reason)
