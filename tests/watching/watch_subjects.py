"""Watched training runs that check their own findings, inside their ranks."""

import copy
import datetime
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.nn.parallel import DistributedDataParallel

import hooks_ref
from conformance import Case, Drift, Watcher, watch
from conformance.errors import UsageError
from conformance.ranks.resolve import call_with_names, make_hook, resolve
from conformance.subjects.spec import SubjectSpec
from tests.torch_marks import COMPLEX_OVER_GLOO

CAP = 256 / 2**20  # several buckets


def once(check: Callable[[], None]) -> Case:
    return Case(None, hooks_ref.noop_hook, after_backward=check)


def network() -> torch.nn.Module:
    """The same on all ranks, without any random state."""
    net = torch.nn.Sequential(
        torch.nn.Linear(9, 17),
        torch.nn.ReLU(),
        torch.nn.Linear(17, 16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 5),
    )
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return net


def loss_of(ddp: Any, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, 9, generator=generator)
    y = torch.randn(6, 5, generator=generator)
    device = next(ddp.parameters()).device
    return (ddp(x.to(device)) - y.to(device)).square().mean()


def model_with(
    process_group: Any, hook: str, state: str = "", device: str = "cpu", **options: Any
) -> DistributedDataParallel:
    """Return a model in several buckets, with a hook and a state named as on the command line."""
    ddp = DistributedDataParallel(
        network().to(device), process_group=process_group, **{"bucket_cap_mb": CAP, **options}
    )
    if hook:
        register(ddp, process_group, hook, state)
    return ddp


def register(ddp: DistributedDataParallel, process_group: Any, hook: str, state: str = "") -> None:
    resolved = resolve(SubjectSpec(hook, state or None))
    names: dict[str, Callable[[], Any]] = {
        "process_group": lambda: process_group,
        "model": lambda: ddp,
        "rank": lambda: dist.get_rank(process_group),
        "world_size": lambda: dist.get_world_size(process_group),
        "device": lambda: torch.device("cpu"),
    }
    made, value = make_hook(resolved, names, "--hook")
    ddp.register_comm_hook(
        process_group if value is None and resolved.state is None else value, made
    )


