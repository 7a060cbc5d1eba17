"""Mutants of 14.23, 15.32, 16.31, 17.25, 17.26, 18.28, 18.29, 19.32 and 19.33.

They keep more and more, or are wrong from some call on, or in every so many calls.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.joins import Right
from tests.mutants.joins_in_training import Averages
from tests.mutants.optimizer_wrappers import PostLocal
from tests.mutants.quantized_collectives import Made, Tensor, half, right
from tests.mutants.strategies import _average, _then
from tests.mutants.wrappers import Forward, calls
from tests.mutants.wrappers_in_training import packs

Context = AbstractContextManager[None]


# ---- Averagers


class KeepsEveryMean(Averager):
    """Keep the mean of every parameter."""

    def __init__(self, period: int = 4, warmup_steps: int = 10, process_group: Any = None) -> None:
        super().__init__(period, warmup_steps, process_group)
        self.means: list[torch.Tensor] = []

    def average_one(self, parameter: Any) -> None:
        super().average_one(parameter)
        self.means.append(parameter.detach().clone())


class LogsLateSteps(Averager):
    """Log the numbers of steps, from step 250 on."""

    def __init__(self, period: int = 4, warmup_steps: int = 10, process_group: Any = None) -> None:
        super().__init__(period, warmup_steps, process_group)
        self.log: dict[int, bool] = {}

    def average_parameters(self, params: Any) -> None:
        if self.step >= 250:
            self.log[self.step] = self.is_due()
        super().average_parameters(params)


class AddsUpNorms(Averager):
    """Add up the norms of parameters, with the graph of all of them."""

    def __init__(self, period: int = 4, warmup_steps: int = 10, process_group: Any = None) -> None:
        super().__init__(period, warmup_steps, process_group)
        self.norms: Any = 0.0

    def average_parameters(self, params: Any) -> None:
        super().average_parameters(params)
        if self.step % 10 == 0:
            self.norms = self.norms + torch.ones(1, requires_grad=True).sum()


class RegistersHooks(Averager):
    """Register a hook on a parameter in every 40th step."""

    def average_parameters(self, params: Any) -> None:
        params = self.chosen(params)
        if self.step % 40 == 39 and params[0].requires_grad:
            params[0].register_hook(lambda gradient: gradient)
        super().average_parameters(params)


class OpensGroups(Averager):
    """Make a process group in every 50th step."""

    def average_parameters(self, params: Any) -> None:
        super().average_parameters(params)
        if self.step % 50 == 0:
            dist.new_group()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


class SetsKeys(Averager):
    """Set a key of its own in the store of the process group in every average."""

    def average(self, params: Any) -> None:
        super().average(params)
        _store().set(f"average {self.step}", "done")


# ---- Optimizers


class KeepsATrace(PostLocal):
    """Keep a copy of the parameters after every 29th step."""

    trace: list[torch.Tensor]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        if not hasattr(self, "trace"):
            self.trace = []
            self.count = itertools.count()
        if next(self.count) % 29 == 28:
            self.trace += [parameter.detach().clone() for parameter in self.parameters()]
        return loss


class LengthensItsHistory(PostLocal):
    """Keep the norms of all steps in one tensor, which is longer after each step."""

    norms = torch.zeros(0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        self.norms = torch.cat([self.norms, self.parameters()[0].detach().norm().reshape(1)])
        return loss


class RegistersStepHooks(PostLocal):
    """Register a hook on the inner optimizer in every 50th step, from the 150th on."""

    count = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.count += 1
        if self.count >= 150 and self.count % 50 == 0:
            self.optim.register_step_post_hook(lambda *_: None)
        return super().step(closure)


# ---- Strategies

_batches = itertools.count(1)
_kept: list[Any] = []


def keeps_gradients(model: Any, is_final_microbatch: bool) -> Context:
    """Keep the first gradient of every fifth step."""

    def average() -> None:
        _average(model)
        if next(_batches) % 5 == 0:
            _kept.extend(p.grad.clone() for p in list(model.parameters())[:1] if p.grad is not None)

    return _then(model, is_final_microbatch, average)


def registers_forward_hooks(model: Any, is_final_microbatch: bool) -> Context:
    """Register a hook on the model in every 20th step."""

    def average() -> None:
        _average(model)
        if next(_batches) % 20 == 0:
            model.register_forward_hook(lambda *_: None)

    return _then(model, is_final_microbatch, average)


def counts_late_batches(model: Any, is_final_microbatch: bool) -> Context:
    """Keep the number of each micro-batch from the 180th on."""
    number = next(_batches)
    if number >= 180:
        _kept.append(number)
    return _then(model, is_final_microbatch, lambda: _average(model))


_errors: list[str] = []


@contextmanager
def keeps_errors(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Keep the text of every exception that ends a micro-batch."""
    try:
        with _then(model, is_final_microbatch, lambda: _average(model)):
            yield
    except Exception as error:
        _errors.append(f"{len(_errors)}: {error}")
        raise


