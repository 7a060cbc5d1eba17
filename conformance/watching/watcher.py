"""Passive mode: a training run that looks at itself every so many steps. The rules are those of the book, on live records.

    from conformance import watch

    watcher = watch(ddp_model, every=100, claims="rounded(float16)")    # on all ranks of the model, at the same place
    ...                                                                 # train as before
    watcher.close()

Nothing stands between DDP and its hook. What each rank feeds is read from the parameters' gradients as backward completes them,
before DDP has them; what comes of it, when backward is over and DDP has written it back. So it does not matter when the hook is
registered, or whether there is one at all: DDP's own allreduce, and the builtin ones that C++ runs, are watched as well, and the
hook, its state, its futures and its errors are what they are without us.

A step is a backward pass that averages gradients: micro-batches under ``no_sync`` are none. It is counted at the end of the
forward that precedes it, on every rank for itself, and under ``Join`` on those that have run out of inputs too. Step 1 is
sampled, the first whose buckets are DDP's final ones, and every ``every``-th after it. On the one before, a few elements of the
gradients are copied, so that a result that comes a step late can be told. On all others a counter is counted up, and no more.
On a sampled step

    forward ends          hooks go on the parameters; collectives that Python starts are heard from here on
    backward              a few elements of each gradient are copied as it is complete, and its largest value is read
    backward is over      the same of the results; a number for each parameter; all of it goes to all ranks; rules are asked

all in a final callback of the backward pass, queued behind DDP's own. Every rank has the records of all ranks and judges them
by itself, so that all come to the same verdict without another word, and one that raises does so on all of them.

The exchange has a process group of its own, of Gloo, with a timeout. A rank that does not come, or that comes to another step,
ends the watch, with a line that says so, and not the training: the ranks that have waited go on.

What it costs is said by ``benchmarks/watch.py``, and of a run by ``watcher.cost()``. A sampled step reads every gradient twice
and every parameter twice, and keeps of all ranks together at most 2**20 elements (``sampling.MOST_GATHERED``; one of each
parameter and rank at least), each three times, with as many bytes again while they are judged in float64, and 56 bytes for each
parameter and rank.

No subject is isolated here, and nothing is certified: a hook that sets out to mislead can, a step that is not sampled is not
seen, and of a sampled one not every element. Not watched: sparse gradients, buffers, what a claim of poststep, DDP's
mixed_precision or compiled autograd make of gradients.
"""

import contextlib
import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from conformance.judging.verdict import Failure
from conformance.subjects.claims import LOCAL, Claims, parse_claims
from conformance.watching import collectives as issued
from conformance.watching.attach import Attached
from conformance.watching.exchange import Exchange, NotMet
from conformance.watching.judge import Finding, Judged, LiveRun, judge_collectives, judge_models, judge_values, renamed
from conformance.watching.replicas import differing, elements, folds
from conformance.watching.sampling import Layout, pack, unpack
from conformance.watching.step import Heard, Look

log = logging.getLogger("conformance.watch")
LOG, RAISE = "log", "raise"
KEPT = 1000  # findings, and figures of sampled steps, the latest ones


class Drift(RuntimeError):
    """A step of a training run does not keep a rule; raised on all ranks, when backward is over.

    Attributes:
        findings: what was found in this step.
    """

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


