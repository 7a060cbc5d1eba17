"""Passive mode: ``watch()`` checks some steps of a training run by rules of the book.

    from conformance import watch

    watcher = watch(ddp_model, every=100, claims="rounded(float16)")    # on all ranks of the model
    ...                                                                 # train as before
    watcher.close()

Nothing stands between DDP and its hook. The gradients that a rank feeds are read as backward
completes them, before DDP has them; the results are read when backward is over and DDP has written
them back. So the hook may be registered earlier or later, or there may be none: DDP's own allreduce
and the builtin hooks that run in C++ are watched as well. The hook, its state, its futures and its
errors are the same as without a watch.

A step is a backward pass that averages gradients; micro-batches under ``no_sync`` do not count.
Each rank counts steps at the end of the forward that precedes the backward pass; under ``Join`` a
rank that has run out of inputs counts them too. Messages, findings and figures number the steps
from 0: step 0 is the first one after the call of ``watch``. Step 1 is sampled, the first step with
DDP's final buckets, and every ``every``-th step after it. At the step before a sampled one a few
elements of the gradients are copied, so that a result that comes one step late can be recognised.
At all other steps a counter is incremented, and another one at each collective that Python code
starts. On a sampled step

    forward ends        hooks are put on the parameters; collectives that Python code starts are
                        recorded from here on
    backward            as each gradient is complete, a few of its elements are copied, and its
                        largest absolute value is read
    backward is over    the same of the results; a checksum of each parameter; all ranks exchange
                        all of this, and rules are checked

The last part runs in a final callback of the backward pass, queued behind DDP's own. Every rank has
the samples of all ranks and judges them by itself. All ranks come to the same verdict without
further communication, and if one raises, all of them do.

The exchange has a process group of its own, with Gloo and a timeout. If a rank does not come, or is
at another step, the watch ends and logs the reason. The training does not end: the ranks that have
waited go on.

If a run hangs between two sampled steps, no rank comes to an exchange. ``stalls.py`` describes the
warning that is logged then, and its limits.

A watch logs one line of level INFO when it begins and one when it is closed, on the group's first
rank. Python shows them after ``logging.basicConfig(level=logging.INFO)``.

``benchmarks/watch.py`` measures the costs, and ``watcher.cost()`` returns those of one run. A
sampled step reads every gradient twice and every parameter twice. Of all ranks together it holds at
most 2**20 elements (``sampling.MAX_GATHERED``; at least one of each parameter and rank), each three
times, and as many bytes again while they are judged in float64, and 56 bytes for each parameter and
rank.

The subject is not isolated here, and nothing is certified: a hook that sets out to mislead can do
so, a step that is not sampled is not seen, and of a sampled step not every element is. Not watched
are sparse gradients, buffers, gradients under a claim of poststep, DDP's mixed_precision, and
compiled autograd.
"""

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.judging.verdict import Failure
from conformance.subjects.claims import LOCAL, Claims, parse_claims
from conformance.torch_versions.private import delays_reduction, reduces_by_compiled_autograd
from conformance.watching.attach import Attachment
from conformance.watching.collectives import Collective, kit_groups
from conformance.watching.exchange import Exchange, ExchangeError
from conformance.watching.judge import (
    RULES,
    Finding,
    SampledRun,
    StepJudgement,
    judge_collectives,
    judge_models,
    judge_values,
    rules_under,
    with_group,
)
from conformance.watching.replicas import checksums, elements, first_difference
from conformance.watching.sampling import Gathered, Layout, pack, unpack
from conformance.watching.stalls import StallReporter
from conformance.watching.step import SampledStep
from conformance.watching.summary import Cost, Summary

log = logging.getLogger("conformance.watch")
LOG = "log"
RAISE = "raise"
KEPT = 1000  # findings, and figures of sampled steps, the latest ones
Figures = dict[str, float | None]


class Drift(RuntimeError):
    """A step of a training run breaks a rule; raised on all ranks when backward is over.

    Attributes:
        findings: the findings of this step.
    """

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


