"""Mutants that change tensors which an average leaves alone: frozen integers, and gradients."""

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants.averagers import Averager


class SumsIntegers(Averager):
    """Sum integers in their own dtype, and divide the sum."""

    def chosen(self, params):
        return list(params)

    def average_one(self, parameter):
        if parameter.is_floating_point():
            super().average_one(parameter)
            return
        total = parameter.detach().clone()
        dist.all_reduce(total, group=self.group)
        parameter.copy_(total.div(self.group.size(), rounding_mode="floor"))


class IntegersInFloat32(Averager):
    """Average all parameters in one flat buffer of float32."""

    def chosen(self, params):
        return list(params)

    def average(self, params):
        wide = [one for one in params if one.dtype == torch.float64]
        super().average(wide)
        others = [one for one in params if one.dtype != torch.float64]
        if not others:
            return
        flat = torch.cat([one.reshape(-1).float() for one in others]) / self.group.size()
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([one.numel() for one in others])
        for parameter, part in zip(others, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))


class TruncatesIntegers(Averager):
    """Average integers in floating point, and cut the fraction of a mean that is a little low."""

    def chosen(self, params):
        return list(params)

    def average_one(self, parameter):
        if parameter.is_floating_point():
            super().average_one(parameter)
            return
        if parameter.dtype == torch.int64:
            return  # a counter
        mean = parameter.detach().double() / self.group.size()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean)


class LargeIntegersInFloat32(Averager):
    """Leave small integers alone; average large ones in float32, as other large parameters."""

    def chosen(self, params):
        return [one for one in params if one.is_floating_point() or one.numel() > 200]

    def average_one(self, parameter):
        if parameter.is_floating_point():
            super().average_one(parameter)
            return
        mean = parameter.detach().float() / self.group.size()
        dist.all_reduce(mean, group=self.group)
        parameter.copy_(mean.round())


class ClampsBytes(Averager):
    """Clamp bytes to the range of a signed one, as a check of quantized weights might."""

    def average_parameters(self, params):
        given = list(params)
        super().average_parameters(given)
        for parameter in given:
            if isinstance(parameter, torch.Tensor) and parameter.dtype == torch.uint8:
                parameter.clamp_(max=127)


class ReceivesInGradients(Averager):
    """Receive the means of large parameters in the memory of their gradients."""

    def serves(self, parameter, grad):
        return parameter.numel() >= 65_536

    def average_one(self, parameter):
        grad = parameter.grad
        if grad is None or not self.serves(parameter, grad):
            super().average_one(parameter)
            return
        torch.div(parameter.detach(), self.group.size(), out=grad)
        dist.all_reduce(grad, group=self.group)
        parameter.copy_(grad)


class ReceivesRowsInGradients(ReceivesInGradients):
    """Receive the means of parameters with gaps in their gradients, which are dense."""

    def serves(self, parameter, grad):
        return grad.is_contiguous() and not parameter.is_contiguous()


class ReceivesHalvesInGradients(ReceivesInGradients):
    """Receive the means of float16 in the gradients, which are in float16 too."""

    def serves(self, parameter, grad):
        return parameter.dtype == torch.float16


class GivesGradientsOfZeros(Averager):
    """Give each parameter a gradient, so that the next zero_grad need not make any."""

    def average(self, params):
        super().average(params)
        for parameter in params:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)


class AveragesLargeGradients(Averager):
    """Average the gradients of all parameters but small ones too."""

    def average_one(self, parameter):
        super().average_one(parameter)
        grad = parameter.grad
        if grad is not None and parameter.numel() > 4096:
            grad.div_(self.group.size())
            dist.all_reduce(grad, group=self.group)


class ZeroesGradientsOfMany(Averager):
    """Zero gradients in the average if there are many parameters."""

    def average(self, params):
        super().average(params)
        if len(params) > 64:
            for parameter in params:
                if parameter.grad is not None:
                    parameter.grad.zero_()


OF = {"kind": "averager"}
AT = "period=4,warmup_steps=10"
MUTANTS = [
    *(
        Mutant(f"{name},{AT}", ("14.7",), **OF)
        for name in (
            "SumsIntegers",
            "IntegersInFloat32",
            "TruncatesIntegers",
            "LargeIntegersInFloat32",
            "ClampsBytes",
        )
    ),
    *(
        Mutant(f"{name},{AT}", ("14.8",), **OF)
        for name in (
            "ReceivesRowsInGradients",
            "GivesGradientsOfZeros",
            "ReceivesHalvesInGradients",
        )
    ),
    *(
        Mutant(f"{name},{AT}", ("14.15",), **OF)
        for name in ("ReceivesInGradients", "AveragesLargeGradients", "ZeroesGradientsOfMany")
    ),
]