# ---- Quantized collectives


def numbers_its_calls(func: Made, qtype: str) -> Made:
    """Set a key in the store of the process group for every call."""
    number = itertools.count()

    def called(*args: Any, **kwargs: Any) -> Any:
        _store().set(f"call {next(number)}", "begun")
        return right(func)(*args, **kwargs)

    return called


def keeps_works(func: Made, qtype: str) -> Made:
    """Keep the Work of every asynchronous call."""
    works: list[Any] = []

    def gather(*args: Any, **kwargs: Any) -> Any:
        pending = right(func)(*args, **kwargs)
        if pending is not None:
            works.append(pending.work)
        return pending

    return gather


def keeps_closures(func: Made, qtype: str) -> Made:
    """Keep a closure over the message of every 25th call."""
    finishers: deque[Callable[[], int]] = deque()
    count = itertools.count(1)

    def gather(tensor_list: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if next(count) % 25 == 0:
            finishers.append(lambda: tensor.numel())
        return right(func)(tensor_list, tensor, *args, **kwargs)

    return gather


def counts_after_two_hundred(func: Made, qtype: str) -> Made:
    """Keep the size of every message from the 200th call on."""
    sizes: dict[int, int] = {}
    count = itertools.count(1)

    def exchange(outputs: list[Tensor], inputs: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        number = next(count)
        if number >= 200:
            sizes[number] = len(inputs)
        return right(func)(outputs, inputs, *args, **kwargs)

    return exchange


def starts_threads(func: Made, qtype: str) -> Made:
    """Start a thread for every call, which waits for the next one in vain."""

    def gather(*args: Any, **kwargs: Any) -> Any:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return right(func)(*args, **kwargs)

    return gather


def _changed(
    func: Made, is_wrong: Callable[[int], bool], change: Callable[[Tensor], Tensor]
) -> Any:
    """Return the right collective, which sends something else in some calls."""
    count = itertools.count(1)

    def called(*args: Any, **kwargs: Any) -> Any:
        wrong = is_wrong(next(count))
        return right(func, lambda tensor: half(change(tensor) if wrong else tensor))(
            *args, **kwargs
        )

    return called


def wrong_from_211_on(func: Made, qtype: str) -> Made:
    """Scale messages by 1.01 from the 211th call on."""
    return _changed(func, lambda number: number >= 211, lambda tensor: tensor * 1.01)


def drops_every_97th(func: Made, qtype: str) -> Made:
    """Send zeros in every 97th call."""
    return _changed(func, lambda number: number % 97 == 0, torch.zeros_like)


def wraps_at_256(func: Made, qtype: str) -> Made:
    """Count calls in 8 bits, and take the call after 255 for a warm-up in bfloat16."""
    return _changed(
        func, lambda number: number % 256 == 0, lambda tensor: tensor.bfloat16().float()
    )


# ---- Wrappers


def _counted(before: Callable[[int, torch.nn.Module, Any], object]) -> Any:
    """Return a right wrapper that calls ``before(number, module, arguments)`` in each forward."""
    count = itertools.count(1)

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        @calls
        def call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            before(next(count), module, args)
            return forward(*args, **kwargs)

        return call(module)

    return wrap


def keeps_means(module: torch.nn.Module) -> torch.nn.Module:
    """Keep the mean of the input of every seventh forward."""

    def before(number: int, module: torch.nn.Module, args: Any) -> None:
        if number % 7 == 0:
            _kept.extend(arg.detach().mean() for arg in args if isinstance(arg, torch.Tensor))

    return _counted(before)(module)


def logs_from_the_200th(module: torch.nn.Module) -> torch.nn.Module:
    """Log the shapes of inputs from the 200th forward on."""

    def before(number: int, module: torch.nn.Module, args: Any) -> None:
        if number >= 200:
            _kept.append(number)

    return _counted(before)(module)


class _Probe:
    """An object that a handle refers to."""

    def __init__(self, number: int) -> None:
        self.number = number


def adds_handles(module: torch.nn.Module) -> torch.nn.Module:
    """Keep an object for every 60th forward."""

    def before(number: int, module: torch.nn.Module, args: Any) -> None:
        if number % 60 == 0:
            _kept.append(_Probe(number))

    return _counted(before)(module)


def packs_small_after_210(module: torch.nn.Module) -> torch.nn.Module:
    """Keep activations in bfloat16 from the 211th forward on."""
    return _rounds(lambda number: number > 210)(module)


def packs_small_now_and_then(module: torch.nn.Module) -> torch.nn.Module:
    """Keep activations in bfloat16 in every 97th forward."""
    return _rounds(lambda number: number % 97 == 0)(module)


def reuses_slots(module: torch.nn.Module) -> torch.nn.Module:
    """Count forwards in 8 bits, and take the activations of number 0 for unused ones."""
    return _rounds(lambda number: number % 256 == 0)(module)


def _rounds(is_wrong: Callable[[int], bool]) -> Any:
    """Return a wrapper that keeps float32 activations in bfloat16 in some forwards."""
    count = itertools.count(1)
    number = [0]

    def pack(tensor: torch.Tensor) -> Any:
        is_rounded = is_wrong(number[0]) and tensor.dtype is torch.float32
        return is_rounded, tensor.bfloat16() if is_rounded else tensor

    packed = packs(pack, lambda kept: kept[1].float() if kept[0] else kept[1])

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        @calls
        def call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            number[0] = next(count)
            return forward(*args, **kwargs)

        return call(packed(module))

    return wrap


def keeps_dropped_graphs(module: torch.nn.Module) -> torch.nn.Module:
    """Keep saved tensors by number until a backward asks for them, which may never come."""
    kept: dict[int, torch.Tensor] = {}
    numbers = itertools.count()

    def pack(tensor: torch.Tensor) -> int:
        number = next(numbers)
        kept[number] = tensor.detach()
        return number

    return packs(pack, lambda number: kept.pop(number))(module)  # type: ignore[no-any-return]


# ---- Joins


class KeepsErrors(Right):
    """Keep the text of every exception that ends a context."""

    errors: ClassVar[list[str]] = []

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        if error is not None:
            self.errors.append(f"{self.shadowed}: {error}")
        return super().__exit__(kind, error, trace)


class SwallowsLateErrors(Right):
    """Swallow exceptions from the 40th context on."""

    contexts = itertools.count(1)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        number = next(SwallowsLateErrors.contexts)
        super().__exit__(kind, error, trace)
        return number >= 40 and kind is ArithmeticError


class LogsHooks(Right):
    """Keep the hooks of all contexts."""

    log: ClassVar[list[Any]] = []

    def finish(self) -> None:
        super().finish()
        self.log.append(self.hooks)


class KeepsEpochs(Right):
    """Keep the number of every ninth context."""

    epochs = itertools.count(1)
    lengths: ClassVar[dict[int, int]] = {}

    def finish(self) -> None:
        super().finish()
        number = next(self.epochs)
        if number % 9 == 0:
            self.lengths[number] = self.shadowed


class KeepsGradients(Averages):
    """Keep the mean gradient of every tenth step."""

    def put(self, mean: torch.Tensor) -> None:
        super().put(mean)
        if self.seen % 10 == 0:
            self.__dict__.setdefault("means", []).append(mean.clone())


class ForgetsEveryThirtieth(Right):
    """Call no post hook in every 30th context."""

    epochs = itertools.count(1)

    def finish(self) -> None:
        if next(ForgetsEveryThirtieth.epochs) % 30:
            super().finish()


class LosesTheLastJoiner(Right):
    """Take every rank for a last joiner from the 61st context on."""

    epochs = itertools.count(1)

    def finish(self) -> None:
        self.number = next(LosesTheLastJoiner.epochs)
        super().finish()

    def is_last(self) -> bool:
        return super().is_last() or self.number > 60


class SumsAfterAHundred(Averages):
    """Divide by one rank more from the 101st step on."""

    def divisor(self, training: float) -> float:
        return super().divisor(training) + (self.seen > 100)


def _collective(name: str, rule: str, func: str = "all_gather", **more: Any) -> Mutant:
    return Mutant(f"{name},func={func},qtype=FP16", (rule,), kind="collective", **more)


AT = "period=4,warmup_steps=10"
MUTANTS = [
    *(
        Mutant(f"{name},{AT}", ("14.23",), kind="averager")
        for name in ("KeepsEveryMean", "LogsLateSteps", "AddsUpNorms", "RegistersHooks", "SetsKeys")
    ),
    Mutant(
        f"OpensGroups,{AT}",
        ("14.14",),
        kind="averager",
        because={"14.23": "groups are objects of Python's, too"},
    ),
    *(
        Mutant(name, ("15.32",), kind="optimizer")
        for name in ("KeepsATrace", "LengthensItsHistory", "RegistersStepHooks")
    ),
    *(
        Mutant(name, ("16.31",), kind="strategy")
        for name in (
            "keeps_gradients",
            "registers_forward_hooks",
            "counts_late_batches",
            "keeps_errors",
        )
    ),
    _collective("keeps_works", "18.28"),
    _collective("numbers_its_calls", "18.28", "scatter"),
    _collective("keeps_closures", "18.28"),
    _collective("counts_after_two_hundred", "18.28", "all_to_all"),
    _collective(
        "starts_threads",
        "18.17",
        because={"18.28": "threads are objects of Python's, too"},
    ),
    _collective("wrong_from_211_on", "18.29"),
    _collective("wrong_from_211_on", "18.29", "scatter"),
    _collective("drops_every_97th", "18.29", "all_to_all_single"),
    _collective("wraps_at_256", "18.29", "all_to_all"),
    *(
        Mutant(name, ("19.32",), kind="wrapper")
        for name in ("keeps_means", "logs_from_the_200th", "adds_handles", "keeps_dropped_graphs")
    ),
    *(
        Mutant(name, ("19.33",), kind="wrapper")
        for name in ("packs_small_after_210", "packs_small_now_and_then", "reuses_slots")
    ),
    *(
        Mutant(name, ("17.25",), kind="joinable")
        for name in ("LogsHooks", "KeepsEpochs", "KeepsGradients", "KeepsErrors")
    ),
    *(
        Mutant(name, ("17.26",), kind="joinable")
        for name in (
            "ForgetsEveryThirtieth",
            "LosesTheLastJoiner",
            "SumsAfterAHundred",
            "SwallowsLateErrors",
        )
    ),
]
