"""The driver of sync strategies: trains in micro-batches, each inside the strategy's context."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from conformance.errors import TargetError
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.models.probe import Probe, scripted_gradients
from conformance.ranks.resolve import Context, missing_arguments
from conformance.scenarios.strategy import batches, by_itself, clears, multiple, raises_in, uses

Grads = list[torch.Tensor | None]


class _TrainerError(Exception):
    """The error of a micro-batch that fails."""


class StrategyDriver(RankDriver):
    """One rank that trains with a sync strategy.

    Attributes:
        strategy: the subject.
        model: the probe, under DDP unless the scenario does without.
        params: the probe's parameters.
        optimizers: the optimizers that the strategy may be given.
    """

    def run(self) -> None:
        """Make the strategy and run the scenario's steps."""
        self.strategy: Callable[..., Any] = self.make()
        if not callable(self.strategy):
            raise TargetError(
                "a sync strategy is called for each micro-batch, and returns a context manager; "
                f"this is {_named(self.strategy)}"
            )
        self._make_model()
        self.collectives.take_sent()  # of DDP, as it was made
        for step, kind in enumerate(self.scenario.steps):
            self.begin_step(step, kind)
            self._step(step, kind)
            self._keep_gradients()

    def _make_model(self) -> None:
        scenario = self.scenario
        probe = Probe(scenario.params, scenario.initial_value, self.rank).to(self.device)
        self.params: list[torch.nn.Parameter] = probe.tensors
        self.model: torch.nn.Module = probe
        if scenario.variant != "no_ddp":
            self.model = self.data_parallel(
                probe,
                process_group=self.group if scenario.groups else None,
                bucket_cap_mb=scenario.ddp.bucket_cap_mb,
                gradient_as_bucket_view=scenario.ddp.gradient_as_bucket_view,
                find_unused_parameters=scenario.ddp.find_unused_parameters,
            )
        self.optimizers = self._make_optimizers()

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        # With lr=0.0 parameters keep their values: only gradients are judged.
        if self.scenario.variant != "shared":
            return [torch.optim.SGD(self.params, lr=0.0)]
        # Two optimizers share a parameter, and name parameters in another order than the model.
        first, second, third, *rest = reversed(self.params)
        groups = [{"params": [second]}, {"params": [first, third]}]
        return [torch.optim.SGD(groups, lr=0.0), torch.optim.SGD([first, *rest], lr=0.0)]

    def _step(self, step: int, kind: str) -> None:
        """Train one step: its micro-batches, or those until one fails."""
        number = batches(self.scenario, step)
        if clears(self.scenario, step):
            self.model.zero_grad()
        for batch in range(number):
            grads = self._grads(step, kind, batch, number)
            # Outside of the context DDP averages as ever, whatever the strategy has left behind.
            if by_itself(self.scenario, step):
                self.model(grads).backward()
                continue
            fails = raises_in(self.scenario, step) == batch
            is_final = batch == number - 1
            with self.inside("the context"):
                if fails:
                    self._fail(grads, is_final)
                else:
                    self._train(grads, is_final)
            if fails:
                self.model.zero_grad()
                break

    def _keep_gradients(self) -> None:
        """Record the gradients at the end of a step."""
        sent = self.collectives.take_sent()
        for index, parameter in enumerate(self.params):
            if parameter.grad is not None:
                self.keep(f"grad/p{index}", parameter.grad)
        self.recorder.event(
            "synchronised",
            without=[index for index, p in enumerate(self.params) if p.grad is None],
            strides_changed=[index for index, p in enumerate(self.params) if _has_other_strides(p)],
            synchronises=getattr(self.model, "require_backward_grad_sync", True),
            sent=[len(sent), sum(size for _, size in sent)],
            gradients=sum(p.numel() * p.element_size() for p in self.params),
        )

    def _train(self, grads: Grads, is_final: bool) -> None:
        with self._context_of(is_final):
            loss = self.model(grads)
            # DDP that synchronises by itself waits for peers in its backward, where no schedule
            # sees the wait.
            if getattr(self.model, "require_backward_grad_sync", False):
                self.let_peers_in()
            loss.backward()

    def _fail(self, grads: Grads, is_final: bool) -> None:
        """Raise inside the context, before the backward; in the last micro-batch, after it."""
        raised = _TrainerError("this micro-batch failed")
        caught = None
        try:
            with self._context_of(is_final):
                loss = self.model(grads)
                if is_final:
                    loss.backward()
                raise raised
        except Exception as error:
            caught = error
        text = "nothing" if caught is None else f"{type(caught).__name__}: {str(caught)[:200]}"
        self.recorder.event("failed", same=caught is raised, came=text)

    def _context_of(self, is_final: bool) -> Any:
        """Return the strategy's context for one micro-batch."""
        names: Context = {
            "model": lambda: self.model,
            "is_final_microbatch": lambda: is_final,
            "optimizers": lambda: list(self.optimizers),
            "state": lambda: SimpleNamespace(model=self.model, optimizers=list(self.optimizers)),
            **self.context,
        }
        if missing := missing_arguments(self.strategy, names):
            raise TargetError(
                f"the strategy requires {', '.join(missing)}; a micro-batch has {', '.join(names)}"
            )
        context = self.call(self.strategy, names)
        if not (hasattr(context, "__enter__") and hasattr(context, "__exit__")):
            raise TargetError(
                f"a sync strategy returns a context manager; this one returned {_named(context)}"
            )
        return context

    def _grads(self, step: int, kind: str, batch: int, number: int) -> Grads:
        """Return the gradients of a micro-batch; None for the parameters that it does not use."""
        factor = multiple(self.size, number, batch)
        every = scripted_gradients(
            self.scenario.params, kind, self.size, self.rank, step, self.device
        )
        grads: Grads = []
        for index, grad in enumerate(every):
            is_used = uses(self.scenario, self.size, self.group_rank, step, batch, index)
            grads.append(grad * factor if grad is not None and is_used else None)
        return grads


def _named(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _has_other_strides(parameter: torch.Tensor) -> bool:
    """Whether a dense gradient has other strides than its parameter."""
    grad = parameter.grad
    if grad is None or grad.is_sparse or not grad.numel():
        return False
    strides = zip(parameter.shape, grad.stride(), parameter.stride(), strict=True)
    # The stride of a dimension of size 1 has no meaning.
    return any(size > 1 and stride != right for size, stride, right in strides)
