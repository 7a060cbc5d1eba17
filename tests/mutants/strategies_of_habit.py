"""Mutants of section 16 that take the contexts, steps or ranks of before for all that will come:
passes, dtypes, notes on gradients, groups at rest, and a first rank that is rank 0.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from tests.mutants.buffers_of_integers import _average
from tests.mutants.strategies import _filled, _mean, _then
from tests.mutants.strategies_in_training import _mutants, _restored

Context = AbstractContextManager[None]
State = WeakKeyDictionary[Any, Any]


# ---- Buffers of groups


def _sends_buffers_of(root: Callable[[Any], int]) -> Callable[..., Context]:
    """Return a strategy that sends the buffers of a global rank when a step ends."""

    def strategy(model: Any, is_final_microbatch: bool) -> Context:
        def finish() -> None:
            _average(model)
            for buffer in model.buffers() if model.broadcast_buffers else ():
                dist.broadcast(buffer, root(model), group=model.process_group)

        return _then(model, is_final_microbatch, finish)

    return strategy


_roots: State = WeakKeyDictionary()


def _zero_or_last(model: Any) -> int:
    ranks = dist.get_process_group_ranks(model.process_group)
    return 0 if 0 in ranks else ranks[-1]


def _root_of_first_ddp(model: Any) -> int:
    ranks = dist.get_process_group_ranks(model.process_group)
    root: int = _roots.setdefault(model.module, ranks[0])
    return root if root in ranks else ranks[-1]


sends_buffers_of_rank_0 = _sends_buffers_of(_zero_or_last)
sends_buffers_of_its_first_root = _sends_buffers_of(_root_of_first_ddp)


def _sums_buffers_of(is_root: Callable[[Any], bool]) -> Callable[..., Context]:
    """Return a strategy that clears the buffers of all ranks but one, and adds them up.

    Args:
        is_root: whether this rank keeps its buffers, by its group.
    """

    def strategy(model: Any, is_final_microbatch: bool) -> Context:
        def finish() -> None:
            _average(model)
            for buffer in model.buffers() if model.broadcast_buffers else ():
                # A sum of bools, or of small integers, would have another dtype, or wrap around.
                data = buffer.contiguous().view(-1).view(torch.uint8).clone()
                if not is_root(model.process_group):
                    data.zero_()
                dist.all_reduce(data, group=model.process_group)
                buffer.copy_(data.view(buffer.dtype).view(buffer.shape))

        return _then(model, is_final_microbatch, finish)

    return strategy


def _is_multiple(group: Any) -> bool:
    return dist.get_rank() % group.size() == 0


def _begins_first_block(group: Any) -> bool:
    return dist.get_rank(group) == 0 and dist.get_rank() < group.size()


sums_buffers_of_multiples = _sums_buffers_of(_is_multiple)
sums_buffers_of_the_first_block = _sums_buffers_of(_begins_first_block)


# ---- More passes than before


class _Counted:
    """Average at the end of the backward pass that is taken for the last one of its context."""

    known: ClassVar[State]

    def __init__(self, model: Any, is_final_microbatch: bool) -> None:
        self.model = model
        self.is_ddp = isinstance(model, DistributedDataParallel)
        self.is_final = is_final_microbatch and self.is_ddp
        self.arrived: Counter[torch.Tensor] = Counter()
        self.is_averaged = False
        self.inner = _restored(model, is_final_microbatch, self.finish)
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        self.inner.__enter__()
        if self.is_ddp:
            self.handles = [
                parameter.register_post_accumulate_grad_hook(self.arrives)
                for parameter in self.model.parameters()
                if parameter.requires_grad
            ]

    def __exit__(self, *raised: Any) -> Any:
        for handle in self.handles:
            handle.remove()
        result = self.inner.__exit__(*raised)
        if self.is_ddp:
            self.learn()
        return result

    def arrives(self, parameter: torch.Tensor) -> None:
        self.arrived[parameter] += 1
        if self.is_final and not self.is_averaged and self.seems_complete(parameter):
            self.is_averaged = True
            Variable._execution_engine.queue_callback(self.average)

    @torch.no_grad()
    def average(self) -> None:
        _average(self.model)

    def finish(self) -> None:
        if not self.is_averaged:
            self.average()

    def seems_complete(self, parameter: torch.Tensor) -> bool:
        raise NotImplementedError

    def learn(self) -> None:
        raise NotImplementedError


class AveragesAtTheUsualNumber(_Counted):
    """Expect as many gradients in a context as the one before had."""

    known: ClassVar[State] = WeakKeyDictionary()

    def seems_complete(self, parameter: torch.Tensor) -> bool:
        return self.arrived.total() == self.known.get(self.model)

    def learn(self) -> None:
        self.known[self.model] = self.arrived.total()


class AveragesAfterTheMost(_Counted):
    """Expect as many arrivals of a gradient as any context before had, and at least two."""

    known: ClassVar[State] = WeakKeyDictionary()

    def seems_complete(self, parameter: torch.Tensor) -> bool:
        return self.arrived[parameter] == self.known.get(self.model, 2)

    def learn(self) -> None:
        most = max(self.arrived.values(), default=0)
        self.known[self.model] = max(most, self.known.get(self.model, 2))


class KeepsThoseOfTheFirstContext(_Counted):
    """Average each gradient as it is when it has arrived as often as in the first context."""

    known: ClassVar[State] = WeakKeyDictionary()

    def __init__(self, model: Any, is_final_microbatch: bool) -> None:
        super().__init__(model, is_final_microbatch)
        self.copies: dict[torch.Tensor, torch.Tensor] = {}

    def arrives(self, parameter: torch.Tensor) -> None:
        self.arrived[parameter] += 1
        expected = self.known.get(self.model)
        if self.is_final and expected and self.arrived[parameter] == expected[parameter]:
            self.copies[parameter] = parameter.grad.clone()

    def finish(self) -> None:
        for parameter, copy in self.copies.items():
            if not copy.is_sparse:
                parameter.grad.copy_(copy)
        self.average()

    def learn(self) -> None:
        self.known.setdefault(self.model, self.arrived)


# ---- Dtypes of earlier gradients


_first_dtypes = WeakTensorKeyDictionary()
_last_dtypes = WeakTensorKeyDictionary()


def _through(dtype_of: Callable[[torch.nn.Parameter], torch.dtype]) -> Callable[..., Context]:
    """Return a strategy that sends each gradient in a dtype that it keeps for its parameter."""

    def strategy(model: Any, is_final_microbatch: bool) -> Context:
        def average() -> None:
            for parameter in _filled(model):
                grad = parameter.grad
                dtype = dtype_of(parameter)
                if grad.is_sparse:
                    parameter.grad = _mean(grad, model.process_group)
                else:
                    grad.copy_(_mean(grad.to(dtype, copy=True), model.process_group))

        return _restored(model, is_final_microbatch, average)

    return strategy


def _first_dtype(parameter: torch.nn.Parameter) -> torch.dtype:
    dtype: torch.dtype = _first_dtypes.setdefault(parameter, parameter.grad.dtype)
    return dtype


def _dtype_of_last_step(parameter: torch.nn.Parameter) -> torch.dtype:
    dtype: torch.dtype = _last_dtypes.get(parameter, parameter.grad.dtype)
    _last_dtypes[parameter] = parameter.grad.dtype
    return dtype


sends_in_the_first_dtype = _through(_first_dtype)
sends_in_the_last_dtype = _through(_dtype_of_last_step)


_flats: State = WeakKeyDictionary()


def fills_flat_buffers_of_the_first_step(model: Any, is_final_microbatch: bool) -> Context:
    """Pack gradients into one buffer for each dtype that they had when a step first ended."""

    def average() -> None:
        used = _filled(model)
        kinds = _flats.setdefault(model, WeakTensorKeyDictionary())
        for parameter in used:
            kinds.setdefault(parameter, parameter.grad.dtype)
        for dtype in dict.fromkeys(kinds[one] for one in used):
            some = [one for one in used if kinds[one] == dtype and not one.grad.is_sparse]
            if not some:
                continue
            flat = torch.cat([one.grad.reshape(-1).to(dtype) for one in some])
            _mean(flat, model.process_group)
            parts = flat.split([one.numel() for one in some])
            for one, part in zip(some, parts, strict=True):
                one.grad.copy_(part.view(one.shape))
        for one in used:
            if one.grad.is_sparse:
                one.grad = _mean(one.grad, model.process_group)

    return _restored(model, is_final_microbatch, average)


# ---- Groups at rest


def _but_for(
    resting: Callable[[list[Any]], list[Any]], *, clears: bool = False
) -> Callable[..., Context]:
    """Return a strategy that leaves out parameters that are in groups at rest alone.

    Args:
        resting: returns these groups, of some optimizers.
        clears: whether it drops their gradients.
    """

    def strategy(model: Any, is_final_microbatch: bool, optimizers: list[Any]) -> Context:
        def average() -> None:
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            at_rest = [id(group) for group in resting(optimizers)]
            moving = {
                one for group in groups if id(group) not in at_rest for one in group["params"]
            }
            left_out = {one for group in groups for one in group["params"]} - moving
            for parameter in _filled(model):
                if parameter not in left_out:
                    parameter.grad = _mean(parameter.grad, model.process_group)
                elif clears:
                    parameter.grad = None

        return _restored(model, is_final_microbatch, average)

    return strategy


def _groups_of(optimizers: list[Any]) -> list[Any]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _far_slower(optimizers: list[Any]) -> list[Any]:
    fastest = max(group["lr"] for group in _groups_of(optimizers))
    return [group for group in _groups_of(optimizers) if group["lr"] < 1e-6 * fastest]


def _of_idle_optimizers(optimizers: list[Any]) -> list[Any]:
    idle = [one for one in optimizers if not any(group["lr"] for group in one.param_groups)]
    return _groups_of(idle) if len(idle) < len(optimizers) else []


def _at_zero(optimizers: list[Any]) -> list[Any]:
    groups = _groups_of(optimizers)
    return [group for group in groups if not group["lr"]] if any(g["lr"] for g in groups) else []


def _at_zero_again(optimizers: list[Any]) -> list[Any]:
    again = [group for group in _at_zero(optimizers) if group.get("was_at_rest")]
    for group in _groups_of(optimizers):
        group["was_at_rest"] = not group["lr"]
    return again


leaves_out_slow_groups = _but_for(_far_slower)
leaves_out_idle_optimizers = _but_for(_of_idle_optimizers)
leaves_out_groups_that_rest_on = _but_for(_at_zero_again)
clears_groups_at_rest = _but_for(_at_zero, clears=True)


# ---- Notes that an exception drops


class _Notes:
    """Average the parameters that some rank has noted, in hooks of the contexts of a step."""

    def __init__(self) -> None:
        self.noted: WeakKeyDictionary[Any, set[torch.Tensor]] = WeakKeyDictionary()
        # The notes when each of the last two contexts began.
        self.begins: WeakKeyDictionary[Any, list[set[torch.Tensor]]] = WeakKeyDictionary()

    @contextmanager
    def __call__(self, model: Any, is_final_microbatch: bool) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        noted = self.noted.setdefault(model, set())
        if all(parameter.grad is None for parameter in model.parameters()):
            noted.clear()
        begins = self.begins.setdefault(model, [])
        begins[:] = [*begins[-1:], set(noted)]
        handles = [
            parameter.register_post_accumulate_grad_hook(noted.add)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        try:
            with _then(model, is_final_microbatch, lambda: self.average(model, noted)):
                yield
        except BaseException:
            self.fail(model, noted)
            raise
        finally:
            for handle in handles:
                handle.remove()

    def average(self, model: Any, noted: set[torch.Tensor]) -> None:
        params = list(model.parameters())
        votes = torch.tensor([int(one in noted) for one in params])
        dist.all_reduce(votes, group=model.process_group)
        used = set(_filled(model))
        for parameter, count in zip(params, votes.tolist(), strict=True):
            if count and parameter in used:
                parameter.grad = _mean(parameter.grad, model.process_group)
        # Gradients that are not cleared count in the next step, too.
        model.require_forward_param_sync = True

    def fail(self, model: Any, noted: set[torch.Tensor]) -> None:
        raise NotImplementedError


class _TakesThemForAveraged(_Notes):
    """Drop the notes on gradients that are there, as if the step had ended."""

    def fail(self, model: Any, noted: set[torch.Tensor]) -> None:
        noted.difference_update([one for one in model.parameters() if one.grad is not None])


class _GoesBackTwice(_Notes):
    """Restore the notes of the begin of the context before, and not those of the failed one."""

    def fail(self, model: Any, noted: set[torch.Tensor]) -> None:
        noted.intersection_update(self.begins[model][0])


takes_them_for_averaged = _TakesThemForAveraged()
goes_back_twice = _GoesBackTwice()


MUTANTS = [
    *_mutants("16.24", "sends_buffers_of_rank_0", "sends_buffers_of_its_first_root"),
    *_mutants("16.24", "sums_buffers_of_multiples", "sums_buffers_of_the_first_block"),
    *_mutants("16.27", "AveragesAtTheUsualNumber", "AveragesAfterTheMost"),
    *_mutants("16.27", "KeepsThoseOfTheFirstContext"),
    *_mutants("16.40", "sends_in_the_first_dtype", "sends_in_the_last_dtype"),
    *_mutants("16.40", "fills_flat_buffers_of_the_first_step"),
    *_mutants("16.7", "leaves_out_slow_groups", "leaves_out_idle_optimizers"),
    *_mutants("16.7", "leaves_out_groups_that_rest_on", "clears_groups_at_rest"),
    *_mutants("16.26", "takes_them_for_averaged", "goes_back_twice"),
]
