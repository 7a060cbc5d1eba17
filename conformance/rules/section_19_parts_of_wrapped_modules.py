"""Section 19, continued: wrapped modules whose parts differ from the whole."""

from functools import partial

from conformance.judging.oracles.wrapper import require_same_results
from conformance.judging.oracles.wrapper_parts import (
    require_frozen_buffers,
    require_kept_options,
    require_same_parts,
    require_statistics_of_batch,
)
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.wrapper_parts import IDLE, PARTS
from conformance.subjects.claims import Claims

parity_rule = partial(rule, reads_all_runs=True, baseline="vanilla", since="2.0")


@parity_rule(
    "19.40",
    "Parts of a block have modes and options of their own",
    on=(PARTS,),
    owns=(PARTS,),
    needs=("19.2", "19.23"),
    source="torch documentation, torch.nn.Module.train: sets the mode of all submodules; detectors "
    "freeze the statistics of batch norm by eval() of each norm, as in torchvision's and mmcv's "
    "norm_eval; torch.nn.BatchNorm1d: momentum and eps, and a momentum of None for an average",
    remedy="module.train(mode), or child.train(mode), around the forward that runs again: it sets "
    "the mode of all parts; leave modes and options alone, or keep and restore those of each part "
    "of module.modules(), for each forward. An option that changes for good is changed in wrapping",
)
def parts(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Norms with running statistics, dropouts and rows of layers, at any depth inside a block, may
    be in another mode than the block, as after norm.eval(). Outputs and gradients are those without
    the wrapper. The statistics of a norm in evaluation mode stay as they are; those of a norm in
    training mode take in the batch of the step, and no other values. Each part has the mode and the
    options after a step that it had before it: momentum and eps of norms, the share of dropout.

    For each of six steps the mode of each block is drawn, and that of each part down to the third
    row of layers. One norm at least trains, and one does not. One or two of six norms have a
    momentum of None, and each other one has a momentum of 0.01 to 0.5, which is drawn; eps is
    10**-6 to 10**-2. The batch may count several times in statistics, as it does if the forward
    runs again, or half as much as it does without the wrapper: a right momentum for two updates is
    1 - sqrt(1 - momentum). The network is in training mode in all steps but one, which is drawn. It
    is evaluated before some steps, and between forward and backward in others; then the trainer
    sets all modes again. Three steps have dropout, whose share is drawn. Their statistics are not
    compared, since another forward may draw other masks; nor are their gradients, with the claim
    draws_anew.
    """
    require_same_parts(runs, claims, found)
    require_frozen_buffers(runs, found)
    require_kept_options(runs, found)
    require_statistics_of_batch(runs, found)


@parity_rule(
    "19.41",
    "Parts that a step leaves out have no gradient",
    on=(IDLE,),
    owns=(IDLE,),
    needs=("19.4", "19.23"),
    source="torch documentation, torch.optim.Optimizer.zero_grad: optimizers behave differently if "
    "a gradient is 0 or None, since they skip the parameter if it is None; torch.autograd.grad: "
    "allow_unused",
    remedy="a custom Function that takes all parameters as inputs, and returns zeros for those "
    "that the forward has not used: return None, as torch.autograd.grad(..., allow_unused=True) "
    "does. Weight decay and moments of an optimizer move a parameter whose gradient is zeros",
)
def idle(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A parameter that the forward of a step has not used has no gradient, as without the wrapper,
    and not one of zeros.

    Three blocks have three branches each, such as experts; a step uses one of them. It is drawn
    for each step, and given by position, by keyword or in an attribute of the block. Another block
    skips a layer in half of the steps, and a head in half of them.
    """
    require_same_results(runs, found)
