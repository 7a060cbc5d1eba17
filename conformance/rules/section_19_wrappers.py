"""Section 19: wrappers of modules, for activation checkpointing and offloading."""

from functools import partial

from conformance.judging.oracles.wrapper import (
    paired_events,
    require_compared,
    require_less_memory,
    require_new_states,
    require_no_saved_tensor_hooks,
    require_recomputation,
    require_same_bits,
    require_same_buffers,
    require_same_forms,
    require_same_hooks,
    require_same_modes,
    require_same_results,
    require_same_unless_reentrant,
    subject_runs,
)
from conformance.judging.rule import SHOULD, rule
from conformance.judging.side_effects import require_no_side_effects
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
    PLAIN,
    RAISES,
    RANDOM,
    STATIC,
    SUBGROUPS,
    TWICE,
    UNUSED,
)
from conformance.scenarios.wrapper_training import HALF, LONG
from conformance.subjects.claims import Claims

DOCS = "torch documentation, torch.utils.checkpoint"
# Most rules compare with the same network without the wrapper, in a run of its own.
parity_rule = partial(rule, reads_all_runs=True, baseline="vanilla")


@parity_rule(
    "19.1",
    "Results are the same as without the wrapper",
    on=(PLAIN,),
    owns=(PLAIN,),
    certifies_machine=True,
    source="Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016: recomputed values "
    "are the same",
    remedy="the part that runs again in the backward, and its inputs: detached inputs need "
    "requires_grad as the original ones have it",
)
def parity(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Under DDP outputs, losses, gradients of parameters and inputs, and the parameters after each
    step are those of the same network without the wrapper.

    The same operations give the same bits, which rule 19.22 judges. Here results may differ by the
    roundings of another order of operations in float64. DDP averages by a hook of the kit that adds
    in the order of ranks, so that the place of a gradient in its bucket does not matter.
    """
    require_same_results(runs, found)


@parity_rule(
    "19.2",
    "Recomputation draws the same random numbers",
    on=(RANDOM,),
    owns=(RANDOM,),
    needs=("19.1",),
    source=f"{DOCS}: preserve_rng_state",
    remedy="the generator's state of the forward, which has to be set before the forward runs "
    "again: torch.random.fork_rng. Do not tell by a block's modules, or by their mode, whether it "
    "draws: the generator's state shows it. A wrapper in a wrapper keeps a state of its own. A "
    "draw whose result is kept, as by create_selective_checkpoint_contexts, does not move the "
    "generator: later draws of the forward are others then, unless all are kept",
)
def draws(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """With dropout and batch norm inside, and with numbers that a forward draws itself, outputs and
    gradients are those without the wrapper.

    These are masks, noise, permutations and choices, of torch.nn.functional.dropout,
    torch.rand_like, Tensor.bernoulli_, torch.multinomial and others. A block draws in one of twelve
    ways, or in two or three; each way comes before another one in some block. The order of ways and
    of blocks is drawn from the session's seed. One or two drawn blocks are inside one or two blocks
    more, with layers before, between and behind; each of these blocks is wrapped. The generator is
    seeded before each step. The first step trains in eval mode, as frozen statistics ask for:
    functions still draw then. With the claim draws_anew only the outputs and losses of the first
    step have to be the same.
    """
    if claims.has("draws_anew"):
        # Other gradients change the parameters, and so the outputs of later steps.
        require_same_results(runs, found, ("output", "loss"), steps=1)
    else:
        require_same_results(runs, found)


@parity_rule(
    "19.3",
    "The random generator ends as without the wrapper",
    on=(RANDOM,),
    needs=("19.2",),
    source=f"{DOCS}: preserve_rng_state; torch.random.fork_rng",
    remedy="restore the generator after the forward has run again; leave it in the state that the "
    "first forward ended in",
)
def generator(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """After each step torch's generator has the same state as without the wrapper, so that the
    recomputation has drawn nothing from it."""
    if claims.has("draws_anew"):
        found.does_not_apply("its recomputation draws new numbers, as it claims: 19.18")
        return
    for place, event, right in paired_events(runs, "stepped"):
        found.require(
            event["generator"] == right["generator"],
            "torch's generator in the same state as without the wrapper",
            f"{place}: it is in another state",
        )


@parity_rule(
    "19.4",
    "Any arguments and results work",
    on=(CALLS,),
    owns=(CALLS,),
    needs=("19.1",),
    source="pytorch test_checkpoint_wrapper_kwarg_support, test_checkpoint_wrapper_args_kwargs",
    remedy="forward(*args, **kwargs); an argument that is passed at another position; a tuple as "
    "result, also if it has one entry; arguments that are not tensors; one gradient for a tensor "
    "that is an argument twice, or the sum of its gradients for each argument; gradients that are "
    "not returned at the places of their arguments, or not taken for those of their results, "
    "because others come between them that require none",
)
def calls(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A block may take several inputs, keywords and arguments that are not tensors, return a tuple,
    have frozen parameters, and contain another wrapped block. One tensor may be several of its
    arguments, as in self-attention; its gradient is the sum of theirs.

    Three blocks get five arguments in each step: two to four tensors of floats, and indices, masks
    or numbers. Their order is drawn from the session's seed, and for each call the tensors of
    floats that require a gradient, one at least, and the arguments by keyword, with their order.
    Results are a tuple in a drawn order: two tensors with a gradient, a detached one, indices,
    masks, None. The third block returns a tuple of one tensor. Results have the type and the length
    that they have without the wrapper.
    """
    require_same_forms(runs, found)
    require_same_results(runs, found)


@parity_rule(
    "19.5",
    "Tensors in containers have gradients",
    on=(CONTAINERS,),
    owns=(CONTAINERS,),
    needs=("19.1",),
    source=f"{DOCS}: the reentrant variant does not consider tensors in nested structures as "
    "taking part in autograd",
    remedy="only tensors among the arguments themselves are tracked; claim reentrant if that is "
    "meant",
)
def containers(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Tensors in dicts and lists, among arguments and results, have their gradients, also one that
    is in several of them; with the claim reentrant this does not apply. A list as the result of a
    block stays a list of the same length, also if it has one entry."""
    if not claims.has("reentrant"):
        require_same_forms(runs, found)
    require_same_unless_reentrant(runs, claims, found)


@parity_rule(
    "19.6",
    "Inputs need not require gradients",
    on=(FIRST,),
    owns=(FIRST,),
    needs=("19.1",),
    source=f"{DOCS}: with the reentrant variant some input and output needs requires_grad=True",
    remedy="a custom Function without inputs that require gradients is not part of the graph; "
    "claim reentrant if that is meant",
)
def first(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A block on the network's own input has gradients for its parameters; with the claim reentrant
    this does not apply."""
    require_same_unless_reentrant(runs, claims, found)


@parity_rule(
    "19.7",
    "DDP's options and subgroups work",
    on=(STATIC, ACCUMULATED, SUBGROUPS),
    owns=(STATIC, ACCUMULATED, SUBGROUPS),
    needs=("19.1",),
    source="pytorch test_ddp_checkpointing_twice_static_graph, _weight_sharing, "
    "_twice_weight_sharing; DistributedDataParallel.no_sync",
    remedy="state of the last forward on the wrapper itself, if a block is used again before its "
    "backward",
)
def options(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Results are the same with static_graph=True, with a block that is used twice and shares a
    weight with an outer layer; with micro-batches under no_sync; and on a subgroup."""
    require_same_results(runs, found)


@parity_rule(
    "19.8",
    "Dynamic graphs work",
    on=(TWICE, UNUSED),
    owns=(TWICE, UNUSED),
    needs=("19.1",),
    source="pytorch test_ddp_checkpointing_twice, _unused_params, _dynamic_module; pytorch #52894",
    remedy="a nested backward, which DDP cannot see in the graph; claim reentrant if that is meant",
)
def dynamic(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Without static_graph a block may be used twice and share a weight, and with
    find_unused_parameters ranks may leave out different blocks in every step; with the claim
    reentrant this does not apply."""
    require_same_unless_reentrant(runs, claims, found)


@parity_rule(
    "19.9",
    "Evaluation, no_grad and autocast work",
    on=(MODES, AUTOCAST),
    owns=(MODES, AUTOCAST),
    needs=("19.1", "19.4"),
    source="torch documentation, torch.amp; torch.utils.checkpoint runs again under the autocast "
    "of the forward",
    remedy="autocast and grad mode belong to the thread, which has left those of the forward when "
    "the backward runs: keep them, and enter them again, also if autocast was off; a device that "
    "is taken from inputs by position alone",
)
def modes(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A recomputation runs in the dtype of the forward and gives the same gradients, if autocast is
    on in the forward alone, in the backward alone, or around a forward in a context that disables
    it. In evaluation and under no_grad between steps outputs are the same and require gradients as
    without the wrapper.

    Under autocast one block begins with a norm, and takes its input in full precision; and one or
    two blocks of three, which are drawn, get theirs by keyword alone.
    """
    require_same_results(runs, found)
    require_same_modes(runs, found)


@parity_rule(
    "19.15",
    "Errors come out of the forward unchanged",
    on=(RAISES,),
    owns=(RAISES,),
    needs=("19.1",),
    source="Python documentation, with; torch.autograd.graph.saved_tensors_hooks",
    remedy="a context that is entered and not left if a forward raises an error: use with, or "
    "try and finally",
)
def errors(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """An exception in a block comes out of the forward unchanged, no hook on saved tensors stays in
    force, and the next step is right.

    It is an error, KeyboardInterrupt, SystemExit, GeneratorExit or BaseException.
    """
    cause = "they were not removed when the forward raised an error"
    for name in subject_runs(runs):
        require_compared(runs[name], found, "error")
        require_no_saved_tensor_hooks(runs[name], found, f" of {name}", cause)
    require_same_results(runs, found)


@parity_rule(
    "19.16",
    "Module hooks fire",
    on=(HOOKED,),
    owns=(HOOKED,),
    needs=("19.1",),
    source="torch documentation, torch.nn.Module.register_forward_hook, "
    "register_full_backward_hook",
    remedy="call the module, module(...), rather than its forward, also when it runs again",
)
def hooks(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Hooks on the wrapper and on modules inside fire as often as without it; forward hooks inside
    may fire again when the forward runs again.

    Other hooks return a changed input, by position and with_kwargs, a changed output, or a changed
    gradient of the input. Each multiplies by a factor from 0.5 to 0.9, which is drawn from the
    session's seed. Gradients are those without the wrapper.
    """
    require_same_results(runs, found)
    require_same_hooks(runs, found)


@rule(
    "19.17",
    "Recomputes activations as claimed",
    on=(PLAIN, MODES, AUTOCAST, HALF, STATIC, SUBGROUPS, LONG),
    needs=("19.1",),
    claimed="recomputes",
    source="Chen et al., 2016: every forward inside runs once more, and no activation of inside is "
    "kept",
    remedy="a graph that is kept from the first forward; a forward that runs again without a "
    "backward; a checkpoint that keywords, or autocast, bypass",
)
def recomputes(run: Run, claims: Claims, found: Found) -> None:
    """With the claim recomputes a block's forward runs once in the forward and once in the
    backward of a step, and once if there is no backward; between the two passes none of its
    activations is kept. It also runs again under autocast, on subgroups, for inputs by keyword, and
    in long runs if the batch has rows.

    Memory is that of storages, to which the block under the wrapper holds weak references.
    """
    require_recomputation(run, found, exactly=run.scenario.name in (PLAIN.name, MODES.name))


@parity_rule(
    "19.18",
    "Its claims to be limited are true",
    on=(RANDOM, LONG, *LIMITED),
    needs=("19.1",),
    source=f"{DOCS}: use_reentrant, preserve_rng_state",
    remedy="leave the claim out; a recomputation that seeds the generator: all steps have one "
    "dropout mask then, and some weights never get a gradient; train() that begins a stream again",
)
def limits(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A wrapper that claims reentrant has one of the limits of reentrant wrappers, and one that
    claims draws_anew gets other gradients if it draws; otherwise the unclaimed requirements
    apply.

    With the claim draws_anew no two steps of a run draw the same numbers in their recomputations:
    a block does not run again from a state of the generator from which it has run again before,
    also if the network is evaluated now and then."""
    draws = {name: run for name, run in runs.items() if run.scenario.name == RANDOM.name}
    long = {name: run for name, run in runs.items() if run.scenario.name == LONG.name}
    limited = {name: run for name, run in runs.items() if name not in {*draws, *long}}
    for claim, runs_of_claim in (("draws_anew", draws), ("reentrant", limited)):
        if not claims.has(claim):
            continue
        trial = Found()
        require_same_results(runs_of_claim, trial)
        found.require(
            bool(trial.failures),
            f"some difference, as it claims {claim}",
            f"none in {', '.join(subject_runs(runs_of_claim))}",
            f"it claims {claim} in vain",
        )
    if claims.has("draws_anew"):
        require_new_states({**draws, **long}, found)
    if not found.checks:
        found.does_not_apply()


@parity_rule(
    "19.19",
    "Does not keep the activations that it recomputes",
    on=(PLAIN,),
    needs=("19.1",),
    source="Chen et al., 2016; pytorch #84907, #85459: a wrapper that offloaded nothing",
    remedy="a graph or a list of activations that is kept beside the recomputed ones; activations "
    "that are kept after the backward",
)
def keeps(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """If a block's forward runs again, fewer bytes of its activations are kept for the backward
    than without the wrapper. After the backward no wrapper keeps any.

    Recomputation is observed and not claimed: a wrapper that offloads keeps all activations and,
    on a CPU, has no other place for them.
    """
    require_less_memory(runs, found)


@parity_rule(
    "19.20",
    "Buffers are updated once",
    on=(RANDOM,),
    needs=("19.2",),
    level=SHOULD,
    source="torch.nn.BatchNorm1d: momentum; torch.utils.checkpoint runs the forward unchanged, so "
    "that running statistics count twice",
    remedy="restore buffers after the forward has run again; or set the momentum of batch norm to "
    "1 - sqrt(1 - momentum), unless it is None",
)
def buffers(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """After each step the running statistics of batch norm are those without the wrapper.

    The momentum of each norm is drawn, from 0.01 to 0.5. torch's checkpoints run the forward twice
    and leave buffers to it: momentum counts twice, and evaluation differs. With the claim
    draws_anew later steps than the first have other parameters.
    """
    require_same_buffers(runs, found, in_first_step=claims.has("draws_anew"))


@rule(
    "19.21",
    "Leaves the process as it was",
    on=(PLAIN,),
    watches=True,
    source="torch documentation, reproducibility; the same as 9.1, 9.3, 9.4 and 9.6 of hooks",
    remedy="a seed that is set; a setting or a patched function that is not put back; hooks that "
    "stay in force",
)
def no_trace(run: Run, claims: Claims, found: Found) -> None:
    """After every run, random generators, settings and functions of torch and Python, hooks on
    saved tensors, threads, child processes and temporary files are as they were before it, and no
    step leaves a descriptor, a thread or a process group more than the step before."""
    require_no_side_effects(run, claims, found)
    require_no_saved_tensor_hooks(run, found, of_run="", cause="")


@parity_rule(
    "19.22",
    "Results are the same bits as without the wrapper",
    on=(PLAIN,),
    needs=("19.1",),
    level=SHOULD,
    source="the same operations on the same values and strides on one thread; "
    "torch.autograd.graph.save_on_cpu keeps no strides",
    remedy="keep the strides of tensors that are moved, for example with torch.empty_like; add "
    "gradients in the order of the graph",
)
def bits(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Results are those without the wrapper bit for bit, so that runs with and without it are
    indistinguishable."""
    require_same_bits(runs, found)