def batches(ddp: DistributedDataParallel, rank: int, steps: int, shares: int = 1) -> Iterator[int]:
    """Train, and yield after each backward pass that averages, before the optimizer steps."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for share in range(shares - 1):
            with ddp.no_sync():
                loss_of(ddp, rank, 100 * step + share).backward()
        loss_of(ddp, rank, 100 * step + 99).backward()
        yield step
        optimizer.step()


def rules_of(watcher: Watcher) -> list[str]:
    return list(dict.fromkeys(finding.rule for finding in watcher.findings))


def trains(
    process_group: Any,
    rank: int,
    *,
    hook: str = "",
    makes: str = "",
    setup: str = "",
    claims: str = "exact",
    steps: int = 8,
    every: int = 2,
    finds: tuple[str, ...] = (),
    text: str = "",
    shares: int = 1,
    late: bool = False,
    elements: int = 400,
    **options: Any,
) -> Case:
    """Train, and check the findings.

    ``makes`` names the state, ``finds`` are exactly the rules that fail, and ``text`` is a part of
    the first finding.
    """

    def check() -> None:
        ddp = model_with(process_group, "" if late else hook, makes, **options)
        if setup:
            names = {
                "model": lambda: ddp,
                "process_group": lambda: process_group,
                "rank": lambda: rank,
                "world_size": dist.get_world_size,
            }
            function = resolve(SubjectSpec(setup=setup)).setup
            assert function is not None
            made = call_with_names(function, {}, names)
            state_and_hook = (made.state, made.hook) if isinstance(made, Case) else made
            ddp.register_comm_hook(*state_and_hook)
        state_before = torch.get_rng_state()
        with watch(ddp, every, claims, elements=elements, timeout=20.0) as watcher:
            if late:
                register(ddp, process_group, hook, makes)
            # The global rank, so that each group is fed batches of its own.
            for _ in batches(ddp, dist.get_rank(), steps, shares):
                pass
        findings = [str(finding) for finding in watcher.findings]
        assert not watcher.ended, watcher.ended
        assert tuple(rules_of(watcher)) == finds, findings
        assert text in "\n".join(findings[:1]), findings
        cost = watcher.cost()
        assert (cost.steps, cost.samples) == (
            steps,
            len([step for step in range(steps) if step % every == 1 % every]),
        ), cost
        assert len(watcher.figures) == cost.samples
        assert torch.equal(state_before, torch.get_rng_state())
        assert not ddp._forward_hooks
        assert "join_hook" not in ddp.__dict__
        assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in ddp.parameters())

    return once(check)


def drifts(process_group: Any, rank: int) -> Case:
    """A loop that changes one element on rank 1 after step 2; replicas differ from then on."""

    def check() -> None:
        ddp = model_with(process_group, "hooks_ref:allreduce_hook")
        with watch(ddp, 1, timeout=20.0) as watcher:
            for step in batches(ddp, rank, 4):
                if step == 2 and rank == 1:
                    with torch.no_grad():
                        ddp.module[2].weight[3, 5].add_(1.0)
        assert rules_of(watcher) == ["3.2"], list(watcher.findings)
        first = watcher.findings[0]
        assert first.step == 3
        assert (
            "ranks 0 and 1 differ at step 3, parameter/2.weight, index (3, 5): "
            in first.failure.actual
        ), first

    return once(check)


def raises(process_group: Any, rank: int) -> Case:
    """All ranks raise in the same step, those with a right result too; then they train on."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hooks_ref.allreduce_hook(process_group, bucket)
        return (
            future.then(lambda done: done.value() * (1 + (rank == 1))) if len(seen) == 3 else future
        )

    seen: list[int] = []

    def check() -> None:
        ddp = model_with(process_group, "")
        ddp.register_comm_hook(None, hook)
        logged = logged_lines()
        with watch(ddp, 1, on_failure="raise", timeout=20.0) as watcher:
            steps = batches(ddp, rank, 6)
            raised = None
            for _ in range(6):
                try:
                    seen.append(next(steps))
                except Drift as drift:
                    raised = (len(seen), [finding.rule for finding in drift.findings])
                    break
            assert raised == (3, ["2.2", "3.1"]), raised
            assert (len(logged) > 0) == (rank == 0), logged
            seen.append(-1)
            seen.extend(batches(ddp, rank, 2))  # a new loop, on the same model
        assert len(seen) == 6
        assert len(watcher.findings) == 2
        assert not watcher.ended

    return once(check)


def logged_lines() -> list[str]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("conformance.watch").addHandler(Lines())
    return lines