def watch(
    ddp_model: DistributedDataParallel,
    every: int = 100,
    claims: str = "exact",
    on_failure: str | Callable[[Finding], object] = LOG,
    *,
    seed: int = 0,
    elements: int = 16384,
    timeout: float = 60.0,
    repeat: bool = False,
    on_figures: Callable[[Figures], object] | None = None,
) -> "Watcher":
    """Watch the gradients and replicas of a model that trains.

    Call it on all ranks of the model's group, at the same place.

    Every sampled step is checked for: the mean within the forward error bound of a sum (2.2), the
    same bits of results and of parameters on all ranks (3.1, 3.2), finite results of finite
    gradients and the reverse (8.4, 8.1), parameters that backward leaves alone (9.2), and the same
    collectives in the same order (10.2). Under a lossy claim 2.2 is left out, and the distance of
    the result from the mean is among ``watcher.figures``; under ``local`` 3.1 and 3.2 are left out;
    under ``fused`` 9.2 is left out, and so are gradients that the hook has freed.

    Args:
        every: one in so many steps is sampled.
        claims: the hook's claims, as for ``--claims``.
        on_failure: ``log`` (on the group's first rank, logger ``conformance.watch``), ``raise``
            (:class:`Drift`, on all ranks, after it is logged), or a function that is called with
            each finding, on all ranks.
        seed: the seed of the sampled elements; the same on all ranks.
        elements: how many elements of all gradients together are compared with the mean.
        timeout: seconds until a rank that waits for others at a sampled step goes on without them,
            and the watch ends; and seconds until ranks that all stand still are logged.
        repeat: log a rule each time that it fails, instead of once.
        on_figures: called on the group's first rank after each sampled step with a dict of numbers,
            for a plotting tool: ``step``, ``findings`` (how many rules the step breaks), and
            ``margin`` or ``off`` (see :class:`conformance.watching.judge.StepJudgement`), which is
            None if there is no such number. An error that it raises is logged and ends neither the
            training nor the watch.

    Raises:
        UsageError: the claims cannot be read.
        ValueError: the model, its options or the claims cannot be watched, or ranks passed
            different arguments.
        RuntimeError: not all ranks have called it within ``timeout``.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        name = type(ddp_model).__name__
        raise ValueError(
            f"watch: {name} is no DistributedDataParallel: wrap the model in DDP first"
        )
    if every < 1 or elements < 1 or timeout <= 0:
        raise ValueError(
            "watch: every and elements are numbers of 1 or more, and timeout is above 0"
        )
    if not (on_failure in (LOG, RAISE) or callable(on_failure)):
        raise ValueError(
            f"watch: on_failure={on_failure!r} is none of 'log', 'raise' and a function"
        )
    if not (on_figures is None or callable(on_figures)):
        raise ValueError(f"watch: on_figures={on_figures!r} is no function")
    parsed = parse_claims(claims)
    _require_watchable(ddp_model, parsed)
    return Watcher(
        ddp_model,
        every,
        parsed,
        on_failure,
        seed=seed,
        elements=elements,
        timeout=timeout,
        repeat=repeat,
        on_figures=on_figures,
    )


def _require_watchable(ddp: DistributedDataParallel, claims: Claims) -> None:
    """Raise ValueError if a model with such claims cannot be watched."""
    if claims.poststep:
        raise ValueError(
            "watch: under poststep gradients are right after a call of the trainer's, "
            "which the watch cannot see"
        )
    group = dist.get_process_group_ranks(ddp.process_group)
    if claims.world_only and group != list(range(dist.get_world_size())):
        raise ValueError("watch: under world_only the model's group must be WORLD")
    if getattr(ddp, "mixed_precision", None) is not None:
        raise ValueError(
            "watch: DDP's mixed_precision is not watched: its gradients are not the parameters' own"
        )
    if reduces_by_compiled_autograd(ddp):
        raise ValueError("watch: compiled autograd is not watched: it reduces gradients by itself")
    if delays_reduction(ddp):
        raise ValueError("watch: delay_all_reduce_named_params is not watched")


class Watcher:
    """A watch over one model; a context manager. Made by :func:`watch`.

    Attributes:
        findings: the latest :data:`KEPT` findings.
        figures: ``step`` of each sampled step, counted from 0, ``findings``, how many rules it
            breaks, and its ``margin`` or ``off`` (see
            :class:`conformance.watching.judge.StepJudgement`). If that is None, ``reason`` has the
            reason. The latest :data:`KEPT` steps.
        ended: why the watch ended before it was closed; None if it did not.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        every: int,
        claims: Claims,
        on_failure: str | Callable[[Finding], object],
        *,
        seed: int,
        elements: int,
        timeout: float,
        repeat: bool,
        on_figures: Callable[[Figures], object] | None,
    ) -> None:
        self.findings: deque[Finding] = deque(maxlen=KEPT)
        self.figures: deque[dict[str, float | str | None]] = deque(maxlen=KEPT)
        self.ended: str | None = None
        self._every = every
        self._claims = claims
        self._on_failure = on_failure
        self._on_figures = on_figures
        self._repeat = repeat
        self._cost = Cost()
        self._summary = Summary()
        self._training_thread = threading.get_ident()
        self._logged_rules: set[str] = set()
        self._is_due = False
        self._closed = False
        # The step that is under way, if it is observed.
        self._observed: SampledStep | None = None
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        self._parameters = {
            name: parameter
            for name, parameter in ddp.module.named_parameters()
            if name not in ignored
        }
        # The settings that must be the same on all ranks.
        settings = [every, str(claims), on_failure == RAISE, seed, elements]
        self._exchange = self._make_exchange(ddp, timeout, settings)
        trained = {
            name: parameter
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        }
        self._layout = Layout(trained, elements, self._exchange.size, seed)
        self._stalls = StallReporter(
            self._exchange, timeout, lambda: self._cost.steps, lambda: self._training_thread
        )
        self._attachment = Attachment(ddp, self)
        self._stalls.start()
        if self._exchange.rank == 0:
            log.info("%s", self._describe_start())

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cost(self) -> Cost:
        """Return the costs of the watch so far, on this rank."""
        return self._cost

    def close(self) -> None:
        """End the watch and remove its hooks from the model. Log a summary on the first rank.

        Other ranks may close their watches earlier or later.
        """
        if not self._closed:
            self._end(None)
            rank = self._exchange.ranks[self._exchange.rank]
            self._exchange.leave(f"rank {rank} has closed its watch")
        if self._exchange.rank == 0 and not self._summary.logged:
            self._summary.logged = True
            log.info("%s", self._summary.describe(self._cost, self.ended))

    def _end(self, reason: str | None) -> None:
        self._closed = True
        self.ended = reason
        self._stalls.stop()
        self._disarm()
        self._attachment.detach()

    def _describe_start(self) -> str:
        """Return the line that is logged when the watch begins."""
        numel = sum(parameter.numel() for parameter in self._layout.parameters)
        rules = rules_under(self._claims)
        left_out = [number for number in RULES if number not in rules]
        how_often = "every step" if self._every == 1 else f"one in {self._every} steps"
        text = (
            f"watching {how_often} on {self._exchange.size} ranks: "
            f"{sum(self._layout.counts)} of {numel} elements, claims {self._claims}, "
            f"rules {', '.join(rules)}"
        )
        if left_out:
            text += f"; left out under these claims: {', '.join(left_out)}"
        return text

    def _make_exchange(
        self, ddp: DistributedDataParallel, timeout: float, settings: list[Any]
    ) -> Exchange:
        """Meet the other ranks for the first time.

        Raises:
            RuntimeError: not all ranks came in time.
            ValueError: ranks have different settings or parameters; raised on all of them.
        """
        shapes = [
            (name, *parameter.shape, str(parameter.dtype), parameter.requires_grad)
            for name, parameter in self._parameters.items()
        ]
        digest = _digest([*settings, *shapes], size=8)
        try:
            exchange = Exchange(ddp.process_group, timeout)
            digests = exchange.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        except (ExchangeError, RuntimeError) as error:
            first_line = str(error).splitlines()[0]
            raise RuntimeError(
                "watch: not all ranks of the model's group have called it "
                f"within {timeout:g} s: {first_line}"
            ) from error
        if bool((digests != digests[:1]).any()):
            raise ValueError(
                "watch: ranks passed different arguments, or have different parameters: "
                "call it alike on all of them"
            )
        kit_groups.add(exchange.name)
        return exchange

    # --- Which steps are sampled ---

    def after_forward(self, ddp: DistributedDataParallel, output: Any) -> None:
        """Count the step to which this forward belongs, and observe it if it is due."""
        if not (ddp.require_backward_grad_sync and torch.is_grad_enabled()):
            # The backward pass that follows is not a step. The step stays due.
            if self._observed is not None:
                self._observed.disarm()
            return
        self._count()
        next_is_sampled = self._is_sampled(self._cost.steps)
        before = self._disarm()
        if self._is_due or next_is_sampled:
            with self._guard(self._cost.steps - 1):
                self._observed = self._new_step(ddp, next_is_sampled, before)
                self._observed.arm(output)

    def after_shadowed_step(self, ddp: DistributedDataParallel) -> None:
        """Count a step in which this rank has run out of inputs; take part if it is sampled."""
        # DDP has just set this attribute: it is true if gradients were averaged.
        if not ddp.require_forward_param_sync:
            return
        self._count()
        if not self._is_due:
            return
        step = None
        with self._guard(self._cost.steps - 1):
            step = self._new_step(ddp, False, None)
        if step is not None:
            self._finish(step, joined=True)

    def _count(self) -> None:
        self._training_thread = threading.get_ident()
        step = self._cost.steps
        self._cost.steps += 1
        self._is_due = self._is_due or self._is_sampled(step)

    def _is_sampled(self, step: int) -> bool:
        return step % self._every == 1 % self._every

    def _disarm(self) -> SampledStep | None:
        """Remove the latest observed step from the model and return it."""
        step = self._observed
        self._observed = None
        if step is not None:
            step.disarm()
        return step

    # --- A sampled step ---

    def _new_step(
        self, ddp: DistributedDataParallel, next_is_sampled: bool, before: SampledStep | None
    ) -> SampledStep:
        """Return the observation of the latest step.

        Args:
            before: the step that was observed last, if there was one.
        """
        number = self._cost.steps - 1
        step = SampledStep(
            ddp, self._layout, number, self._is_due, next_is_sampled, self._finish, self._guard
        )
        # Without a step in between, as there is under ``Join``.
        if before is not None and before.next_sample is not None and before.step == number - 1:
            step.sample.fed_before = before.next_sample.fed_before
            self._cost.seconds += before.seconds
        return step

    def _finish(self, step: SampledStep, joined: bool = False) -> None:
        """Exchange the samples of a step, judge them, and report the findings.

        Raises:
            Drift: a rule is broken, and ``on_failure`` is ``raise``.
        """
        if self._closed:
            return
        began = time.perf_counter()
        findings: list[Finding] = []
        step.disarm()
        # It is still needed if it holds the beginning of the next step's sample.
        self._observed = step if step.next_sample is not None else None
        self._is_due = False
        with self._guard(step.step):
            findings = self._judge(step, joined)
        self._cost.samples += 1
        self._cost.seconds += step.seconds + time.perf_counter() - began
        self._report(findings)

    @contextlib.contextmanager
    def _guard(self, step: int) -> Iterator[None]:
        """End the watch, and not the training, if anything goes wrong in the watch itself."""
        try:
            yield
        except ExchangeError as error:
            # With a cause it is an error of the backend, and the store names the absent ranks.
            absent = self._exchange.describe_absent(step) if error.__cause__ else None
            self._give_up(step, absent or str(error))
        except Exception as error:
            log.exception("the kit failed at step %d", step)
            self._give_up(step, f"the kit failed: {type(error).__name__}: {error}")

    def _judge(self, step: SampledStep, joined: bool) -> list[Finding]:
        """Exchange the samples of a step and judge them. Raises: ExchangeError."""
        self._exchange.arrive(step.step)
        if not joined:
            step.sample.take_results(self._layout)
        collectives, others = step.collectives()
        gathered = self._gather(step, joined, collectives, others)
        joined_ranks = {rank for rank, flag in enumerate(gathered.numbers[:, 1].tolist()) if flag}
        run = SampledRun(
            self._layout,
            step.sample.index,
            gathered,
            step.step,
            joined=joined_ranks,
            find_unused=step.find_unused,
            fused=bool(self._claims.fused),
        )
        judgement = StepJudgement()
        # Without the ranks that have joined the divisor is another one.
        if step.divides_by_all or not joined_ranks:
            judge_values(run, self._claims, judgement)
        else:
            reason = "a rank has run out of inputs, and DDP divides by the number of the others"
            judgement.set_figure(self._claims, None, reason)
        self._judge_models(run, judgement)
        self._judge_collectives(run, judgement, collectives)
        self._keep_figures(step.step, judgement)
        return [with_group(finding, self._exchange.ranks) for finding in judgement.findings]

    def _gather(
        self, step: SampledStep, joined: bool, collectives: list[Collective], others: int
    ) -> Gathered:
        """Exchange the samples of a step. Raises: ExchangeError."""
        # 7 bytes fit into a signed integer of 8.
        digest = int.from_bytes(_digest(collectives, size=7), "little")
        numbers = [step.step, int(joined), others, digest]
        sums = checksums([parameter.data for parameter in self._parameters.values()])
        rows = self._exchange.gather(pack(self._layout, step.sample, numbers, sums))
        self._cost.gathered += rows.numel()
        gathered = unpack(self._layout, rows, len(numbers), len(sums))
        steps = gathered.numbers[:, 0].tolist()
        if len(set(steps)) > 1:
            pairs = zip(self._exchange.ranks, steps, strict=True)
            places = ", ".join(f"rank {rank} at step {number}" for rank, number in pairs)
            raise ExchangeError(f"ranks are not at the same step: {places}")
        return gathered

    def _judge_models(self, run: SampledRun, judgement: StepJudgement) -> None:
        """If checksums of a parameter differ, find an element that differs and judge it."""
        sums = run.gathered.checksums[run.training]
        different = (sums != sums[:1]).any(0).nonzero()
        if self._claims.lossy == LOCAL or not len(different):
            return
        name, parameter = list(self._parameters.items())[int(different[0])]
        found = first_difference(self._exchange, parameter, run.training)
        if found is not None:
            begin, rows = found
            _, strides = elements(parameter)
            run.record_parameter(name, parameter, strides, begin, rows)
            judge_models(run, self._claims, judgement)

    def _judge_collectives(
        self, run: SampledRun, judgement: StepJudgement, collectives: list[Collective]
    ) -> None:
        """If digests of the collectives differ between ranks, compare the collectives."""
        others = run.gathered.numbers[:, 2]
        digests = run.gathered.numbers[:, 3]
        if run.joined or bool((digests == digests[0]).all()):
            return
        if bool((others > 0).any()):
            # Threads that do not train, such as those of callbacks, start collectives too. Their
            # order is not known.
            return
        texts = self._exchange.gather_text(json.dumps(collectives))
        gathered = [self._within_group(json.loads(text)) for text in texts]
        judge_collectives(run, self._claims, judgement, gathered)

    def _within_group(self, collectives: list[Any]) -> list[Collective]:
        """Keep the collectives of groups inside the model's group, with ranks numbered in it."""
        numbers = {rank: number for number, rank in enumerate(self._exchange.ranks)}
        return [
            Collective(description, [numbers[rank] for rank in ranks], group_name)
            for description, ranks, group_name in collectives
            if set(ranks) <= numbers.keys()
        ]

    # --- Reports ---

    def _keep_figures(self, step: int, judgement: StepJudgement) -> None:
        numbers: Figures = {
            "step": step,
            "findings": len(judgement.findings),
            **judgement.figures,
        }
        reason = {"reason": judgement.reason} if judgement.reason else {}
        self.figures.append({**numbers, **reason})
        self._summary.add(step, judgement)
        if self._on_figures is not None and self._exchange.rank == 0:
            try:
                self._on_figures(numbers)
            except Exception:
                log.exception("on_figures failed at step %d", step)

    def _give_up(self, step: int, reason: str) -> None:
        """End the watch, not the training; report the reason, also to ranks that come later."""
        self._exchange.leave(f"the watch ended at step {step}: {reason}")
        self._end(reason)
        finding = Finding(
            "",
            "the watch ends here, the training goes on",
            step,
            Failure("all ranks of the model's group at the check of this step", reason),
            "ranks that call the model's forward more often than others, "
            "that closed their watch earlier, or that are gone",
        )
        self.findings.append(finding)
        log.error("%s", finding)
        if callable(self._on_failure):
            self._on_failure(finding)

    def _report(self, findings: list[Finding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            is_new = self._repeat or finding.rule not in self._logged_rules
            if is_new and self._exchange.rank == 0:
                log.error("%s", finding)
            self._logged_rules.add(finding.rule)
            if callable(self._on_failure):
                self._on_failure(finding)
        if findings and self._on_failure == RAISE:
            raise Drift(findings)


def _digest(data: list[Any], size: int) -> bytes:
    """Return a digest of data that JSON can hold."""
    return hashlib.blake2b(json.dumps(data).encode(), digest_size=size).digest()
