"""Training on uneven inputs. The target names a subject of one of two shapes:

- a join context, as ``torch.distributed.algorithms.join.Join`` is: ``Join(joinables, enable=True,
  throw_on_early_termination=False, **kwargs)``, with a static method
  ``notify_join_context(joinable)``. It runs with joinables of the kit, and with torch's
  DistributedDataParallel and ZeroRedundancyOptimizer.
- a joinable: a class or function that makes an object with ``join_hook`` on each rank. It receives
  those of ``process_group``, ``rank``, ``world_size`` and ``device`` that its signature names. One
  step of the object is ``joinable.step()``, or ``joinable()`` if it has no method ``step``. It
  runs in torch's context.

A run is a sequence of contexts; a step of its record is a context.
"""

from collections.abc import Mapping
from typing import Any

from conformance.scenarios import joins_in_loops, joins_in_parts, joins_in_training
from conformance.scenarios.failing_collectives import JOINABLE as FAILING
from conformance.scenarios.joinable import SCENARIOS
from conformance.scenarios.kinds_in_clusters import JOINABLE as CLUSTERS
from conformance.scenarios.kinds_in_clusters import JOINABLE_NUMBERS as CLUSTERS_OF_NUMBERS
from conformance.scenarios.probes_of_kinds import JOINABLE as PROBE
from conformance.scenarios.probes_of_kinds import maker_for
from conformance.subjects.kinds._claim import min_world_size, table
from conformance.subjects.kinds._kind import Kind


def _default(arguments: Mapping[str, Any]) -> None:
    return None


JOINABLE = Kind(
    "joinable",
    "a join context, as torch's Join, or a joinable",
    ("17",),
    reference="hooks_ref:Join",
    scenarios=(
        *SCENARIOS,
        *joins_in_training.ALL,
        *CLUSTERS,
        *CLUSTERS_OF_NUMBERS,
        *joins_in_loops.ALL,
        *joins_in_parts.ALL,
        *FAILING,
        PROBE,
    ),
    claims=table(min_world_size()),
    default_claims=_default,
    probes=maker_for("joinable", "17.35"),
    bound=True,
)
