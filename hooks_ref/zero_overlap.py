"""Shard the optimizer over the ranks, and step it inside the hook.

``ZeroRedundancyOptimizer(..., overlap_with_ddp=True)`` assigns every parameter of every bucket to
one rank, its owner. Only the owner keeps the optimizer's state of the parameter. With ``theta_b``
the parameters of bucket ``b`` and ``hook`` any communication hook,

    g_b = hook(bucket b)                                       on every rank
    theta_b, s <- optimizer(theta_b, g_b, s)                   on the owners, each its own part
    broadcast theta_b                                          from the owners, each its own part

so that after ``backward()`` the model equals that of vanilla DDP after ``optimizer.step()``, bit
for bit if the optimizer's functional form gives the same bits. ``hook_with_zero_step`` begins the
second and third lines when the last bucket is there, to keep out of the way of backward;
``hook_with_zero_step_interleaved`` begins the lines of a bucket when it is reduced.

Either way buckets take turns: a bucket's turn comes when it is reduced and the bucket before it has
started its broadcasts. So all ranks start broadcasts in the same order, in any thread, and on a
group of their own, so that DDP's collectives cannot come between. For this reason it works on Gloo,
for which torch's own hooks are refused. A bucket's future completes when its broadcasts are
complete; DDP's own wait at the end of backward is the only one.

The first two steps (three with ``static_graph``) average gradients and leave the parameters alone:
DDP regroups its buckets after the first (second), and the next step is needed to learn them. The
limits of :mod:`hooks_ref.optimizer_overlap` for clipping, accumulation and failures hold here too.

The optimizer has no public interface for this: as torch's own hooks do, these use its
``_overlap_info``, ``_init_zero_for_overlap``, ``_bucket_assignments_per_rank`` and ``_local_step``,
and DDP's ``_has_rebuilt_buckets``. So its limits stay: one parameter group, parameters of one
dtype, no saving of the optimizer's state.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, section 5.1 (P_os); torch documentation, ``ZeroRedundancyOptimizer``, and
``torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook``.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hooks_ref._buckets import gradient, pieces, shaped
from hooks_ref._collectives import new_future, on_own_stream, second_group, wait_for_all
from hooks_ref._state import check_bool
from hooks_ref.default_hooks import Hook

if TYPE_CHECKING:
    # This import compiles every functional optimizer, with warnings.
    from torch.distributed.optim import ZeroRedundancyOptimizer


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: "ZeroRedundancyOptimizer",
    shard_buckets: bool = False,
) -> Hook:
    """Make the hook that runs ``hook`` on every bucket, and ``zero``'s step after the last one.

    Every rank of ``zero``'s group has to call this function, which makes a group for the
    broadcasts.

    Args:
        hook: a communication hook ``(state, bucket) -> Future[Tensor]``.
        ddp: the model that the hook is registered on; only a weak reference is kept.
        zero: its optimizer, made with ``overlap_with_ddp=True``; the trainer does not step it. A
            learning rate that is set in its ``param_groups``, for example by a schedule, holds from
            the next step on.
        shard_buckets: share a bucket out among owners by size, instead of one owner per bucket in
            turn. ``zero`` raises an AssertionError in the third step if a bucket falls into more
            parts than there are ranks.

    Returns:
        A hook with the state of ``hook``. Its future holds the result of ``hook``, in the bucket's
        own dtype, once the bucket's parameters are updated on this rank. The hook raises
        RuntimeError under ``Join``.

    Raises:
        TypeError: an argument has another type; the message names it.
        ValueError: ``zero`` does not overlap or has several parameter groups; or ``ddp`` looks for
            unused parameters at every step, so that its buckets never settle and no parameter would
            ever be updated.
    """
    return _Overlap(hook, ddp, zero, shard_buckets, interleaved=False).hook_with_zero


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: "ZeroRedundancyOptimizer",
    shard_buckets: bool = False,
) -> Hook:
    """Make the hook that runs ``hook`` on every bucket, and ``zero``'s step of the bucket.

    The step of a bucket begins as soon as the bucket is reduced.

    Arguments, result and errors are those of :func:`hook_with_zero_step`.
    """
    return _Overlap(hook, ddp, zero, shard_buckets, interleaved=True).hook_with_zero


@dataclass
class _Turn:
    """One bucket of the current step.

    Attributes:
        bucket: the bucket.
        dtype: the dtype of its buffer.
        reduced: the future of the inner hook.
        updated: the future that DDP gets.
    """

    bucket: dist.GradBucket
    dtype: torch.dtype
    reduced: torch.futures.Future[torch.Tensor]
    updated: torch.futures.Future[torch.Tensor]


class _Overlap:
    """The hook, its knowledge of the buckets, and the turns of the current step."""

    def __init__(
        self,
        hook: Hook,
        ddp: DistributedDataParallel,
        zero: "ZeroRedundancyOptimizer",
        shard_buckets: bool,
        interleaved: bool,
    ) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(f"ddp: a DistributedDataParallel; got {ddp!r}")
        if not isinstance(zero, ZeroRedundancyOptimizer):
            raise TypeError(f"zero: a ZeroRedundancyOptimizer; got {zero!r}")
        if not zero._overlap_with_ddp:
            raise ValueError("zero: made without overlap_with_ddp=True")
        if len(zero.param_groups) != 1:
            raise ValueError(f"zero: one parameter group; got {len(zero.param_groups)}")
        if ddp.find_unused_parameters and not ddp.static_graph:
            raise ValueError(
                "ddp: made with find_unused_parameters=True and without static_graph=True, "
                "so that its buckets never settle"
            )
        self.hook = hook
        self.ddp = weakref.ref(ddp)
        self.zero = zero
        self.interleaved = interleaved
        zero._overlap_info.shard_buckets = check_bool("shard_buckets", shard_buckets)
        self.group = second_group(zero.process_group)
        self.buckets_known = self.initialized = False
        self.turns: list[_Turn] = []
        # The future of the last turn, which completes when its broadcasts are started.
        self.last_turn: torch.futures.Future[None] | None = None

    def hook_with_zero(
        self, state: Any, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        ddp = self.ddp()
        if ddp is not None and ddp._join_config.enable:
            raise RuntimeError(
                "under Join: a rank that has run out of inputs takes no part in steps "
                "of the sharded optimizer"
            )
        buffer = bucket.buffer()
        reduced = self.hook(state, bucket)
        if not self._settled(bucket):
            return reduced
        if bucket.index() == 0:
            self.turns = []
            self.last_turn = None
        self.turns.append(_Turn(bucket, buffer.dtype, reduced, new_future(buffer)))
        updated = self.turns[-1].updated
        if self.interleaved or bucket.is_last():
            for turn in self.turns:
                self._line_up(turn)
            self.turns = []
        return updated

    def _settled(self, bucket: dist.GradBucket) -> bool:
        """Return whether ``zero`` has assigned owners; learn the buckets in the step before."""
        if self.initialized:
            return True
        ddp = self.ddp()
        if ddp is None or not ddp._has_rebuilt_buckets:
            return False
        info = self.zero._overlap_info
        index = bucket.index()
        if index == 0 and self.buckets_known:
            everything = [p for parameters in info.params_per_bucket for p in parameters]
            info.total_size = sum(parameter.numel() for parameter in everything)
            before = [(parameter, parameter.data) for parameter in everything]
            self.zero._init_zero_for_overlap()
            # zero has laid parameters out C-contiguously, but DDP uses their former layout.
            for parameter, data in before:
                parameter.data = shaped(parameter.data.view(-1), data).copy_(data)
            self.initialized = True
            return True
        if index == 0:
            info.params_per_bucket = []
        info.params_per_bucket.append(bucket.parameters())
        self.buckets_known = bucket.is_last()
        return False

    def _line_up(self, turn: _Turn) -> None:
        """Take a turn when the bucket is reduced and the turn before is over."""

        def take(arrived: torch.futures.Future[list[torch.futures.Future[Any]]]) -> None:
            wait_for_all(arrived)  # raises the error of the reduction, or of a turn before
            # The result of a compressing hook may be in half precision.
            self._local_step(turn.bucket, turn.reduced.value().to(turn.dtype))
            broadcasts = [work.get_future() for work in self._start_broadcasts(turn.bucket.index())]
            torch.futures.collect_all(broadcasts).then(_or_fail(turn, finish))

        def finish(through: torch.futures.Future[list[torch.futures.Future[Any]]]) -> None:
            wait_for_all(through)
            turn.updated.set_result(turn.reduced.value().to(turn.dtype))

        needed: list[torch.futures.Future[Any]] = [turn.reduced]
        if self.last_turn is not None:
            needed.append(self.last_turn)
        self.last_turn = torch.futures.collect_all(needed).then(_or_fail(turn, take))

    def _local_step(self, bucket: dist.GradBucket, flat: torch.Tensor) -> None:
        """Step the parameters of the bucket that this rank owns."""
        zero = self.zero
        owned = zero._bucket_assignments_per_rank[zero.rank].get(bucket.index())
        if owned is None:
            return
        if flat.is_sparse:
            gradients = [flat]
        else:
            gradients = list(map(gradient, pieces(bucket, flat), bucket.parameters()))
        group = zero.optim.param_groups[0]
        defaults = zero.optim.defaults
        # Functional optimizers read their defaults instead of the group.
        defaults.update(
            {name: value for name, value in zero.param_groups[0].items() if name in defaults}
        )
        # The group has only the owned parameters meanwhile, because the functional Adagrad takes no
        # None in place of a gradient.
        everything = group["params"]
        group["params"] = owned.parameters
        try:
            zero._local_step(gradients[owned.offset :][: len(owned.parameters)])
        finally:
            group["params"] = everything

    def _start_broadcasts(self, index: int) -> list[dist.Work]:
        """Send every owner's part of the bucket's parameters, in the order of ranks."""
        parts = [
            (rank, owned[index].tensor)
            for rank, owned in enumerate(self.zero._bucket_assignments_per_rank)
            if index in owned
        ]
        return [
            dist.broadcast(
                part, src=dist.get_global_rank(self.group, rank), group=self.group, async_op=True
            )
            for rank, part in parts
        ]


def _or_fail(turn: _Turn, callback: Callable[..., None]) -> Callable[..., None]:
    """Make a callback that also fails the turn's future with the error of ``callback``."""

    def guarded(future: torch.futures.Future[Any]) -> None:
        try:
            with on_own_stream(turn.bucket.buffer().device):
                callback(future)
        except Exception as error:
            turn.updated.set_exception(error)
            raise

    return guarded
