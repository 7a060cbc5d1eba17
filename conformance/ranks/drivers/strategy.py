"""What ranks do with a sync strategy: train a model in steps of micro-batches, each inside its context, and write down gradients."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from conformance.errors import TargetError
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.models.probe import Probe, scripted_gradients
from conformance.ranks.resolve import asks_for
from conformance.scenarios.strategy import batches, by_itself, clears, multiple, raises_in, uses

Grads = list[torch.Tensor | None]


class _OfTheTrainer(Exception):
    """What a micro-batch fails with."""


def play(stage: RankDriver) -> None:
    """Run the scenario's steps."""
    strategy = stage.make()
    if not callable(strategy):
        raise TargetError(f"a sync strategy is called for each micro-batch, and returns a context manager; this is {_named(strategy)}")
    trainer = _Trainer(stage, strategy)
    stage.collectives.take_sent()
    for step, kind in enumerate(stage.scenario.steps):
        stage.begin_step(step, kind)
        trainer.step(step, kind)
        trainer.keep()


class _Trainer:
    """A model, its optimizers, and the strategy that it is trained with."""

    def __init__(self, stage: RankDriver, strategy: Callable[..., Any]) -> None:
        scenario = stage.scenario
        self._stage, self._strategy = stage, strategy
        self._probe = Probe(scenario.params, scenario.initial_value, stage.rank).to(stage.device)
        self._params = self._probe.tensors
        self._model: torch.nn.Module = self._probe
        if scenario.variant != "no_ddp":
            self._model = stage.data_parallel(
                self._probe,
                process_group=stage.group if scenario.groups else None,
                bucket_cap_mb=scenario.ddp.bucket_cap_mb,
                gradient_as_bucket_view=scenario.ddp.gradient_as_bucket_view,
                find_unused_parameters=scenario.ddp.find_unused_parameters,
            )
        self._optimizers = self._made_optimizers()

    def _made_optimizers(self) -> list[torch.optim.Optimizer]:
        if self._stage.scenario.variant != "shared":
            return [torch.optim.SGD(self._params, lr=0.0)]
        first, second, third, *rest = reversed(self._params)
        groups = [{"params": [second]}, {"params": [first, third]}]
        return [torch.optim.SGD(groups, lr=0.0), torch.optim.SGD([first, *rest], lr=0.0)]

    def step(self, step: int, kind: str) -> None:
        """Train one step: its micro-batches, or those until one fails."""
        scenario, number = self._stage.scenario, batches(self._stage.scenario, step)
        if clears(scenario, step):
            self._model.zero_grad()
        for batch in range(number):
            grads = self._grads(step, kind, batch, number)
            if by_itself(scenario, step):
                self._model(grads).backward()
                continue
            fails = raises_in(scenario, step) == batch
            with self._stage.inside("the context"):
                if fails:
                    self._fail(grads, batch == number - 1)
                else:
                    self._train(grads, batch == number - 1)
            if fails:
                self._model.zero_grad()
                break

    def keep(self) -> None:
        """Put on record what gradients are when a step is over."""
        stage = self._stage
        sent = stage.collectives.take_sent()
        for index, parameter in enumerate(self._params):
            if parameter.grad is not None:
                stage.keep(f"grad/p{index}", parameter.grad)
        stage.recorder.event(
            "synchronised",
            without=[index for index, p in enumerate(self._params) if p.grad is None],
            strides_changed=[index for index, p in enumerate(self._params) if _has_other_strides(p)],
            synchronises=getattr(self._model, "require_backward_grad_sync", True),
            sent=[len(sent), sum(size for _, size in sent)],
            gradients=sum(p.numel() * p.element_size() for p in self._params),
        )

    def _train(self, grads: Grads, is_final: bool) -> None:
        with self._context(is_final):
            loss = self._model(grads)
            self._before_backward()
            loss.backward()

    def _fail(self, grads: Grads, is_final: bool) -> None:
        """Raise inside the context: before a backward, or, of the last micro-batch, after it."""
        raised, came = _OfTheTrainer("this micro-batch failed"), None
        try:
            with self._context(is_final):
                loss = self._model(grads)
                if is_final:
                    loss.backward()
                raise raised
        except Exception as error:
            came = error
        self._stage.recorder.event(
            "failed", same=came is raised, came="nothing" if came is None else f"{type(came).__name__}: {str(came)[:200]}"
        )

    def _context(self, is_final: bool) -> Any:
        stage = self._stage
        names: dict[str, Callable[[], Any]] = {
            "model": lambda: self._model,
            "is_final_microbatch": lambda: is_final,
            "optimizers": lambda: list(self._optimizers),
            "state": lambda: SimpleNamespace(model=self._model, optimizers=list(self._optimizers)),
            "process_group": lambda: stage.group,
            "rank": lambda: stage.group_rank,
            "world_size": lambda: stage.size,
            "device": lambda: stage.device,
        }
        if unknown := asks_for(self._strategy, names):
            raise TargetError(f"the strategy asks for {', '.join(unknown)}; a micro-batch has {', '.join(names)}")
        context = stage.call(self._strategy, names)
        if not (hasattr(context, "__enter__") and hasattr(context, "__exit__")):
            raise TargetError(f"a sync strategy returns a context manager; this one returned {_named(context)}")
        return context

    def _before_backward(self) -> None:
        """Where DDP synchronises by itself, it waits for peers in its backward, where no schedule sees it."""
        if getattr(self._model, "require_backward_grad_sync", False):
            self._stage.let_peers_in()

    def _grads(self, step: int, kind: str, batch: int, number: int) -> Grads:
        stage = self._stage
        factor = multiple(stage.size, number, batch)
        every = scripted_gradients(stage.scenario.params, kind, stage.size, stage.rank, step, stage.device)
        return [
            grad * factor if grad is not None and uses(stage.scenario, stage.size, stage.group_rank, step, batch, index) else None
            for index, grad in enumerate(every)
        ]


def _named(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _has_other_strides(parameter: torch.Tensor) -> bool:
    """Whether a gradient is laid out otherwise than its parameter, where that can be told."""
    grad = parameter.grad
    if grad is None or grad.is_sparse or not grad.numel():
        return False
    sizes = zip(parameter.shape, grad.stride(), parameter.stride(), strict=True)
    return any(size > 1 and stride != right for size, stride, right in sizes)
