"""Communication hooks, registered with ``DistributedDataParallel.register_comm_hook``."""

from conformance.scenarios.hook import ALL
from conformance.subjects.kinds._kind import Kind

HOOK = Kind(
    "hook",
    "a communication hook",
    (*map(str, range(1, 14)), "20", "21"),
    reference="hooks_ref:allreduce_hook",
    scenarios=ALL,
    claims={},
    default_claims=lambda arguments: "exact",
    default_reason="nobody: exact is the default",
    searches_claims=True,
)
