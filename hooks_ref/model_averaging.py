"""Averaging of parameters every few steps, for training loops that do not average all gradients.

With ``x_r`` the parameters of rank ``r``, ``G`` the group and step ``t``, counted from 0 by the
calls of ``average_parameters``,

    PeriodicModelAverager       x_r <- mean over G of x        at t = w, w + p, w + 2 p, ...
    HierarchicalModelAverager   x_r <- mean over S_i(r) of x   at t >= w that p_i divides; the
                                                               largest of several such p_i counts

with ``w`` warm-up steps, a period ``p``, and groups ``S_i`` whose sizes are given beside their
periods; the last group is ``G``. A call that does not average costs nothing. All ranks make this
call in every step, after ``optimizer.step()``.

The parameters that have a gradient on some rank of the group are averaged; ranks exchange flags for
this beside the values. A frozen parameter has no gradient and is left alone; a parameter that only
this rank did not use is averaged. Each parameter is counted once, even if it is given several
times, and is written in place: views of it, and references of an optimizer or DDP, stay valid.

Source: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (periodic
averaging after a warm-up, section 4; hierarchical, appendix D); torch documentation, "Model
Averaging" (names, signatures, schedules).
"""

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hooks_ref._state import check_group, check_int, existing_group

Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
T = TypeVar("T", bound=torch.Tensor)
# Bytes of one collective. The next chunk is copied together while this collective is under way.
CHUNK = 32 * 1024 * 1024


class ModelAverager(ABC):
    """Base of the averagers.

    Args:
        process_group: the group to average over; None is the default group, which need not exist
            yet. A rank outside of the group passes the value that ``new_group`` has returned there;
            its averager counts steps, and averages nothing.

    Attributes:
        step: number of calls so far, with or without averaging; a checkpoint has to keep it.

    Raises:
        TypeError: ``process_group`` is neither a group nor None.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = (
            check_group(process_group) if is_member(process_group) else process_group
        )
        self.step = 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The group itself, looked up at each use. Raises: RuntimeError if there is none yet."""
        return existing_group(self.process_group)

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Average ``params`` if an average is due in this step; then count the step.

        Args:
            params: parameters of any shapes and dtypes, or an optimizer's ``param_groups``; the
                same on all ranks.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain data and tensors."""
        return {"step": self.step}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of ``state_dict``.

        Raises:
            KeyError: ``saved`` has no count of steps.
        """
        self.step = check_int("step", saved["step"], 0)