def reports(process_group: Any, rank: int, *, finds: bool = False) -> Case:
    """The first rank logs a line at the beginning, one at the end, and is called with figures."""

    def check() -> None:
        logging.getLogger("conformance.watch").setLevel(logging.INFO)
        logged = logged_lines()
        hook = "tests.mutants.equivalence:never_divides" if finds else "hooks_ref:allreduce_hook"
        ddp = model_with(process_group, hook)
        seen: list[dict[str, Any]] = []

        def plot(figures: dict[str, Any]) -> None:
            seen.append(figures)
            if len(seen) == 2:
                raise OSError("the disk is full")

        with watch(ddp, 2, timeout=20.0, elements=50, on_figures=plot) as watcher:
            begin = list(logged)
            # Step 5 is sampled. Its gradients are not finite, and it is left out of training.
            for step in batches(ddp, rank, 5):
                assert [figures["step"] for figures in watcher.figures] == [1, 3][: (step + 1) // 2]
            (loss_of(ddp, rank, 5) * float("nan")).backward()
        watcher.close()
        last = watcher.figures[-1]
        assert last["margin"] is None
        assert str(last["reason"]).startswith("the gradient of 0.weight on rank 0"), last
        assert not watcher.ended
        if rank != 0:
            assert not seen
            assert not logged, logged
            return
        assert len(begin) == 1, begin
        numel = sum(parameter.numel() for parameter in ddp.parameters())
        assert begin[0] == (
            f"watching one in 2 steps on 2 ranks: {sum(watcher._layout.counts)} of {numel} "
            "elements, claims exact, rules 2.2, 3.1, 3.2, 8.1, 8.4, 9.2, 10.2"
        ), begin
        assert "on_figures failed at step 3" in logged, logged
        assert [figures["step"] for figures in seen] == [1, 3, 5], seen
        assert [figures["findings"] for figures in seen] == ([1, 1, 0] if finds else [0, 0, 0])
        assert seen[2] == {"step": 5, "findings": 0, "margin": None}
        margins = [figures["margin"] for figures in seen[:2]]
        where = margins.index(max(margins))
        found = "steps with findings by rule: 2.2: 2" if finds else "no finding"
        assert logged[-1] == (
            f"the watch is closed: 3 of 6 steps sampled; {found}; largest margin "
            f"{margins[where]:.3g} at step {1 + 2 * where}; steps without margin: 1"
        ), logged
        assert sum("closed" in line for line in logged) == 1

    return once(check)


def hangs(process_group: Any, rank: int) -> Case:
    """Rank 1 issues a barrier more between two samples; the first rank logs where both are."""

    def check() -> None:
        # The collectives of this group end with an error, and the test goes on.
        patience = datetime.timedelta(seconds=30)
        ddp = model_with(dist.new_group(timeout=patience), "")
        logged = logged_lines()
        ended = False
        with watch(ddp, 100, timeout=4.0) as watcher:
            try:
                for step in batches(ddp, rank, 6):
                    if step == 3 and rank == 1:
                        dist.barrier(ddp.process_group)
            except RuntimeError:
                ended = True
        assert ended
        assert not watcher.findings
        if rank == 0:
            [line] = logged
            first, rank_0, rank_1 = line.splitlines()
            assert first == "no rank of the model's group has moved for 4 s:"
            assert "rank 0: in _engine_run_backward, " in rank_0, line
            assert "watch_subjects.py" in rank_0, line
            assert "after 5 steps; no collective from Python" in rank_0, line
            assert "rank 1: in barrier, " in rank_1, line
            assert "after 4 steps; latest collective from Python: barrier, number 1" in rank_1, line
        else:
            assert not logged, logged

    return once(check)


def leaves(process_group: Any, rank: int, *, how: str) -> Case:
    """The last rank closes its watch, counts other steps, or stops to take part.

    All ranks train on, to the same parameters.
    """

    def check() -> None:
        last = dist.get_world_size(process_group) - 1
        ddp = model_with(process_group, "hooks_ref:allreduce_hook")
        reported: list[Any] = []
        watcher = watch(ddp, 2, on_failure=reported.append, timeout=20.0)
        logged = logged_lines()
        for step in batches(ddp, rank, 8):
            if step == 2 and rank == last:
                if how == "closed":
                    watcher.close()
                elif how == "counts":
                    ddp(torch.zeros(1, 9))  # a forward without a backward pass
                else:
                    watcher._attachment.detach()
            if step == 2:
                dist.barrier(process_group)
                if how == "silent":  # from here on there is somebody to wait for in vain
                    # Of three ranks two meet, and each has to come before the other gives up.
                    patience = datetime.timedelta(seconds=0.5 if last == 1 else 5.0)
                    dist.distributed_c10d._set_pg_timeout(patience, watcher._exchange._group)
        if rank == last and how != "counts":
            assert (watcher.ended, reported, logged) == (None, [], [])
        else:
            reasons = {
                "closed": f"rank {last} has closed its watch",
                "counts": f"rank {last} at step 4",
                "silent": f"rank {last} was last at step 1",
            }
            assert reasons[how] in str(watcher.ended), watcher.ended
            assert [finding.rule for finding in reported] == [""], reported
            assert len(logged) == 1, logged
            assert watcher._closed
        same_on_all_ranks(ddp, process_group)
        assert not ddp._forward_hooks

    return once(check)


def same_on_all_ranks(ddp: Any, process_group: Any) -> None:
    for parameter in ddp.module.parameters():
        root = parameter.detach().clone()
        # torch 2.4 and 2.5 have no group_src.
        dist.broadcast(root, dist.get_global_rank(process_group, 0), group=process_group)
        assert torch.equal(root, parameter)


def joins(
    process_group: Any,
    rank: int,
    *,
    hook: str = "",
    ours: bool = False,
    by_initial: bool = True,
    finds: tuple[str, ...] = (),
) -> Case:
    """Ranks run out of inputs one after another, twice, and then train without ``Join``.

    Ranks without inputs take part in the exchange of a step.
    """

    def check() -> None:
        context: Any = hooks_ref.Join if ours else TorchsJoin
        ddp = model_with(process_group, hook)
        world = dist.get_world_size(process_group)
        with watch(ddp, 1, timeout=20.0) as watcher, watch(ddp, 5, timeout=20.0) as other:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(2):
                    with context([ddp], divide_by_initial_world_size=by_initial):
                        for _ in batches(ddp, rank, 6 - 2 * rank):
                            pass
            for _ in batches(ddp, rank, 2):
                pass
        assert not watcher.ended, watcher.ended
        assert (watcher.cost().samples, other.cost().samples, other.ended) == (14, 3, None), (
            watcher.cost()
        )
        assert tuple(rules_of(watcher)) == finds, list(watcher.findings)
        judged = sum(figures["margin"] is not None for figures in watcher.figures)
        assert judged == (14 if by_initial or hook or world == 1 else 14 - 2 * (2 * (world - 1))), (
            judged
        )

    return once(check)


def raises_joined(process_group: Any, rank: int) -> Case:
    """A step is wrong after rank 1 has run out of inputs; rank 1 raises too, out of the context."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        steps.append(bucket.is_last())
        scale = 2 if sum(steps[:-1]) == 4 else 1
        return hooks_ref.allreduce_hook(process_group, bucket).then(
            lambda done: done.value() * scale
        )

    steps: list[bool] = []

    def check() -> None:
        ddp = model_with(process_group, "")
        ddp.register_comm_hook(None, hook)
        raised = None
        with watch(ddp, 1, on_failure="raise", timeout=20.0) as watcher:
            try:
                with hooks_ref.Join([ddp]):
                    for _ in batches(ddp, rank, 6 - 2 * rank):
                        pass
            except Drift as drift:
                raised = [(finding.rule, finding.step) for finding in drift.findings]
        assert raised == [("2.2", 4)], (raised, watcher.ended)

    return once(check)


def fails(process_group: Any, rank: int, *, place: str) -> Case:
    """The kit's own code raises on rank 1, during or after backward: the training goes on."""

    def check() -> None:
        from conformance.watching import sampling, watcher

        ddp = model_with(process_group, "hooks_ref:allreduce_hook")
        reported: list[Any] = []
        watching = watch(ddp, 1, on_failure=reported.append, timeout=20.0)
        logged = logged_lines()
        for step in batches(ddp, rank, 4):
            if step == 1 and rank == 1:

                def broken(*_: Any) -> Any:
                    raise ArithmeticError("broken on purpose")

                setattr(
                    *((sampling, "largest") if place == "backward" else (watcher, "unpack")), broken
                )
        assert watching.ended, watching.cost()
        assert [finding.rule for finding in reported] == [""], reported
        if rank == 1:
            assert "the kit failed: ArithmeticError: broken on purpose" in watching.ended, (
                watching.ended
            )
            assert logged[0] == "the kit failed at step 2", logged
        else:
            assert "rank 1 " in watching.ended or "broken on purpose" in watching.ended, (
                watching.ended
            )
        assert not ddp._forward_hooks
        same_on_all_ranks(ddp, process_group)

    return once(check)


class Branches(torch.nn.Module):
    """One of two branches is used, by the step and the rank; now and then by none."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(network() for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](x)


def leaves_out(
    process_group: Any,
    rank: int,
    *,
    hook: str = "",
    finds: tuple[str, ...] = (),
    keep: bool = False,
) -> Case:
    """find_unused_parameters; with ``keep`` gradients are zeroed instead of dropped."""

    def check() -> None:
        ddp = DistributedDataParallel(
            Branches(), process_group=process_group, bucket_cap_mb=CAP, find_unused_parameters=True
        )
        if hook:
            register(ddp, process_group, hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with watch(ddp, 1, timeout=20.0) as watcher:
            for step in range(6):
                loss = (
                    ddp(
                        torch.randn(
                            4, 9, generator=torch.Generator().manual_seed(10 * step + rank)
                        ),
                        (step + rank) % 2,
                    )
                    .square()
                    .mean()
                )
                optimizer.zero_grad(
                    set_to_none=not keep
                )  # between forward and backward, as some loops have it
                loss.backward()
                optimizer.step()
        assert not watcher.ended, watcher.ended
        assert tuple(rules_of(watcher)) == finds, list(watcher.findings)

    return once(check)


class Checkpointed(torch.nn.Module):
    """Two parts are checkpointed by the way that runs backward passes inside of a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            torch.nn.Linear(9, 9),
            torch.nn.Linear(9, 9),
            torch.nn.Linear(9, 5),
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        from torch.utils.checkpoint import checkpoint

        x = x.clone().requires_grad_()
        x = checkpoint(
            self.second, checkpoint(self.first, x, use_reentrant=True), use_reentrant=True
        )
        return {"out": self.last(x)}


def checkpoints(
    process_group: Any,
    rank: int,
    *,
    hook: str = "",
    static: bool = False,
    finds: tuple[str, ...] = (),
) -> Case:
    def check() -> None:
        ddp = DistributedDataParallel(
            Checkpointed(), process_group=process_group, bucket_cap_mb=CAP, static_graph=static
        )
        if hook:
            register(ddp, process_group, hook)
        with watch(ddp, 1, timeout=20.0) as watcher:
            for step in range(4):
                ddp.zero_grad()
                ddp(torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + rank)))[
                    "out"
                ].square().mean().backward()
        assert not watcher.ended, watcher.ended
        assert watcher.cost().samples == 4
        assert tuple(rules_of(watcher)) == finds, list(watcher.findings)

    return once(check)


