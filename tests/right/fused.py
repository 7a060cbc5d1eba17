"""Hooks with an optimizer."""

import math

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import STATE, Bucket, Group, Result, State, completed, dense, sizes
from tests.right.sparse import top_k


class Adam:
    """Adam by hand, with moments by parameter.

    The step size is corrected for bias instead of the moments.
    """

    def __init__(
        self,
        process_group: Group,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.group = process_group
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.moments: dict[torch.nn.Parameter, tuple[int, torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
        one, two = self.betas
        start = (0, torch.zeros_like(grad), torch.zeros_like(grad))
        count, m, v = self.moments.get(parameter, start)
        count += 1
        m = one * m + (1 - one) * grad
        v = two * v + (1 - two) * grad * grad.conj()
        self.moments[parameter] = count, m, v
        deviation = v.sqrt() / math.sqrt(1 - two**count)
        parameter -= self.lr / (1 - one**count) * m / (deviation + self.eps)


def _in_shape(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return a bucket's parts as gradients with the memory layout of their parameters."""
    shaped = []
    for parameter, part in zip(bucket.parameters(), flat.split(sizes(bucket)), strict=True):
        part = torch.view_as_complex(part.view(-1, 2)) if parameter.is_complex() else part
        shaped.append(
            torch.empty_like(parameter)
            .as_strided(part.shape, (1,))
            .copy_(part)
            .as_strided(parameter.shape, parameter.stride())
        )
    return shaped


def fused_adam(state: Adam, bucket: Bucket) -> Result:
    """Average, and step Adam with the mean."""
    buffer = dense(bucket)
    if any(parameter.is_complex() for parameter in bucket.parameters()):
        raise TypeError("fused_adam takes no complex parameters")
    dist.all_reduce(buffer.div_(state.group.size()), group=state.group)
    for parameter, grad in zip(bucket.parameters(), _in_shape(bucket, buffer), strict=True):
        state.step(parameter, grad)
    return completed(buffer)


def fused_sgd(state: State, bucket: Bucket) -> Result:
    """Average, and step SGD with weight decay in the callback."""
    buffer = dense(bucket)

    def step(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        mean = fut.value()[0]
        with torch.no_grad():
            for parameter, grad in zip(bucket.parameters(), _in_shape(bucket, mean), strict=True):
                parameter.mul_(1 - 0.1 * 0.01).sub_(grad, alpha=0.1)
        return mean

    return (
        dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
        .get_future()
        .then(step)
    )


def top_k_fused_sgd(state: State, bucket: Bucket) -> Result:
    """Compress to the largest elements with feedback, and step SGD; float32 only."""
    if bucket.buffer().dtype != torch.float32 or any(
        parameter.is_complex() for parameter in bucket.parameters()
    ):
        raise TypeError("top_k_fused_sgd takes float32 parameters only")

    def step(fut: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            for parameter, grad in zip(
                bucket.parameters(), _in_shape(bucket, fut.value()), strict=True
            ):
                parameter -= 0.1 * grad
        return fut.value()

    return top_k(state, bucket).then(step)


class OfEach:
    """An optimizer of torch for each parameter, as ``_apply_optimizer_in_backward`` makes them."""

    def __init__(self, process_group: Group) -> None:
        self.group = process_group
        self.optimizers: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}

    def step(self, parameter: torch.nn.Parameter) -> None:
        if parameter not in self.optimizers:
            self.optimizers[parameter] = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        self.optimizers[parameter].step()


def sgd_of_each(state: OfEach, bucket: Bucket) -> Result:
    """Average, set each .grad in the callback, and step the optimizer of each parameter."""
    buffer = dense(bucket)

    def step(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        mean = fut.value()[0]
        for parameter, grad in zip(bucket.parameters(), _in_shape(bucket, mean), strict=True):
            # Under gradient_as_bucket_view it stays a view, or None on a rank that has not used it.
            is_there = parameter.grad is not None
            if is_there:
                parameter.grad.copy_(grad)
            else:
                parameter.grad = grad
            state.step(parameter)
            if not is_there:
                parameter.grad = None
        return mean

    return (
        dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
        .get_future()
        .then(step)
    )


class Masters:
    """Adam for each parameter, with float32 masters of half precision.

    They are kept between steps, as by apex and DeepSpeed, or cast anew in each.
    """

    def __init__(self, process_group: Group, keeps: bool = True) -> None:
        self.group = process_group
        self.keeps = keeps
        self.masters: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self.optimizers: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}

    def step(self, parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
        is_half = parameter.dtype in (torch.float16, torch.bfloat16)
        if parameter not in self.optimizers:
            master = torch.nn.Parameter(parameter.detach().float()) if is_half else parameter
            self.masters[parameter] = master
            self.optimizers[parameter] = torch.optim.Adam([master], lr=0.01)
        master = self.masters[parameter]
        if is_half and not self.keeps:
            master.data.copy_(parameter)
        before = master.grad
        master.grad = grad.to(master.dtype)
        self.optimizers[parameter].step()
        master.grad = before
        if is_half:
            parameter.data.copy_(master)


class Decays:
    """AdamW for each parameter, without weight decay for biases and the weights of norms."""

    def __init__(self, process_group: Group) -> None:
        self.group = process_group
        self.optimizers: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}

    def step(self, parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
        if parameter not in self.optimizers:
            decay = 0.01 if parameter.dim() >= 2 else 0.0
            self.optimizers[parameter] = torch.optim.AdamW([parameter], lr=0.1, weight_decay=decay)
        before = parameter.grad
        parameter.grad = grad
        self.optimizers[parameter].step()
        parameter.grad = before


def adam_of_masters(state: Masters | Decays, bucket: Bucket) -> Result:
    """Average, and step Adam of torch in float32 or wider."""
    buffer = dense(bucket)

    def step(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        mean = fut.value()[0]
        for parameter, grad in zip(bucket.parameters(), _in_shape(bucket, mean), strict=True):
            state.step(parameter, grad)
        return mean

    return (
        dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
        .get_future()
        .then(step)
    )


def adamw_of_groups(state: Decays, bucket: Bucket) -> Result:
    """Average, and step AdamW of torch, with a weight decay for matrices alone."""
    return adam_of_masters(state, bucket)


class RateOfTrainer:
    """A group, and the trainer's optimizer, which has the learning rate."""

    def __init__(self, process_group: Group, optimizer: torch.optim.Optimizer) -> None:
        self.group = process_group
        self.optimizer = optimizer


class MomentumAtRateOfTrainer(RateOfTrainer):
    """The same with momentum 0.9, and velocities that are saved by the parameter's place."""

    def __init__(self, process_group: Group, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(process_group, optimizer)
        self.velocities: dict[int, torch.Tensor] = {}

    def places(self) -> dict[torch.nn.Parameter, tuple[int, float]]:
        """Return each parameter's place in the optimizer, and its rate."""
        groups = self.optimizer.param_groups
        pairs = [(p, group["lr"]) for group in groups for p in group["params"]]
        return {p: (place, rate) for place, (p, rate) in enumerate(pairs)}

    def state_dict(self) -> dict[int, torch.Tensor]:
        return {place: velocity.clone() for place, velocity in self.velocities.items()}

    def load_state_dict(self, saved: dict[int, torch.Tensor]) -> None:
        self.velocities = {place: velocity.clone() for place, velocity in saved.items()}


def momentum_at_the_rate_of_the_trainer(state: MomentumAtRateOfTrainer, bucket: Bucket) -> Result:
    """Average, and step SGD with momentum at the rate of the trainer's optimizer."""
    buffer = dense(bucket)
    if any(parameter.is_complex() for parameter in bucket.parameters()):
        raise TypeError("momentum_at_the_rate_of_the_trainer takes no complex parameters")
    places = state.places()
    dist.all_reduce(buffer.div_(state.group.size()), group=state.group)
    with torch.no_grad():
        for parameter, grad in zip(bucket.parameters(), _in_shape(bucket, buffer), strict=True):
            place, rate = places[parameter]
            velocity = 0.9 * state.velocities.get(place, torch.zeros_like(grad)) + grad
            state.velocities[place] = velocity
            parameter.sub_(velocity, alpha=rate)
    return completed(buffer)


def sgd_at_the_rate_of_the_trainer(state: RateOfTrainer, bucket: Bucket) -> Result:
    """Average, and step SGD at the rate of the trainer's optimizer."""
    buffer = dense(bucket)
    rates = {p: group["lr"] for group in state.optimizer.param_groups for p in group["params"]}
    dist.all_reduce(buffer.div_(state.group.size()), group=state.group)
    with torch.no_grad():
        for parameter, grad in zip(bucket.parameters(), _in_shape(bucket, buffer), strict=True):
            parameter.sub_(grad, alpha=rates[parameter])
    return completed(buffer)


class Flat:
    """Flat memory for the parameters of each bucket, made in the first step of that bucket.

    It refuses parameters that have been moved out of it, and complex ones.
    """

    def __init__(self, process_group: Group) -> None:
        self.group = process_group
        self.made: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.no_grad()
    def of(self, bucket: Bucket) -> torch.Tensor:
        parameters = bucket.parameters()
        if any(parameter.is_complex() for parameter in parameters):
            raise TypeError("Flat takes no complex parameters")
        key = tuple(map(id, parameters))
        is_new = key not in self.made
        if is_new:
            numel = sum(parameter.numel() for parameter in parameters)
            self.made[key] = torch.empty(numel, dtype=parameters[0].dtype)
        flat = self.made[key]
        for parameter, piece in zip(parameters, flat.split(sizes(bucket)), strict=True):
            place = piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
            if is_new:
                parameter.data = place.copy_(parameter)
            elif parameter.numel() and parameter.data_ptr() != place.data_ptr():
                raise RuntimeError("a parameter has new storage, and is stepped in flat memory")
        return flat


def flat_sgd(state: Flat, bucket: Bucket) -> Result:
    """Average, and step all parameters of a bucket in one operation on flat memory."""
    buffer = dense(bucket)
    flat = state.of(bucket)

    def step(fut: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        mean = fut.value()[0]
        with torch.no_grad():
            flat.sub_(mean, alpha=0.1)
        return mean

    return (
        dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
        .get_future()
        .then(step)
    )


# Sections for a subject with an optimizer of another form.
_STEPS = ("2", "4", "9", "11", "13", "23")

RIGHT = [
    Right("fused_adam", "fused(Adam, lr=0.01)", f"{__name__}:Adam"),
    Right("fused_sgd", "fused(SGD, lr=0.1, weight_decay=0.01)", STATE),
    Right("adam_of_masters", "fused(Adam, lr=0.01)", f"{__name__}:Masters", sections=_STEPS),
    Right(
        "adam_of_masters",
        "fused(Adam, lr=0.01)",
        f"{__name__}:Masters,keeps=False",
        sections=_STEPS,
    ),
    Right(
        "adamw_of_groups",
        "fused(AdamW, lr=0.1, weight_decay=0.01, no_decay=vectors)",
        f"{__name__}:Decays",
        sections=(*_STEPS, "22"),
    ),
    Right("sgd_of_each", "fused(SGD, lr=0.1, momentum=0.9)", f"{__name__}:OfEach"),
    Right("sgd_at_the_rate_of_the_trainer", "fused(SGD, lr=0.1)", f"{__name__}:RateOfTrainer"),
    Right(
        "momentum_at_the_rate_of_the_trainer",
        "fused(SGD, lr=0.1, momentum=0.9), checkpointable",
        f"{__name__}:MomentumAtRateOfTrainer",
        sections=("2", "11", "23"),
    ),
    Right("flat_sgd", "fused(SGD, lr=0.1)", f"{__name__}:Flat"),
    Right("top_k_fused_sgd", "compressed(delta=0.25), fused(SGD, lr=0.1), dtypes(float32)", STATE),
]