class PeriodicModelAverager(ModelAverager):
    """Averages over the group every ``period`` steps, first at step ``warmup_steps``.

    Args:
        period: steps from one average to the next, at least 1.
        warmup_steps: steps before the first average, at least 0; DDP or its hook averages the
            gradients of these steps.
        process_group: the group to average over; None is the default group.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(process_group)
        self.period = check_int("period", period, 1)
        self.warmup_steps = check_int("warmup_steps", warmup_steps, 0)
        if period == 1 and type(self) is PeriodicModelAverager:
            warnings.warn(
                "period: 1 averages parameters in every step; averaging gradients costs the same",
                stacklevel=2,
            )

    def average_parameters(self, params: Parameters) -> None:
        if self.is_due():
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1

    def is_due(self) -> bool:
        """Return whether this step averages; never on a rank outside of the group."""
        return (
            is_member(self.process_group)
            and self.step >= self.warmup_steps
            and (self.step - self.warmup_steps) % self.period == 0
        )


class HierarchicalModelAverager(ModelAverager):
    """Averages over small groups often, and over larger groups less often.

    If several groups are due in one step, only the largest is averaged. Groups of one size are
    neighbours in ``process_group``: of 8 ranks, groups of 2 have the places 0 and 1, 2 and 3, 4 and
    5, 6 and 7. All ranks make the groups together, in the first call that needs a group of this
    size.

    Args:
        period_group_size_dict: group sizes by period. Periods ascend, and no size is smaller than
            the one before it: ``{2: 4, 8: 16}`` averages over groups of 4 every two steps, and over
            all 16 ranks every eight. Each size divides the next; the last is the size of
            ``process_group``.
        warmup_steps: steps before the first average, at least 0. Periods still count from step 0.
        process_group: the largest group; None is the default group.

    Raises:
        TypeError, ValueError: an argument is out of its range, or periods and sizes do not ascend;
            the message names the reason.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        self.warmup_steps = check_int("warmup_steps", warmup_steps, 0)
        self.period_group_size_dict = sizes = dict(period_group_size_dict or {})
        if not sizes:
            raise ValueError("period_group_size_dict: group sizes by period; got none")
        for period, size in sizes.items():
            check_int("period_group_size_dict: a period", period, 1)
            check_int("period_group_size_dict: a group size", size, 2)
        if list(sizes) != sorted(sizes) or list(sizes.values()) != sorted(sizes.values()):
            raise ValueError(
                f"period_group_size_dict: periods and group sizes ascend together; got {sizes}"
            )
        if any(larger % smaller for smaller, larger in itertools.pairwise(sizes.values())):
            raise ValueError(
                f"period_group_size_dict: each group size divides the next; got {sizes}"
            )
        self._groups: dict[int, dist.ProcessGroup] = {}

    def average_parameters(self, params: Parameters) -> None:
        size = self.size_due()
        if size:
            average_parameters_or_parameter_groups(params, self._group_of(size))
        self.step += 1

    def size_due(self) -> int:
        """Return the size of the groups that this step averages over.

        It is 0 if the step does not average, and on a rank outside of the process group.

        Raises:
            ValueError: the largest group is not the process group.
        """
        if not is_member(self.process_group):
            return 0
        largest = max(self.period_group_size_dict.values())
        if largest != self.group.size():
            raise ValueError(
                f"period_group_size_dict: the last group is all {self.group.size()} ranks "
                f"of the process group; got {largest}"
            )
        if self.step < self.warmup_steps:
            return 0
        sizes = self.period_group_size_dict
        return max((sizes[period] for period in sizes if self.step % period == 0), default=0)

    def _group_of(self, size: int) -> dist.ProcessGroup:
        """Return this rank's group of ``size`` ranks."""
        if size == self.group.size():
            return self.group
        if size not in self._groups:
            ranks = dist.get_process_group_ranks(self.group)
            backend = dist.get_backend_config(self.group)
            first = self.group.rank() // size * size
            self._groups[size] = dist.new_group(
                ranks[first : first + size], backend=backend, use_local_synchronization=True
            )
        return self._groups[size]


def average_parameters(
    params: Iterable[torch.Tensor], process_group: dist.ProcessGroup | None
) -> None:
    """Set each parameter to its mean over the group, in place, in its own dtype.

    Returns when this is done, and at once on a rank outside of the group. The values are divided
    before they are summed, so that a sum overflows only if the mean would.

    Args:
        params: dense parameters of any shapes, and of floating-point or complex dtypes, the same in
            number, shape and dtype on all ranks; may be empty.
        process_group: the group; None is the default group.

    Raises:
        RuntimeError: there is no process group yet.
    """
    if is_member(process_group):
        _average(_each_once(params), None, existing_group(process_group))


def is_member(process_group: dist.ProcessGroup | None) -> bool:
    """Return whether this rank is a member of the group; None is the default group.

    ``torch.distributed.new_group`` returns no group on ranks outside of it, but a value that says
    so.
    """
    return process_group != dist.GroupMember.NON_GROUP_MEMBER


