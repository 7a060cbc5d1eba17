"""Mutants of section 14 that claim to be like a reference, and differ from it."""

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager


class Ema(Averager):
    """The right moving average: in float32 or wider, of the means."""

    dtype: torch.dtype | None = torch.float32

    def __init__(self, decay=0.999, period=1, warmup_steps=0, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.decay = decay
        self.average: list[torch.Tensor] = []

    def _update(self, params):
        means = []
        for parameter in params:
            mean = parameter.detach().to(self._dtype(parameter), copy=True).contiguous()
            dist.all_reduce(mean.div_(self.group.size()), group=self.group)
            means.append(mean)
        self.keep(means)

    def average_parameters(self, params):
        if self.is_due():
            with torch.no_grad():
                self._update(self.chosen(params))
        self.step += 1

    def _dtype(self, parameter):
        return torch.promote_types(parameter.dtype, torch.float32)

    def keep(self, means):
        if not self.average:
            self.average = means
            return
        for place, mean in enumerate(means[: len(self.average)]):
            self.average[place] = self.moved(self.average[place], mean)
        self.average += means[len(self.average) :]

    def moved(self, average, mean):
        return average * self.decay + mean * (1 - self.decay)

    def applied(self, params):
        return _Applied(self.chosen(params), self.average)

    def state_dict(self):
        return {"step": self.step, "average": [kept.clone() for kept in self.average]}

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self.average = [kept.clone() for kept in saved["average"]]


class _Applied:
    """Parameters are the averages inside the context."""

    def __init__(self, params, averages):
        self.params = params
        self.averages = averages

    def __enter__(self):
        self.kept = [parameter.detach().clone() for parameter in self.params]
        self._set(self.averages)

    def __exit__(self, *_):
        self._set(self.kept)

    @torch.no_grad()
    def _set(self, values):
        for parameter, value in zip(self.params, values, strict=True):
            parameter.copy_(value)


class _StaysAfterAnError(_Applied):
    def __exit__(self, kind, *_):
        if kind is None:
            self._set(self.kept)


class EmaStaysAfterAnError(Ema):
    """Restore the parameters only if no exception ends the context."""

    def applied(self, params):
        return _StaysAfterAnError(self.chosen(params), self.average)


class _StaysAfterAnInterrupt(_Applied):
    def __exit__(self, kind, *_):
        if kind is None or issubclass(kind, Exception):
            self._set(self.kept)


class EmaStaysAfterAnInterrupt(Ema):
    """Restore the parameters after errors, but not after KeyboardInterrupt or SystemExit."""

    def applied(self, params):
        return _StaysAfterAnInterrupt(self.chosen(params), self.average)


class _KnowsInterrupts(_Applied):
    def __exit__(self, kind, *_):
        if kind is None or issubclass(kind, (Exception, KeyboardInterrupt, SystemExit)):
            self._set(self.kept)


class EmaKnowsInterrupts(Ema):
    """Restore the parameters after errors and Python's own interrupts, but not after others."""

    def applied(self, params):
        return _KnowsInterrupts(self.chosen(params), self.average)


class EmaKeepsOneBackup(Ema):
    """Keep the parameters for the end of a context in the averager, so that a nested context
    replaces them with averages.
    """

    @contextmanager
    def applied(self, params):
        self.backup = _Applied(self.chosen(params), self.average)
        self.backup.__enter__()
        try:
            yield
        finally:
            self.backup.__exit__()


class EmaReadsAgain(Ema):
    """Read the parameters again to restore them: an iterator has none left."""

    @contextmanager
    def applied(self, params):
        inside = _Applied(self.chosen(params), self.average)
        inside.__enter__()
        try:
            yield
        finally:
            for parameter, kept in zip(self.chosen(params), inside.kept):  # noqa: B905
                parameter.data.copy_(kept)


class EmaRestoresOnce(Ema):
    """Keep the parameters once, and restore them when the first of two nested contexts ends."""

    kept = None

    @contextmanager
    def applied(self, params):
        if self.kept is None:
            self.kept = _Applied(self.chosen(params), self.average)
            self.kept.__enter__()
        try:
            yield
        finally:
            if self.kept is not None:
                self.kept.__exit__()
            self.kept = None


class EmaTogglesBack(Ema):
    """Let a context change parameters and averages over, so that a nested one changes them back."""

    inside = None

    @contextmanager
    def applied(self, params):
        outer = self.inside
        if outer is None:
            self.inside = _Applied(self.chosen(params), self.average)
            self.inside.__enter__()
        else:
            averages = [parameter.detach().clone() for parameter in outer.params]
            outer.__exit__()
        try:
            yield
        finally:
            if outer is None:
                self.inside.__exit__()
                self.inside = None
            else:
                outer._set(averages)


class _Evaluates(_Applied):
    """Evaluates without gradients."""

    def __enter__(self):
        super().__enter__()
        for parameter in self.params:
            parameter.requires_grad_(False)


class EmaEvaluatesForGood(Ema):
    """Take requires_grad from the parameters, and do not give it back."""

    def applied(self, params):
        return _Evaluates(self.chosen(params), self.average)


class _Clears(_Applied):
    """Clears gradients, whose memory the evaluation may use."""

    def __exit__(self, kind, *_):
        super().__exit__(kind)
        for parameter in self.params:
            parameter.grad = None


class EmaClearsGradients(Ema):
    """Clear gradients that are accumulated while a model is evaluated."""

    def applied(self, params):
        return _Clears(self.chosen(params), self.average)


class _RaisesAfterAnError(_Applied):
    def __exit__(self, kind, *_):
        self._set(self.kept)
        if kind is not None:
            raise AttributeError("no copy was kept")


class EmaRaisesAfterAnError(Ema):
    """Replace the exception that ends the context by another one."""

    def applied(self, params):
        return _RaisesAfterAnError(self.chosen(params), self.average)


class _KeepsNoCopies(_Applied):
    def __enter__(self):
        self.kept = [parameter.detach() for parameter in self.params]
        self._set(self.averages)


class EmaKeepsNoCopies(Ema):
    """Keep references to the parameters instead of copies, so that nothing is restored."""

    def applied(self, params):
        return _KeepsNoCopies(self.chosen(params), self.average)


class _Swaps(_Applied):
    """Averages and parameters change places, value by value."""

    @torch.no_grad()
    def _swap(self):
        for parameter, average in zip(self.params, self.averages, strict=True):
            kept = parameter.detach().to(average.dtype, copy=True)
            parameter.copy_(average)
            average.copy_(kept)

    def __enter__(self):
        self.exact = [average.clone() for average in self.averages]
        self._swap()

    def __exit__(self, *_):
        self._swap()
        for average, exact in zip(self.averages, self.exact, strict=True):
            average.copy_(exact)


class EmaSwaps(Ema):
    """Exchange averages and parameters for an evaluation, the saved ones too."""

    def applied(self, params):
        return _Swaps(self.chosen(params), self.average)


class EmaWithoutAverage(Ema):
    """Lend the averages to an evaluation: a state that is saved meanwhile has none."""

    is_lent = False

    def state_dict(self):
        return {"step": self.step} if self.is_lent else super().state_dict()

    def load_state_dict(self, saved):
        super().load_state_dict({"average": [], **saved})

    def applied(self, params):
        owner = self

        class Lent(_Applied):
            def __enter__(self):
                super().__enter__()
                owner.is_lent = True

            def __exit__(self, *_):
                super().__exit__()
                owner.is_lent = False

        return Lent(self.chosen(params), self.average)


class EmaEvaluatesOldCopies(Ema):
    """Evaluate with copies of the averages, which are made at each average and not at a load."""

    copies = ()

    def average_parameters(self, params):
        super().average_parameters(params)
        self.copies = [average.clone() for average in self.average]

    def applied(self, params):
        return _Applied(self.chosen(params), self.copies or self.chosen(params))


class EmaLoadsAtTheNextCall(Ema):
    """Keep a loaded state until the parameters are known, from the next call on."""

    loaded = None

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self.loaded = saved

    def average_parameters(self, params):
        if self.loaded:
            super().load_state_dict(self.loaded)
            self.loaded = None
        super().average_parameters(params)


class EmaEvaluatesAfterAnAverage(Ema):
    """Evaluate with the parameters themselves until this object has averaged since the load."""

    has_averaged = False

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.has_averaged = False

    def _update(self, params):
        super()._update(params)
        self.has_averaged = True

    def applied(self, params):
        chosen = self.chosen(params)
        return _Applied(chosen, self.average if self.has_averaged else list(chosen))


class EmaInHalf(Ema):
    """Keep the average in bfloat16, in which a small change is lost."""

    def moved(self, average, mean):
        return super().moved(average, mean).bfloat16().to(average.dtype)


class EmaInOwnDtype(Ema):
    """Keep the average in the dtype of the parameter."""

    def _dtype(self, parameter):
        return parameter.dtype


class EmaSlightlySlow(Ema):
    """Use a decay that is closer to 1 by a ten-thousandth."""

    def moved(self, average, mean):
        decay = self.decay + 1e-4
        return average * decay + mean * (1 - decay)


class EmaStops(Ema):
    """Stop moving after 100 averages of four parameters."""

    moves = 0

    def moved(self, average, mean):
        self.moves += 1
        return average if self.moves > 400 else super().moved(average, mean)


class EmaRestarts(Ema):
    """Take the mean itself after 150 averages of a parameter, or of three."""

    moves = 0

    def moved(self, average, mean):
        self.moves += 1
        return mean if self.moves == 450 else super().moved(average, mean)


class EmaSlowsDown(Ema):
    """Let the decay approach 1 with the number of averages."""

    moves = 0

    def moved(self, average, mean):
        self.moves += 1
        decay = max(self.decay, 1 - 1 / (1 + self.moves))
        return average * decay + mean * (1 - decay)


class DiLoCo(Averager):
    """The right outer steps, in float64."""

    rate = 0.7

    def __init__(self, period=4, warmup_steps=0, process_group=None):
        super().__init__(period, warmup_steps, process_group)
        self.begun: dict[int, torch.Tensor] = {}
        self.velocity: dict[int, torch.Tensor] = {}

    def average(self, params):
        for place, parameter in enumerate(params):
            mean = self.mean(parameter)
            if place not in self.begun:
                self.begun[place] = mean
                self.velocity[place] = torch.zeros_like(mean)
            else:
                difference = self.begun[place] - mean
                self.velocity[place] = self.velocity[place] * 0.9 + difference
                step = difference + 0.9 * self.velocity[place]
                self.begun[place] = self.begun[place] - self.rate * step
            parameter.copy_(self.begun[place])

    def mean(self, parameter):
        mean = (parameter.detach().double() / self.group.size()).contiguous()
        dist.all_reduce(mean, group=self.group)
        return mean

    def state_dict(self):
        return {"step": self.step, "begun": self.begun, "velocity": self.velocity}

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self.begun = dict(saved["begun"])
        self.velocity = dict(saved["velocity"])


class DiLoCoRateRounded(DiLoCo):
    """Use an outer rate that is off by a ten-thousandth."""

    rate = 0.7001


class DiLoCoInFloat32(DiLoCo):
    """Compute float64 parameters in float32."""

    def mean(self, parameter):
        return super().mean(parameter).float().double()


class DiLoCoGathersLate(DiLoCo):
    """Wait for the mean of the first parameter for one second at most."""

    def average(self, params):
        self.is_first = bool(self.begun)
        super().average(params)

    def mean(self, parameter):
        mean = (parameter.detach().double() / self.group.size()).contiguous()
        work = dist.all_reduce(mean, group=self.group, async_op=True)
        self.works = [*getattr(self, "works", []), work]
        if not self.is_first:
            work.wait()
        self.is_first = False
        until = time.monotonic() + 1
        while not work.is_completed() and time.monotonic() < until:
            pass
        return mean.clone()


OF = {"kind": "averager"}
EMA = {"claims": "like(EMAModelAverager, decay=0.999)", **OF}
DILOCO = {"claims": "like(DiLoCoModelAverager, period=4)", **OF}
MUTANTS = [
    *(
        Mutant(name, ("14.12",), **EMA)
        for name in (
            *("EmaInHalf", "EmaStaysAfterAnError", "EmaStaysAfterAnInterrupt", "EmaKeepsNoCopies"),
            *("EmaSwaps", "EmaWithoutAverage", "EmaKnowsInterrupts"),
            *("EmaKeepsOneBackup", "EmaReadsAgain", "EmaRestoresOnce", "EmaTogglesBack"),
            *("EmaEvaluatesForGood", "EmaClearsGradients"),
            *("EmaEvaluatesOldCopies", "EmaLoadsAtTheNextCall", "EmaEvaluatesAfterAnAverage"),
        )
    ),
    Mutant("EmaRaisesAfterAnError", ("14.1",), **EMA),
    Mutant("EmaInOwnDtype", ("14.12",), **EMA),
    Mutant("EmaSlightlySlow", ("14.12",), **EMA),
    *(Mutant(name, ("14.20",), **EMA) for name in ("EmaStops", "EmaRestarts")),
    Mutant("EmaSlowsDown,decay=0.99", ("14.12",), "like(EMAModelAverager, decay=0.99)", **OF),
    Mutant("DiLoCoRateRounded", ("14.1",), **DILOCO),
    Mutant("DiLoCoInFloat32", ("14.7",), **DILOCO),
    Mutant("DiLoCoGathersLate", ("14.10",), **DILOCO),
]