@dataclass
class Cost:
    """What a watch has cost so far, on this rank.

    Attributes:
        steps, samples: counted, and looked at.
        seconds: spent on the sampled ones, waiting for other ranks included.
        gathered: bytes that came from all ranks.
    """

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    gathered: int = 0


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
) -> "Watcher":
    """Watch the gradients and replicas of a model that trains. Call it on all ranks of the model's group, at the same place.

    Asked of every sampled step: the mean within the forward error bound of a sum (2.2), the same bits of results and of
    parameters on all ranks (3.1, 3.2), values that are finite where gradients are, and not where they are not (8.4, 8.1),
    parameters that backward leaves alone (9.2), the same collectives in the same order (10.2). Under a lossy claim
    all but 2.2, with how far the result is from the mean among ``watcher.figures``; under ``local`` not 3.1 and 3.2; under ``fused``
    not 9.2, and of gradients that the hook has freed nothing.

    Args:
        every: a step is sampled, and as many less one are not.
        claims: of the hook, as ``--claims``.
        on_failure: ``log`` (on the group's first rank, logger ``conformance.watch``), ``raise`` (:class:`Drift`, on all
            ranks, after it is logged), or a function that is called with each finding, on all ranks.
        seed: of what is sampled; the same on all ranks.
        elements: how many elements of all gradients are compared with the mean.
        timeout: seconds until a rank that waits for others at a sampled step goes on without them, and the watch ends.
        repeat: log a rule that fails each time, instead of once.

    Raises:
        UsageError: the claims cannot be read.
        ValueError: the model, its options or the claims are none that can be watched, or ranks were given other arguments.
        RuntimeError: not all ranks have called it within ``timeout``.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise ValueError(f"watch: {type(ddp_model).__name__} is no DistributedDataParallel: wrap the model in DDP first")
    if every < 1 or elements < 1 or timeout <= 0:
        raise ValueError("watch: every and elements are numbers of 1 or more, and timeout is above 0")
    if not (on_failure in (LOG, RAISE) or callable(on_failure)):
        raise ValueError(f"watch: on_failure={on_failure!r} is none of 'log', 'raise' and a function")
    parsed = parse_claims(claims)
    if why := _unwatchable(ddp_model, parsed):
        raise ValueError(f"watch: {why}")
    return Watcher(ddp_model, every, parsed, on_failure, seed=seed, elements=elements, timeout=timeout, repeat=repeat)


def _unwatchable(ddp: DistributedDataParallel, claims: Claims) -> str:
    if claims.poststep:
        return "under poststep gradients are right after a call that the trainer makes, which cannot be seen"
    if claims.world_only and dist.get_process_group_ranks(ddp.process_group) != list(range(dist.get_world_size())):
        return "world_only can be watched where the model's group is WORLD"
    if getattr(ddp, "mixed_precision", None) is not None:
        return "DDP's mixed_precision is not watched: its gradients are not the parameters' own"
    if getattr(ddp, "_use_python_reducer", False):
        return "compiled autograd reduces gradients by itself, and is not watched"
    if getattr(ddp, "_delay_all_reduce_all_params", False) or getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params is not watched"
    return ""


class Watcher:
    """A watch over one model; a context manager. Made by :func:`watch`.

    Attributes:
        findings: what was found, the latest :data:`KEPT`.
        figures: of each sampled step, ``margin`` or ``off``, see :class:`conformance.watching.judge.Judged`.
        ended: why the watch ended before it was closed, or ''.
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
    ) -> None:
        self.findings: deque[Finding] = deque(maxlen=KEPT)
        self.figures: deque[dict[str, float]] = deque(maxlen=KEPT)
        self.ended = ""
        self._every, self._claims = every, claims
        self._on_failure, self._repeat = on_failure, repeat
        self._cost, self._told = Cost(), set[str]()
        self._due, self._closed = False, False
        self._look: Look | None = None
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        self._models = {name: p for name, p in ddp.module.named_parameters() if name not in ignored}
        self._exchange = self._met(ddp, timeout, [every, str(claims), on_failure == RAISE, seed, elements])
        trained = {name: p for name, p in self._models.items() if p.requires_grad}
        self._layout = Layout(trained, elements, self._exchange.size, seed)
        self._attached = Attached(ddp, self)

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cost(self) -> Cost:
        """Return what the watch has cost so far, on this rank."""
        return self._cost

    def close(self) -> None:
        """End the watch and take everything of it off the model. Other ranks may close theirs earlier or later."""
        if not self._closed:
            self._end("")
            self._exchange.leave(f"rank {self._exchange.ranks[self._exchange.rank]} has closed its watch")

    def _end(self, why: str) -> None:
        self._closed, self.ended = True, why
        self._disarm()
        self._attached.detach()

    def _met(self, ddp: DistributedDataParallel, timeout: float, settings: list[Any]) -> Exchange:
        """Meet the other ranks for the first time; raise on all of them where they were not given the same."""
        settings += [(name, *p.shape, str(p.dtype), p.requires_grad) for name, p in self._models.items()]
        own = hashlib.blake2b(json.dumps(settings).encode(), digest_size=8).digest()
        try:
            exchange = Exchange(ddp.process_group, timeout)
            said = exchange.gather(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        except (NotMet, RuntimeError) as error:
            why = f"watch: not all ranks of the model's group have called it within {timeout:g} s: {str(error).splitlines()[0]}"
            raise RuntimeError(why) from error
        if bool((said != said[:1]).any()):
            raise ValueError("watch: ranks were given other arguments, or have other parameters: call it alike on all of them")
        issued.own_groups.add(exchange.name)
        return exchange

    # --- which steps ---

    def forward_ended(self, ddp: DistributedDataParallel, output: Any) -> None:
        """Count the step whose forward this was, and get ready to look at it if its turn has come."""
        if not (ddp.require_backward_grad_sync and torch.is_grad_enabled()):
            if self._look is not None:
                self._look.disarm()  # the backward that comes is another; the step's turn is kept
            return
        self._count()
        ahead = self._has_turn(self._cost.steps)
        before = self._disarm()
        if self._due or ahead:
            with self._harmless(self._cost.steps - 1):
                self._look = self._new_look(ddp, ahead, before)
                self._look.arm(output)

    def shadowed(self, ddp: DistributedDataParallel) -> None:
        """Count a step that others train in, while this rank has run out of inputs; take part if its turn has come."""
        if ddp.require_forward_param_sync:  # as DDP has set it just now: whether gradients were averaged
            self._count()
            if self._due:
                look = None
                with self._harmless(self._cost.steps - 1):
                    look = self._new_look(ddp, False, None)
                if look is not None:
                    self._look_at(look, joined=True)

    def _count(self) -> None:
        step, self._cost.steps = self._cost.steps, self._cost.steps + 1
        self._due = self._due or self._has_turn(step)

    def _has_turn(self, step: int) -> bool:
        return step % self._every == 1 % self._every

    def _disarm(self) -> Look | None:
        """Take the look at the latest step, if there was one, off the model; return it."""
        look, self._look = self._look, None
        if look is not None:
            look.disarm()
        return look

    # --- what is seen in them ---

    def _new_look(self, ddp: DistributedDataParallel, ahead: bool, before: Look | None) -> Look:
        look = Look(ddp, self._layout, self._cost.steps - 1, self._due, ahead, self._look_at, self._harmless)
        if before is not None and before.ahead is not None and before.step == look.step - 1:
            look.taken.before = before.ahead.before
            self._cost.seconds += before.seconds
        return look

    def _look_at(self, look: Look, joined: bool = False) -> None:
        """Exchange what was taken of a step, judge it, and say what was found.

        Raises:
            Drift: a rule is not kept, and that was asked for.
        """
        if self._closed:
            return
        began, findings = time.perf_counter(), list[Finding]()
        look.disarm()
        self._look = look if look.ahead is not None else None
        self._due = False
        with self._harmless(look.step):
            findings = self._judged(look, joined)
        self._cost.samples += 1
        self._cost.seconds += look.seconds + time.perf_counter() - began
        self._tell(findings)

    @contextlib.contextmanager
    def _harmless(self, step: int) -> Iterator[None]:
        """Whatever goes wrong with the watch itself is the end of it, and not of the training."""
        try:
            yield
        except NotMet as error:
            self._give_up(step, self._exchange.absent(step) if error.__cause__ else "", str(error))
        except Exception as error:
            log.exception("the kit failed at step %d", step)
            self._give_up(step, "", f"the kit failed: {type(error).__name__}: {error}")

    def _judged(self, look: Look, joined: bool) -> list[Finding]:
        self._exchange.come(look.step)
        if not joined:
            look.taken.finish(self._layout)
        heard, foreign = look.heard()
        digest = hashlib.blake2b(json.dumps(heard).encode(), digest_size=7).digest()
        words = [look.step, int(joined), foreign, int.from_bytes(digest, "little")]
        held = folds([p.data for p in self._models.values()])
        rows = self._exchange.gather(pack(self._layout, look.taken, words, held))
        self._cost.gathered += rows.numel()
        gathered = unpack(self._layout, rows, len(words), len(held))
        steps = gathered.words[:, 0].tolist()
        if len(set(steps)) > 1:
            said = ", ".join(f"rank {rank} at step {step}" for rank, step in zip(self._exchange.ranks, steps, strict=True))
            raise NotMet(f"ranks are not at the same step: {said}")
        run = LiveRun(
            self._layout,
            look.taken.index,
            gathered,
            look.step,
            joined={place for place, said in enumerate(gathered.words[:, 1].tolist()) if said},
            find_unused=look.find_unused,
            fused=bool(self._claims.fused),
        )
        judged = Judged()
        if look.divides_by_all or not run.joined:
            judge_values(run, self._claims, judged)
        self._models_differ(run, judged)
        self._collectives_differ(run, judged, heard)
        self.figures.append({"step": look.step, **judged.figures})
        return [renamed(finding, self._exchange.ranks) for finding in judged.findings]

    def _models_differ(self, run: LiveRun, judged: Judged) -> None:
        """Where the number of some parameter is not the same on all ranks, look for the element."""
        said = run.gathered.folds[run.training]
        different = (said != said[:1]).any(0).nonzero()
        if self._claims.lossy == LOCAL or not len(different):
            return
        name, parameter = list(self._models.items())[int(different[0])]
        found = differing(self._exchange, parameter, run.training)
        if found is not None:
            run.show_parameter(name, parameter, elements(parameter)[1], *found)
            judge_models(run, self._claims, judged)

    def _collectives_differ(self, run: LiveRun, judged: Judged, heard: Heard) -> None:
        """Where what was heard is not the same on all ranks, compare it; unless callbacks start some, in an order of their own."""
        said = run.gathered.words[:, 2:4]
        if run.joined or bool((said[:, 0] > 0).any()) or bool((said[:, 1] == said[0, 1]).all()):
            return
        texts = self._exchange.gather_text(json.dumps(heard))
        judge_collectives(run, self._claims, judged, [self._among(json.loads(text)) for text in texts])

    def _among(self, heard: list[Any]) -> list[tuple[str, list[int], str]]:
        """Keep the collectives of groups whose ranks are all here, by their places."""
        places = {rank: place for place, rank in enumerate(self._exchange.ranks)}
        return [(what, [places[rank] for rank in group], named) for what, group, named in heard if set(group) <= places.keys()]

    def _give_up(self, step: int, absent: str, why: str) -> None:
        """End the watch, not the training: say why, here and to those who come later."""
        why = absent or why
        self._exchange.leave(f"the watch ended at step {step}: {why}")
        self._end(why)
        remedy = "ranks that call the model's forward more often than others, that closed their watch earlier, or that are gone"
        failure = Failure("all ranks of the model's group at the check of this step", why)
        finding = Finding("", "the watch ends here, the training goes on", step, failure, remedy)
        self.findings.append(finding)
        log.error("%s", finding)
        if callable(self._on_failure):
            self._on_failure(finding)

    def _tell(self, findings: list[Finding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            if (self._repeat or finding.rule not in self._told) and self._exchange.rank == 0:
                log.error("%s", finding)
            self._told.add(finding.rule)
            if callable(self._on_failure):
                self._on_failure(finding)
        if findings and self._on_failure == RAISE:
            raise Drift(findings)