@torch.no_grad()
def _average(
    parameters: Sequence[torch.Tensor],
    used: Sequence[bool] | None,
    process_group: dist.ProcessGroup,
) -> None:
    """Set each parameter that some rank uses to its mean over the group.

    Args:
        parameters: distinct parameters.
        used: whether this rank uses each of the parameters; None averages all of them.
        process_group: the group, with this rank as a member.
    """
    under_way: list[tuple[dist.Work, list[torch.Tensor], list[torch.Tensor]]] = []
    for chunk in chunks(parameters):
        flat = chunk[0].new_empty(sum(part.numel() for part in chunk))
        parts = list(flat.split([part.numel() for part in chunk]))
        for part, sent in zip(chunk, parts, strict=True):
            # One pass; a copy and a division would be two.
            torch.div(part, process_group.size(), out=sent.view(part.shape))
        under_way.append((dist.all_reduce(flat, group=process_group, async_op=True), parts, chunk))
    left_out: set[torch.Tensor] = set()
    if used and parameters:
        flags = torch.tensor(used, dtype=torch.uint8, device=parameters[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=process_group)
        left_out = {
            parameter
            for parameter, is_used in zip(parameters, flags.tolist(), strict=True)
            if not is_used
        }
    for work, means, chunk in under_way:
        work.wait()
        for part, mean in zip(chunk, means, strict=True):
            if part not in left_out:
                part.copy_(mean.view(part.shape))


def get_params_to_average(params: Parameters) -> list[torch.nn.Parameter]:
    """Return the parameters that have a gradient, each once, in their given order.

    Args:
        params: parameters, or parameter groups: dicts with parameters under ``"params"``. It may be
            an iterator.

    Raises:
        TypeError: an element of ``params`` is neither.
    """
    return [parameter for parameter in all_parameters(params) if parameter.grad is not None]


def average_parameters_or_parameter_groups(
    params: Parameters, process_group: dist.ProcessGroup | None
) -> None:
    """Set each parameter that has a gradient on some rank to its mean over the group, in place.

    Returns at once on a rank outside of the group.

    Args:
        params: parameters, or parameter groups; the same on all ranks of the group.
        process_group: the group; None is the default group.

    Raises:
        TypeError: an element of ``params`` is neither.
        RuntimeError: there is no process group yet.
    """
    if is_member(process_group):
        parameters = trainable_parameters(params)
        used = [parameter.grad is not None for parameter in parameters]
        _average(parameters, used, existing_group(process_group))


def used_parameters(
    params: Parameters, process_group: dist.ProcessGroup
) -> dict[int, torch.nn.Parameter]:
    """Return the parameters that have a gradient on some rank, by their place in ``params``.

    All ranks of the group get the same places.
    """
    parameters = trainable_parameters(params)
    if not parameters:
        return {}
    used = torch.tensor(
        [parameter.grad is not None for parameter in parameters],
        dtype=torch.uint8,
        device=parameters[0].device,
    )
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=process_group)
    return {
        place: parameter
        for place, (parameter, is_used) in enumerate(zip(parameters, used.tolist(), strict=True))
        if is_used
    }


def all_parameters(params: Parameters) -> list[torch.nn.Parameter]:
    """Return the parameters, or those of parameter groups, each once, in their given order.

    Raises:
        TypeError: an element of ``params`` is neither.
    """
    found: list[torch.nn.Parameter] = []
    for entry in params:
        if isinstance(entry, torch.nn.Parameter):
            found.append(entry)
        elif isinstance(entry, dict) and "params" in entry:
            found.extend(entry["params"])
        else:
            raise TypeError(
                f"params: parameters, or parameter groups with 'params'; got {type(entry).__name__}"
            )
    return _each_once(found)


def trainable_parameters(params: Parameters) -> list[torch.nn.Parameter]:
    """Return the parameters that can have a gradient by their dtype, each once, in their given
    order. The dtypes are those of all ranks, while ``requires_grad`` may differ among ranks.

    Raises:
        TypeError: an element of ``params`` is neither a parameter nor a parameter group.
    """
    return [
        parameter
        for parameter in all_parameters(params)
        if parameter.is_floating_point() or parameter.is_complex()
    ]


def _each_once(params: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(params))


def chunks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split tensors into lists of one dtype and device, each of about ``CHUNK`` bytes.

    The order is the same on all ranks that pass tensors of the same shapes and dtypes.
    """
    found: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    held: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if kind not in found or held[kind] >= CHUNK:
            found.setdefault(kind, []).append([])
            held[kind] = 0
        found[kind][-1].append(tensor)
        held[kind] += tensor.numel() * tensor.element_size()
    return [chunk for lists in found.values() for chunk in lists]
