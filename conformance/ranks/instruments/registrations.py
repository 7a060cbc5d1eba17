"""Hooks that are registered in a rank, and the observers between them and DDP."""

from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from conformance.torch_versions.private import check_hook

Hook = Callable[..., Any]


class Registrations:
    """Takes the place of ``DistributedDataParallel.register_comm_hook``.

    Attributes:
        hooks: the hooks that were registered on the main model, as they were given.
    """

    def __init__(self) -> None:
        self.hooks: list[Hook] = []

    def watch(
        self,
        is_main: Callable[[DistributedDataParallel], bool],
        observe: Callable[[DistributedDataParallel, Hook], Hook],
    ) -> None:
        """Watch from here on.

        Args:
            is_main: whether a model is the main one. Hooks of others, such as models of the
                subject's own, are not listed.
            observe: returns what is registered in place of a hook.
        """
        ddp_class: Any = DistributedDataParallel
        register = ddp_class.register_comm_hook
        hooks = self.hooks

        def register_comm_hook(ddp: DistributedDataParallel, state: object, hook: Hook) -> None:
            # DDP checks the hook that it is given. The subject's own comes first, so that a refusal
            # is on record.
            check_hook(ddp, hook)
            register(ddp, state, observe(ddp, hook))
            if is_main(ddp):
                hooks.append(hook)

        ddp_class.register_comm_hook = register_comm_hook