def overflows(
    process_group: Any,
    rank: int,
    *,
    hook: str,
    claims: str = "exact",
    finds: tuple[str, ...] = (),
    at: tuple[int, ...] = (2,),
) -> Case:
    """Rank 1 has NaN in some steps, as under a GradScaler; the loop skips these steps."""

    def check() -> None:
        ddp = model_with(process_group, hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with watch(ddp, 1, claims, timeout=20.0, elements=50) as watcher:
            for step in range(5):
                optimizer.zero_grad()
                (
                    loss_of(ddp, rank, step) * (float("nan") if step in at and rank == 1 else 1.0)
                ).backward()
                if step not in at:
                    optimizer.step()
        assert not watcher.ended, watcher.ended
        assert tuple(rules_of(watcher)) == finds, list(watcher.findings)

    return once(check)


class Mixed(torch.nn.Module):
    """Dtypes, layouts and shapes of every kind; an embedding with sparse gradients beside them.

    The last of ``all`` is complex.
    """

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(2)
        shapes = [
            ((), "float32"),
            ((0,), "float32"),
            ((7, 3), "float64"),
            ((5,), "bfloat16"),
            ((2, 3, 4, 5), "float32"),
        ]
        values = [
            torch.randn(shape, generator=made, dtype=torch.float64).to(getattr(torch, dtype))
            for shape, dtype in shapes
        ]
        values[-1] = values[-1].contiguous(memory_format=torch.channels_last)
        values.append(torch.randn(6, 5, generator=made).t().contiguous().t())
        if COMPLEX_OVER_GLOO:
            values.append(torch.randn(3, 4, generator=made, dtype=torch.complex64))
        self.all = torch.nn.ParameterList(values)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.table = torch.nn.Embedding(4, 2, sparse=True)

    def forward(self, scale: float, row: int) -> torch.Tensor:
        parts = [(p.abs().double() * scale).square().sum() for p in self.all]
        return torch.stack([*parts, self.table(torch.tensor([row])).double().sum()]).sum()


def mixes(process_group: Any, rank: int, *, drift: str = "") -> Case:
    def check() -> None:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Mixed(), process_group=process_group, bucket_cap_mb=CAP)
        with watch(ddp, 1, timeout=20.0) as watcher:
            for step in range(3):
                ddp.zero_grad()
                ddp(1.0 + rank / 3 + step, rank).backward()
                if drift and step == 1 and rank == 1:
                    with torch.no_grad():
                        {
                            "complex": ddp.module.all[-1],
                            "strided": ddp.module.all[4][:, 1, 2],
                            "frozen": ddp.module.frozen,
                        }[drift][1].add_(1)
        assert not watcher.ended, watcher.ended
        places = {
            "complex": "parameter/all.6, index (1, 0, 0)",
            "strided": "parameter/all.4, index (1, 1, 2, 0)",
            "frozen": "parameter/frozen, index (1,)",
        }
        assert rules_of(watcher) == (["3.2"] if drift else []), list(watcher.findings)
        assert not drift or places[drift] in watcher.findings[0].failure.actual, watcher.findings[0]

    return once(check)


