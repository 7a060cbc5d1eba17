"""Training on uneven inputs. Two shapes of subject, told apart by what the target is:

- a join context, as ``torch.distributed.algorithms.join.Join`` is: ``Join(joinables, enable=True, throw_on_early_termination=False,
  **kwargs)``, with a static method ``notify_join_context(joinable)``. It is driven with joinables of the kit, and with torch's
  DistributedDataParallel and ZeroRedundancyOptimizer.
- a joinable: what makes an object that has ``join_hook``, on each rank, with ``process_group``, ``rank``, ``world_size`` or
  ``device`` where its signature names them. One step of it is ``joinable()``, or ``joinable.step()`` where it cannot be called.
  It is run in torch's context.

A run is some contexts, one after another; what a record calls a step is a context there. It claims nothing.
"""

from conformance.scenarios.joinable import SCENARIOS
from conformance.subjects.kinds._kind import Kind

JOINABLE = Kind(
    "joinable",
    "a join context, as torch's Join, or a joinable",
    ("17",),
    reference="hooks_ref:Join",
    scenarios=SCENARIOS,
    claims={},
    default_claims=lambda arguments: "",
    bound=True,
)
