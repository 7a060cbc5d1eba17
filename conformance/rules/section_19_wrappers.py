"""Section 19: wrappers of modules, for activation checkpointing and offloading."""

from conformance.judging.oracles.wrapper import CLOSE, _apart, _compared, _names, _pairs, _ran, _same, _same_unless_reentrant
from conformance.judging.rule import SHOULD, rule
from conformance.judging.side_effects import left_behind
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.wrapper import (
    ACCUMULATED,
    AUTOCAST,
    CALLS,
    CONTAINERS,
    FIRST,
    HOOKED,
    LIMITED,
    MODES,
    MODULE,
    PLAIN,
    RAISES,
    RANDOM,
    STATIC,
    SUBGROUPS,
    TWICE,
    UNUSED,
)
from conformance.subjects.claims import Claims

DOCS = "torch documentation, torch.utils.checkpoint"


@rule(
    "19.1",
    "The same results as without it",
    on=(PLAIN,),
    owns=(PLAIN,),
    reads_all_runs=True,
    baseline="vanilla",
    certifies_machine=True,
    source="Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016: what is computed again is the same",
    remedy="what runs again in the backward, and on which inputs: detached ones have to ask for gradients as the inputs do",
)
def parity(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under DDP, outputs, losses, gradients of parameters and inputs, and the parameters after each step are those of the same
    network without the wrapper.

    They are the same bits where the operations are the same: 19.22. Here they may differ by the roundings that another order of
    operations has in float64. DDP averages by a hook of the kit's that adds up in the order of ranks, so that it does not matter
    where in a bucket a gradient lies.
    """
    _same(runs, found)


@rule(
    "19.2",
    "What runs again draws the same numbers",
    on=(RANDOM,),
    owns=(RANDOM,),
    needs=("19.1",),
    reads_all_runs=True,
    baseline="vanilla",
    source=f"{DOCS}: preserve_rng_state",
    remedy="keep the generator's state of the forward, and set it where the forward runs again: torch.random.fork_rng",
)
def draws(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """With dropout and batch norm inside, outputs and gradients are those without the wrapper.

    The generator is seeded before each step. With the claim draws_anew the output is held to this, and gradients are not.
    """
    _same(runs, found, () if not claims.has("draws_anew") else ("output", "loss"), steps=1 if claims.has("draws_anew") else None)


@rule(
    "19.3",
    "The generator goes on as without it",
    on=(RANDOM,),
    needs=("19.2",),
    reads_all_runs=True,
    baseline="vanilla",
    source=f"{DOCS}: preserve_rng_state; torch.random.fork_rng",
    remedy="put the generator back when the forward has run again; and leave it where the forward has left it after the first time",
)
def generator(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """After each step torch's generator is where it is without the wrapper: what runs again has drawn nothing from it."""
    if claims.has("draws_anew"):
        found.does_not_apply("what runs again draws anew, as it claims: 19.18")
        return
    for name, run, plain in _pairs(runs):
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            for said, right in zip(rank.all("stepped"), other.all("stepped"), strict=False):
                what = f"rank {rank.rank}, step {said['step']} of {name}: it is elsewhere"
                found.require(said["generator"] == right["generator"], "torch's generator where it is without the wrapper", what)


@rule(
    "19.4",
    "Any arguments and results",
    on=(CALLS,),
    owns=(CALLS,),
    needs=("19.1",),
    reads_all_runs=True,
    baseline="vanilla",
    source="pytorch test_checkpoint_wrapper_kwarg_support, test_checkpoint_wrapper_args_kwargs",
    remedy="forward(*args, **kwargs); what is handed on as one of several positions; a tuple for a result; what is no tensor",
)
def calls(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A block takes several inputs, keywords, and other things than tensors, and returns a tuple; part of it can be frozen; and
    a wrapped block can have a wrapped one inside."""
    _same(runs, found)


@rule(
    "19.5",
    "Tensors in containers",
    on=(CONTAINERS,),
    owns=(CONTAINERS,),
    needs=("19.1",),
    reads_all_runs=True,
    baseline="vanilla",
    source=f"{DOCS}: the reentrant variant does not consider tensors in nested structures as taking part in autograd",
    remedy="only tensors among the arguments themselves are tracked; claim reentrant if that is meant",
)
def containers(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Tensors that go in and come out in dicts and lists have their gradients. Not asked of what claims to be reentrant."""
    _same_unless_reentrant(runs, claims, found)


@rule(
    "19.6",
    "An input that asks for no gradient",
    on=(FIRST,),
    owns=(FIRST,),
    needs=("19.1",),
    reads_all_runs=True,
    baseline="vanilla",
    source=f"{DOCS}: with the reentrant variant some input and output needs requires_grad=True",
    remedy="a custom Function whose inputs ask for no gradient is not part of the graph; claim reentrant if that is meant",
)
def first(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A block that gets the network's own input has gradients for its parameters. Not asked of what claims to be reentrant."""
    _same_unless_reentrant(runs, claims, found)


@rule(
    "19.7",
    "DDP's options and groups",
    on=(STATIC, ACCUMULATED, SUBGROUPS),
    owns=(STATIC, ACCUMULATED, SUBGROUPS),
    needs=("19.1",),
    reads_all_runs=True,
    baseline="vanilla",
    source="pytorch test_ddp_checkpointing_twice_static_graph, _weight_sharing, _twice_weight_sharing; DistributedDataParallel.no_sync",
    remedy="what is kept from the last forward alone, on the wrapper itself, where a block is used again before its backward",
)
def options(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Results are the same with static_graph=True, where a block is used twice and shares a weight with a layer outside; with
    micro-batches under no_sync; and on a subgroup, whatever WORLD is."""
    _same(runs, found)


@rule(
    "19.8",
    "Without a static graph too",
    on=(TWICE, UNUSED),
    owns=(TWICE, UNUSED),
    needs=("19.1",),
    reads_all_runs=True,
    baseline="vanilla",
    source="pytorch test_ddp_checkpointing_twice, _unused_params, _dynamic_module; pytorch #52894",
    remedy="a backward of its own inside the backward, which DDP cannot see in the graph; claim reentrant if that is meant",
)
def dynamic(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A block can be used twice, and share a weight, without static_graph; with find_unused_parameters ranks can leave out
    different blocks in every step. Not asked of what claims to be reentrant."""
    _same_unless_reentrant(runs, claims, found)


@rule(
    "19.9",
    "Evaluation, no_grad and autocast",
    on=(MODES, AUTOCAST),
    owns=(MODES, AUTOCAST),
    needs=("19.1",),
    reads_all_runs=True,
    baseline="vanilla",
    source="torch documentation, torch.amp; torch.utils.checkpoint runs again under the autocast of the forward",
    remedy="autocast and grad mode are the thread's, and the backward runs outside of them: keep the forward's, and enter it again",
)
def modes(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """What runs again in a backward outside of autocast runs in the dtype of the forward, and gives the same gradients; in evaluation
    mode and under no_grad between steps outputs are the same, and ask for gradients where they do without the wrapper."""
    _same(runs, found)
    for name, run, plain in _pairs(runs):
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            for said, right in zip(rank.all("evaluated"), other.all("evaluated"), strict=False):
                asks = f"requires_grad={right['asks']} of a block's output"
                found.require(
                    said["asks"] == right["asks"], asks, f"rank {rank.rank}, {said['what']} of {name}: requires_grad={said['asks']}"
                )
        for rank_of, said in _ran(run):
            for phase, dtypes in said["autocast"].items():
                what = f"rank {rank_of}, step {said['step']} of {name}: autocast to {', '.join(dtypes)} in the {phase}"
                wanted = said["autocast"]["forward"]
                found.require(dtypes == wanted, f"autocast to {', '.join(wanted)}, as in the forward", what)


@rule(
    "19.10",
    "A state_dict has the module's keys",
    on=(MODULE,),
    owns=(MODULE,),
    needs=("19.1",),
    source="pytorch test_load_activation_checkpointed_module; torch's ActivationWrapper: loads into modules that are not wrapped",
    remedy="leave the wrapper's own prefix out of keys on saving, and put it before them on loading",
)
def state(run: Run, claims: Claims, found: Found) -> None:
    """The keys of a state_dict, of the wrapper's and of the network's around it, are those without the wrapper; what is saved with
    it loads without it, strictly, and the other way round."""
    _compared(run, found, "keys: ", "load: ")


@rule(
    "19.11",
    "Its parameters are the module's",
    on=(MODULE,),
    needs=("19.1",),
    source="pytorch test_fqn; torch documentation, torch.nn.Module",
    remedy="a copy of the module or of its parameters; a prefix in named_parameters(); a module that is held where nn.Module sees none",
)
def module(run: Run, claims: Claims, found: Found) -> None:
    """It is a module with the same parameters, not copies, by the same names; train(), eval(), to() and requires_grad_() reach the
    module inside."""
    _compared(run, found, "parameters: ", "parameter names: wrapper", "mode: ")


@rule(
    "19.12",
    "Names around it stay too",
    on=(MODULE,),
    needs=("19.1",),
    level=SHOULD,
    source="torch documentation, torch.nn.Module.named_parameters: names are the keys of the state_dict",
    remedy="named_modules() of the wrapper, from which a network takes the names of parameters and buffers",
)
def names(run: Run, claims: Claims, found: Found) -> None:
    """named_buffers() of the wrapper, and both of the network around it, give the names of the state_dict: optimizer groups and
    saved optimizer states that go by name are the same with and without the wrapper."""
    _compared(run, found, "buffer names: ", "parameter names: network")


@rule(
    "19.13",
    "Attributes and items are read through it",
    on=(MODULE,),
    needs=("19.1",),
    level=SHOULD,
    source="pytorch test_forward_missing_attributes",
    remedy="__getattr__ and __getitem__ of the wrapper: what it has none of, the module has",
)
def attributes(run: Run, claims: Claims, found: Found) -> None:
    """Attributes of the module, its submodules, and items of a Sequential can be read from the wrapper."""
    _compared(run, found, "attribute: ")


@rule(
    "19.14",
    "It can be copied and saved",
    on=(MODULE,),
    needs=("19.1", "19.10"),
    level=SHOULD,
    source="torch documentation, torch.save; torch.optim.swa_utils.AveragedModel copies modules",
    remedy="closures over the module, bound methods and locks in the wrapper: a copy goes on with the first one's",
)
def copies(run: Run, claims: Claims, found: Found) -> None:
    """A deep copy is a module of its own that computes the same; a state_dict goes through torch.save."""
    _compared(run, found, "copy: ")


@rule(
    "19.15",
    "Errors come out as they are",
    on=(RAISES,),
    owns=(RAISES,),
    needs=("19.1",),
    reads_all_runs=True,
    baseline="vanilla",
    source="Python documentation, with; torch.autograd.graph.saved_tensors_hooks",
    remedy="what is entered and not left where a forward raises an error: use with, or try and finally",
)
def errors(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """What a block raises comes out of the forward unchanged, nothing stays in force, and the next step is right."""
    for name, run, _ in _pairs(runs):
        _compared(run, found, "error")
        for rank in run.ranks:
            for said in rank.all("stepped"):
                what = f"rank {rank.rank}, step {said['step']} of {name}: hooks on what autograd saves are in force"
                found.require(
                    not said["packs"], "none outside of the forward", what, "they were not left where the forward raised an error"
                )
    _same(runs, found)


@rule(
    "19.16",
    "Hooks fire",
    on=(HOOKED,),
    owns=(HOOKED,),
    needs=("19.1",),
    reads_all_runs=True,
    baseline="vanilla",
    source="torch documentation, torch.nn.Module.register_forward_hook, register_full_backward_hook",
    remedy="call the module, module(...), rather than its forward",
)
def hooks(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Hooks on the wrapper and on modules inside fire as often as without it; forward hooks inside may fire again where the
    forward runs again."""
    _same(runs, found)
    for name, run, plain in _pairs(runs):
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            for said, right in zip(rank.all("fired"), other.all("fired"), strict=False):
                for hook in sorted({*right["hooks"], *said["hooks"]}):
                    often, wanted = said["hooks"].get(hook, 0), right["hooks"].get(hook, 0)
                    what = f"rank {rank.rank}, step {said['step']} of {name}: {hook}: {often} times"
                    found.require(often == wanted, f"{wanted} times", what)


@rule(
    "19.17",
    "It recomputes",
    on=(PLAIN, MODES),
    needs=("19.1",),
    claimed="recomputes",
    source="Chen et al., 2016: every forward inside runs once more, and no activation of inside is kept",
    remedy="a graph that is kept from the first forward; a forward that runs again although there is nothing to go back for",
)
def recomputes(run: Run, claims: Claims, found: Found) -> None:
    """It claims to recompute: a block's forward runs once in the forward and once in the backward of a step, and once where there is
    no backward; between the two nothing is kept of what it has computed on the way.

    Memory is looked at in storages: the block under the wrapper holds weak references to those of its own.
    """
    for rank, said in _ran(run):
        place = f"rank {rank}, step {said['step']}"
        for block in sorted(said["forward"]):
            for phase in ("forward", "backward"):
                often = said.get(phase, {}).get(block, 0)
                found.require(often == 1, f"one forward of {block} in the {phase}", f"{place}: {often} forwards of {block} in the {phase}")
        kept = ", ".join(f"{size} bytes of {block}" for block, size in sorted(said["kept"].items()))
        found.require(
            not kept, "between forward and backward nothing that was computed inside", f"{place}: {kept}", "the first graph is kept"
        )
    for record in run.ranks:
        for said in record.all("evaluated"):
            again = {block: often for block, often in said["runs"].items() if often != 1}
            found.require(not again, f"one forward in {said['what']}", f"rank {record.rank}, step {said['step']}: {again}")


@rule(
    "19.18",
    "What it claims to lack it lacks",
    on=(RANDOM, *LIMITED),
    needs=("19.1",),
    reads_all_runs=True,
    baseline="vanilla",
    source=f"{DOCS}: use_reentrant, preserve_rng_state",
    remedy="leave the claim out",
)
def limits(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """What claims to be reentrant has one of its limits, and what claims to draw anew gets other gradients where it does: else it is
    to be held to what others are."""
    random = {name: run for name, run in runs.items() if run.scenario.name == RANDOM.name}
    limited = {name: run for name, run in runs.items() if run.scenario.name != RANDOM.name}
    for claim, of in (("draws_anew", random), ("reentrant", limited)):
        if claims.has(claim):
            tried = Found()
            _same(of, tried)
            found.require(
                bool(tried.failures),
                f"some difference, as it claims {claim}",
                f"none in {', '.join(_names(of))}",
                f"it claims {claim} in vain",
            )
    if not found.checks:
        found.does_not_apply()


@rule(
    "19.19",
    "What it computes again it does not keep",
    on=(PLAIN,),
    needs=("19.1",),
    reads_all_runs=True,
    baseline="vanilla",
    source="Chen et al., 2016; pytorch #84907, #85459: a wrapper that offloaded nothing",
    remedy="a graph or a list of activations that is kept beside what is computed again; what is kept when the backward is over",
)
def keeps(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Where a block's forward runs again, less of what it computes is kept for the backward than without the wrapper. When the
    backward is over nothing is kept, whatever the wrapper does.

    Whether it runs again is seen, not claimed: what offloads keeps all, and on a CPU has nowhere to move it.
    """
    for name, run, plain in _pairs(runs):
        for (rank, said), (_, right) in zip(_ran(run), _ran(plain), strict=False):
            place = f"rank {rank}, step {said['step']} of {name}"
            kept, without = sum(said["kept"].values()), sum(right["kept"].values())
            if said.get("backward"):
                found.require(kept < without, f"less than the {without} bytes that are kept without the wrapper", f"{place}: {kept} bytes")
            left = sum(said["left"].values())
            found.require(
                not left, "nothing of inside when the backward is over", f"{place}: {left} bytes", "activations are kept for ever"
            )


@rule(
    "19.20",
    "Buffers are updated once",
    on=(RANDOM,),
    needs=("19.2",),
    level=SHOULD,
    reads_all_runs=True,
    baseline="vanilla",
    source="torch.nn.BatchNorm1d: momentum; torch.utils.checkpoint runs the forward as it is, and running statistics count twice",
    remedy="put buffers back when the forward has run again; or set the momentum of batch norm to 1 - sqrt(1 - momentum)",
)
def buffers(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Running statistics of batch norm after each step are those without the wrapper.

    torch's checkpoints run the forward twice, and say nothing of buffers: momentum counts twice, and evaluation differs.
    """
    for name, run, plain in _pairs(runs):
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            keys = [key for key in other.tensors if "/buffer/" in key]
            wrong = [key for key in keys if key not in rank.tensors or len(_apart(rank.tensors[key], other.tensors[key], CLOSE[""]))]
            twice = [key for key in wrong if key.endswith("num_batches_tracked")]
            cause = "they are updated again where the forward runs again" if twice else ""
            seen = f"rank {rank.rank}, {wrong[0] if wrong else ''} of {name}: {len(wrong)} buffers and steps differ"
            found.require(not wrong, "buffers as without the wrapper", seen, cause)


@rule(
    "19.21",
    "It leaves the process as it was",
    on=(PLAIN,),
    source="torch documentation, reproducibility; the same as 9.1, 9.3, 9.4 and 9.6 of hooks",
    remedy="a seed that is set, a global setting or a patched function that is not put back, hooks that stay in force",
)
def leaves_no_trace(run: Run, claims: Claims, found: Found) -> None:
    """Random generators, torch's settings and functions, hooks on what autograd saves, and the process's threads, children and
    temporary files are after it what they were before."""
    left_behind(run, found)
    for rank in run.ranks:
        for said in rank.all("stepped"):
            what = f"rank {rank.rank}, step {said['step']}: hooks on what autograd saves are in force"
            found.require(not said["packs"], "none outside of the forward", what)


@rule(
    "19.22",
    "The same bits as without it",
    on=(PLAIN,),
    needs=("19.1",),
    level=SHOULD,
    reads_all_runs=True,
    baseline="vanilla",
    source="the same operations on the same values and strides on one thread; torch.autograd.graph.save_on_cpu keeps no strides",
    remedy="keep the strides of what is moved, e.g. with torch.empty_like; add gradients up in the order of the graph",
)
def bits(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Results are those without the wrapper bit for bit: runs with it and without can be told apart by nothing."""
    _same(runs, found, close=0.0)
