"""Mutants of rule 11.6: estimates (EF21) of a parameter that rests while the loss scale changes."""

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average_of, group_of, is_dense, pieces_of


class Estimates:
    """Estimates by parameter: this rank's own, and their mean; right but for its subclasses."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.group = group_of(process_group)
        self.own: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.mean: dict[torch.nn.Parameter, torch.Tensor] = {}

    def begin_step(self) -> None:
        """Begin a step."""

    def use(self, parameter: torch.nn.Parameter) -> None:
        """Note that some rank uses a parameter in this step."""

    def multiply(self, parameter: torch.nn.Parameter, factor: float) -> None:
        """Multiply the estimates of a parameter."""
        for estimates in (self.own, self.mean):
            if parameter in estimates:
                estimates[parameter] *= factor

    def rescale(self, factor: float) -> None:
        """Multiply all estimates by the factor of the loss scale."""
        for parameter in self.own:
            self.multiply(parameter, factor)


class OfTheNextStep(Estimates):
    """It rescales the parameters of the next step, and forgets the factor after that."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self.factor = 1.0
        self.factor_now = 1.0

    def rescale(self, factor: float) -> None:
        self.factor *= factor

    def begin_step(self) -> None:
        self.factor_now = self.factor
        self.factor = 1.0

    def use(self, parameter: torch.nn.Parameter) -> None:
        self.multiply(parameter, self.factor_now)


class OfTheLastStep(Estimates):
    """It rescales the parameters of the latest step."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self.latest: list[torch.nn.Parameter] = []

    def rescale(self, factor: float) -> None:
        for parameter in self.latest:
            self.multiply(parameter, factor)

    def begin_step(self) -> None:
        self.latest.clear()

    def use(self, parameter: torch.nn.Parameter) -> None:
        self.latest.append(parameter)


def ef21(state: Estimates, bucket: Bucket) -> Result:
    """Send half of the difference from the estimates; those of a parameter at rest stay as they
    are."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        raise TypeError("dense real gradients only")
    if bucket.index() == 0:
        state.begin_step()
    pairs = list(zip(bucket.parameters(), pieces_of(bucket), strict=True))
    used = torch.tensor([float(piece.ne(0).any()) for _, piece in pairs])
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=state.group)
    in_use = [pair for pair, flag in zip(pairs, used.tolist(), strict=True) if flag]
    for parameter, piece in in_use:
        state.use(parameter)
        own = state.own.setdefault(parameter, torch.zeros_like(piece))
        rest = piece - own
        largest = rest.abs().topk((rest.numel() + 1) // 2).indices
        piece.zero_()
        piece[largest] = rest[largest]
        own += piece

    def add(future: Result) -> torch.Tensor:
        future.value()
        for parameter, piece in in_use:
            piece += state.mean.get(parameter, 0)
            state.mean[parameter] = piece.clone()
            if not piece.isfinite().all():
                del state.own[parameter], state.mean[parameter]
        return bucket.buffer()

    return average_of(bucket.buffer(), state.group).then(add)


MUTANTS = [
    Mutant(
        "ef21",
        ("11.6",),
        "compressed(feedback=ef21, delta=0.25), rescaled(call=rescale)",
        f"{__name__}:{state}",
    )
    for state in ("OfTheNextStep", "OfTheLastStep")
]