def copies(process_group: Any, rank: int) -> Case:
    """A watched model can be copied, saved and loaded; the copies are not watched."""

    def check() -> None:
        ddp = DistributedDataParallel(network())
        ddp.register_comm_hook(None, hooks_ref.allreduce_hook)
        name = ddp._get_ddp_logging_data()["comm_hook"]
        with watch(ddp, 1, timeout=20.0) as watcher:
            loss_of(ddp, rank, 0).backward()
            saved = io.BytesIO()
            torch.save(ddp, saved)
            saved.seek(0)
            for other in (copy.deepcopy(ddp), torch.load(saved, weights_only=False)):
                loss_of(other, rank, 1).backward()
                with TorchsJoin([other]):
                    loss_of(other, rank, 2).backward()
            loss_of(ddp, rank, 3).backward()
            assert (watcher.cost().steps, list(watcher.findings)) == (2, [])
            assert ddp._get_ddp_logging_data()["comm_hook"] == name

    return once(check)


def refuses(process_group: Any, rank: int) -> Case:
    """An error of one line if a model cannot be watched, on all ranks if their arguments differ."""

    def error_of(call: Callable[[], Any]) -> str:
        try:
            call()
        except (ValueError, UsageError) as error:
            return str(error)
        raise AssertionError("no error")

    def check() -> None:
        ddp = model_with(process_group, "")
        assert "Linear is no DistributedDataParallel" in error_of(
            lambda: watch(torch.nn.Linear(1, 1))
        )  # type: ignore[arg-type]
        assert "numbers of 1 or more" in error_of(lambda: watch(ddp, 0))
        assert "on_failure='mail' is none of" in error_of(lambda: watch(ddp, on_failure="mail"))
        assert "on_figures='plot' is no function" in error_of(
            lambda: watch(ddp, on_figures="plot")  # type: ignore[arg-type]
        )
        assert "'exactly' is not a claim" in error_of(lambda: watch(ddp, claims="exactly"))
        assert "under poststep" in error_of(lambda: watch(ddp, claims="poststep(call=flush)"))
        assert "different arguments" in error_of(lambda: watch(ddp, 1 + rank, timeout=20.0))
        assert not ddp._forward_hooks
        two = [watch(ddp, every, timeout=20.0) for every in (1, 2)]  # side by side
        for _ in batches(ddp, rank, 4):
            pass
        assert [watcher.cost().samples for watcher in two] == [4, 2]
        assert not any(watcher.findings or watcher.ended for watcher in two), [
            watcher.ended for watcher in two
        ]
        for watcher in two:
            watcher.close()
            watcher.close()

    return once(check)


def soaks(
    process_group: Any, rank: int, *, steps: int, hook: str = "", claims: str = "exact"
) -> Case:
    """Hundreds of sampled steps with no finding."""

    def check() -> None:
        ddp = model_with(process_group, hook)
        with watch(ddp, 1, claims, timeout=20.0) as watcher:
            for _ in batches(ddp, rank, steps):
                pass
        assert not watcher.ended, watcher.ended
        assert not watcher.findings, list(watcher.findings)
        assert watcher.cost().samples == steps

    return once(check)


def torchs_power_sgd(process_group: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    return powerSGD_hook.PowerSGDState(
        process_group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )


def local_sgd(process_group: Any, rank: int) -> Any:
    """Each rank for itself, after two steps."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    return hooks_ref.PostLocalSGDState(process_group, alone, start_localSGD_iter=2)
