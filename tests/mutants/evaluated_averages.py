"""Mutants of rules 14.12, 14.15 and 14.19: moving averages that are right in training, and not
where a model is evaluated with them, or where training goes back to its start.
"""

import torch

from tests.mutants import Mutant
from tests.mutants.averagers_like import DiLoCo, Ema, _Applied

# ---- The model is frozen, or groups are given (14.12)


class EmaOfUnfrozen(Ema):
    """Write averages into parameters that require a gradient when they are evaluated."""

    def applied(self, params):
        pairs = zip(self.chosen(params), self.average, strict=True)
        chosen = [(parameter, kept) for parameter, kept in pairs if parameter.requires_grad]
        return _Applied([parameter for parameter, _ in chosen], [kept for _, kept in chosen])


class EmaOfTrainedModels(Ema):
    """Take a model without a parameter that requires a gradient for one that is evaluated
    already.
    """

    def applied(self, params):
        chosen = self.chosen(params)
        if not any(parameter.requires_grad for parameter in chosen):
            return _Applied([], [])
        return _Applied(chosen, self.average)


class EmaOfPlainLists(Ema):
    """Find no parameters in groups when they are evaluated."""

    def applied(self, params):
        chosen = [entry for entry in params if isinstance(entry, torch.Tensor)]
        chosen = [parameter for parameter in chosen if parameter.is_floating_point()]
        return _Applied(chosen, self.average[: len(chosen)])


class EmaOfFirstGroup(Ema):
    """Evaluate the averages of the first group alone."""

    def applied(self, params):
        entries = list(params)
        chosen = self.chosen(entries[:1] if isinstance(entries[0], dict) else entries)
        return _Applied(chosen, self.average[: len(chosen)])


# ---- Large parameters are restored otherwise (14.15)


class _InChunks(_Applied):
    """Restore the first ``most`` elements of each parameter."""

    most = 0

    @torch.no_grad()
    def __exit__(self, *_):
        for parameter, kept in zip(self.params, self.kept, strict=True):
            if parameter.numel() > self.most and parameter.is_contiguous():
                parameter.view(-1)[: self.most] = kept.view(-1)[: self.most]
            else:
                parameter.copy_(kept)


class _InHalf(_Applied):
    """Keep parameters of more than ``most`` elements in half precision."""

    most = 0

    def __enter__(self):
        self.kept = [
            p.detach().to(torch.float16 if p.numel() > self.most else p.dtype, copy=True)
            for p in self.params
        ]
        self._set(self.averages)


class EmaRestoresChunks(Ema):
    """Restore so many elements of each parameter."""

    def __init__(self, most, decay=0.999, process_group=None):
        super().__init__(decay, process_group=process_group)
        self.most = most

    def applied(self, params):
        made = _InChunks(self.chosen(params), self.average)
        made.most = self.most
        return made


class EmaRestoresHalves(EmaRestoresChunks):
    """Keep large parameters in half precision while they are evaluated."""

    def applied(self, params):
        made = _InHalf(self.chosen(params), self.average)
        made.most = self.most
        return made


# ---- Back to a state without averages (14.19)


class EmaLoadsWhatThereIs(Ema):
    """Replace the averages that a loaded state has, and keep the others."""

    def load_state_dict(self, saved):
        self.step = saved["step"]
        for place, kept in enumerate(saved["average"]):
            self.average[place : place + 1] = [kept.clone()]


class EmaIgnoresEmptyStates(Ema):
    """Take a state without averages for one of another version, and load its step alone."""

    def load_state_dict(self, saved):
        self.step = saved["step"]
        if saved["average"]:
            self.average = [kept.clone() for kept in saved["average"]]


class _InAVector(_Applied):
    """Write values as ``vector_to_parameters`` does: parameters are contiguous views then."""

    @torch.no_grad()
    def _set(self, values):
        vector = torch.cat([value.reshape(-1).to(torch.float64) for value in values])
        for parameter, part in zip(
            self.params, vector.split([value.numel() for value in values]), strict=True
        ):
            parameter.data = part.view(parameter.shape).to(parameter.dtype)


class EmaInAVector(Ema):
    """Swap the weights by one vector."""

    def applied(self, params):
        return _InAVector(self.chosen(params), self.average)


class _InNewMemory(_Applied):
    """Put copies of the same strides in place of the parameters' own memory."""

    @torch.no_grad()
    def _set(self, values):
        for parameter, value in zip(self.params, values, strict=True):
            parameter.data = torch.empty_like(parameter).copy_(value)


class EmaInNewMemory(Ema):
    """Swap the weights by new tensors: a flat buffer of the trainer no longer has them."""

    def applied(self, params):
        return _InNewMemory(self.chosen(params), self.average)


class DiLoCoKeepsMomentum(DiLoCo):
    """Keep the momentum of parameters that a loaded state does not have."""

    def load_state_dict(self, saved):
        self.step = saved["step"]
        self.begun.update(saved["begun"])
        self.velocity.update(saved["velocity"])

    def state_dict(self):
        return {"step": self.step, "begun": dict(self.begun), "velocity": dict(self.velocity)}


OF = {"kind": "averager"}
EMA = {"claims": "like(EMAModelAverager, decay=0.999)", **OF}
# With this decay the old averages show in every result.
SLOW = {"claims": "like(EMAModelAverager, decay=0.5)", **OF}

MUTANTS = [
    *(
        Mutant(name, ("14.12",), **EMA)
        for name in (
            *("EmaOfUnfrozen", "EmaOfTrainedModels", "EmaOfPlainLists", "EmaOfFirstGroup"),
            *("EmaInAVector", "EmaInNewMemory"),
        )
    ),
    *(
        Mutant(name, ("14.15",), **EMA)
        for name in (
            *("EmaRestoresChunks,most=65536", "EmaRestoresChunks,most=300_007"),
            *("EmaRestoresHalves,most=100_000", "EmaRestoresHalves,most=524_288"),
        )
    ),
    Mutant("EmaLoadsWhatThereIs,decay=0.5", ("14.19",), **SLOW),
    Mutant("EmaIgnoresEmptyStates,decay=0.5", ("14.19",), **SLOW),
    Mutant("DiLoCoKeepsMomentum", ("14.19",), claims="like(DiLoCoModelAverager, period=4)", **OF),
]
