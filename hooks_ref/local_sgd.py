"""Post-local SGD: average over all ranks for a while, then over one machine's ranks, or not at all.

With ``g_r`` the bucket of rank ``r``, ``W`` ranks in ``process_group`` and ``S(r)`` the ranks of
``r``'s subgroup, step ``t``, counted from 0, gives rank ``r``

    t <  start_localSGD_iter    sum_q (g_q / W)             over the process group
    t >= start_localSGD_iter    sum_q (g_q / |S(r)|)        over q in S(r), with
                                                            post_local_gradient_allreduce
                                g_r                         without it: no communication

From then on replicas of different subgroups drift apart: the hook is one half of the algorithm. The
other half belongs to the training loop, which averages the *parameters* over all ranks every few
steps, after ``optimizer.step()`` (for example with torch's ``PeriodicModelAverager``, with
``warmup_steps`` equal to ``start_localSGD_iter``). Each bucket is at most one asynchronous
collective.

If ``subgroup`` is None, it is made at the first local step: the ranks of the process group on the
same machine, by host name, which the ranks exchange; or the process group itself if all ranks are
on one machine. This one call of the hook blocks, on every rank at the same step; it needs no
accelerator. Pass a subgroup if several machines share a host name, or if the group needs another
timeout than the backend's default.

Source: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020
(post-local SGD; hierarchical if subgroups average gradients); torch documentation, "DDP
Communication Hooks".
"""

import socket
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hooks_ref._state import HookState, check_bool, check_int, savable
from hooks_ref.debugging_hooks import noop_hook
from hooks_ref.default_hooks import allreduce_hook


@savable
class PostLocalSGDState(HookState):
    """State of :func:`post_localSGD_hook`.

    ``iter``, the completed steps, also counts steps after ``start_localSGD_iter``, unlike torch's.
    Only ``iter`` changes, and it is saved with the arguments. Groups are not saved, so set
    ``process_group`` and ``subgroup`` after loading unless they are the default ones.

    Args:
        process_group: the group to average over at first; None is the default group.
        subgroup: the group to average over afterwards, with this rank as a member; None is the
            ranks of this machine. If ``process_group`` is smaller than the default group, torch can
            make that subgroup only if all its ranks are members of equally many groups, and times
            out otherwise.
        start_localSGD_iter: steps of averaging over ``process_group``, at least 0.
        post_local_gradient_allreduce: average over ``subgroup`` afterwards; otherwise every rank
            keeps its own gradient.

    Raises:
        TypeError, ValueError: an argument is out of its range; the message names it.
    """

    _unsaved: ClassVar[dict[str, Callable[[], Any]]] = {
        **HookState._unsaved,
        "subgroup": lambda: None,
    }

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        super().__init__(process_group)
        if subgroup is not None and not isinstance(subgroup, dist.ProcessGroup):
            raise TypeError(
                f"subgroup: a ProcessGroup with this rank as a member, or None; got {subgroup!r}"
            )
        self.subgroup = subgroup
        self.start_localSGD_iter = check_int("start_localSGD_iter", start_localSGD_iter, 0)
        self.post_local_gradient_allreduce = check_bool(
            "post_local_gradient_allreduce", post_local_gradient_allreduce
        )


def post_localSGD_hook(
    state: PostLocalSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over all ranks in the first steps, then over the subgroup.

    The change comes when ``state.start_localSGD_iter`` steps are complete.

    Args:
        state: made once per DDP model, with the same arguments on all ranks but for the subgroup.
        bucket: one bucket of gradients; its buffer has shape ``[numel]``, or is a sparse tensor.

    Returns:
        A future of the mean: the bucket's own buffer, shape ``[numel]``; from
        ``state.start_localSGD_iter`` on the same bits only within a subgroup.
    """
    local = state.iter >= state.start_localSGD_iter
    state.maybe_increase_iter(bucket)
    if not local:
        return allreduce_hook(state.group, bucket)
    if not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    if state.subgroup is None:
        state.subgroup = _ranks_of_this_machine(state.group)
    return allreduce_hook(state.subgroup, bucket)


def _ranks_of_this_machine(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of the ranks in ``group`` that have this rank's host name.

    Every rank of ``group`` has to call this.
    """
    names = [""] * group.size()
    dist.all_gather_object(names, socket.gethostname(), group=group)
    machines: dict[str, list[int]] = defaultdict(list)  # in the order of ranks: the same on all
    for rank, name in enumerate(names):
        machines[name].append(dist.get_global_rank(group, rank))
    if len(machines) == 1:
        return group
    if group.size() == dist.get_world_size():
        return dist.new_subgroups_by_enumeration(list(machines.values()))[0]
    # Processes outside the group do not come here: make this machine's subgroup without them.
    return dist.new_group(machines[socket.gethostname()], use_local_synchronization=True)
