"""Section 17: joins in the loops of real programs: settings of torch, groups, nested contexts."""

from conformance.judging.oracles.join_loops import require_modes
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.joins_in_loops import MODES
from conformance.subjects.claims import Claims


@rule(
    "17.31",
    "Modes of torch and of modules stay as they are",
    on=(MODES,),
    owns=(MODES,),
    needs=("17.9", "17.10", "17.24"),
    since="1.6",
    source="torch documentation, Module.eval: the same as train(False), for all parts; Locally "
    "disabling gradient computation; torch.distributed.algorithms.join, Join.__exit__, which calls "
    "hooks in the modes of its caller",
    remedy="a call of train() or eval(); torch.no_grad(), inference_mode() or autocast() around "
    "the calls of hooks, or around the body",
)
def modes(run: Run, claims: Claims, found: Found) -> None:
    """In the body of a context, in main and post hooks, and after the context, modes of torch and
    the mode of training of every module are those of the code around the context.

    Modes of torch are those of autograd and autocast, the default dtype and device, deterministic
    algorithms and the number of threads. In four contexts the code around has drawn ones. Each
    module of a DDP model is in a drawn mode of training, so that some parts are frozen. The nine
    contexts include one that an exception ends, one with throw_on_early_termination, and a disabled
    one. A joinable has a joinable of the kit beside it, which reads the modes; a join must not
    change the modes of the joinable's own modules.
    """
    require_modes(run, found)
