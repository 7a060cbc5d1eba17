"""Section 19, continued: the names, states and copies of wrapped modules."""

from conformance.judging.oracles.wrapper import require_compared
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.wrapper import MODULE
from conformance.subjects.claims import Claims


@rule(
    "19.10",
    "A state_dict has the module's keys",
    on=(MODULE,),
    owns=(MODULE,),
    needs=("19.1",),
    source="pytorch test_load_activation_checkpointed_module; torch's ActivationWrapper: loads "
    "into modules that are not wrapped",
    remedy="remove the wrapper's own prefix from keys on saving, and add it on loading; behind the "
    "prefix that the hook is called with, not anywhere in the key. state_dict() of the module has "
    "its extra states, and leaves out buffers that are not persistent: named_buffers() does not",
)
def state(run: Run, claims: Claims, found: Found) -> None:
    """The keys of a state_dict, of the wrapper and of the network around it, are those without the
    wrapper, in any order; a state_dict that is saved with the wrapper loads strictly without it,
    and the reverse. Parameters, buffers and extra states (get_extra_state) have the saved values
    then, and buffers with persistent=False are neither saved nor loaded. The same holds in a module
    that has the name which DDP or torch.compile gives it."""
    require_compared(run, found, "keys: ", "load: ")


@rule(
    "19.11",
    "Its parameters are the module's",
    on=(MODULE,),
    needs=("19.1",),
    source="pytorch test_fqn; torch documentation, torch.nn.Module",
    remedy="a copy of the module or of its parameters; a prefix in named_parameters(); a module in "
    "an attribute that nn.Module does not register",
)
def module(run: Run, claims: Claims, found: Found) -> None:
    """The wrapper is a module with the same parameters, not copies, under the same names; train(),
    eval(), to() and requires_grad_() reach the module inside."""
    require_compared(run, found, "parameters: ", "parameter names: wrapper", "mode: ")


@rule(
    "19.12",
    "Names around it stay the same",
    on=(MODULE,),
    needs=("19.1",),
    level=SHOULD,
    source="torch documentation, torch.nn.Module.named_parameters: names are the keys of the "
    "state_dict",
    remedy="named_modules() of the wrapper, from which a network takes the names of parameters and "
    "buffers",
)
def names(run: Run, claims: Claims, found: Found) -> None:
    """named_buffers() of the wrapper, and named_buffers() and named_parameters() of the network
    around it, give the names of the state_dict, so that optimizer groups and saved optimizer
    states by name fit with and without the wrapper."""
    require_compared(run, found, "buffer names: ", "parameter names: network")


@rule(
    "19.13",
    "Attributes and items are read through it",
    on=(MODULE,),
    needs=("19.1",),
    level=SHOULD,
    source="pytorch test_forward_missing_attributes",
    remedy="__getattr__ and __getitem__ of the wrapper: it forwards the names that it lacks itself",
)
def attributes(run: Run, claims: Claims, found: Found) -> None:
    """Attributes of the module, its submodules, and items of a Sequential can be read from the
    wrapper."""
    require_compared(run, found, "attribute: ")


@rule(
    "19.14",
    "Can be copied and saved",
    on=(MODULE,),
    needs=("19.1", "19.10"),
    level=SHOULD,
    source="torch documentation, torch.save; torch.optim.swa_utils.AveragedModel copies modules",
    remedy="closures over the module, bound methods and locks in the wrapper: a copy keeps those "
    "of the original",
)
def copies(run: Run, claims: Claims, found: Found) -> None:
    """A deep copy is an independent module that computes the same, and torch.save accepts a
    state_dict."""
    require_compared(run, found, "copy: ")
