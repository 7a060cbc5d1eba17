"""Section 19, continued: wrappers of modules as training uses them."""

from functools import partial

from conformance.judging.common_rules import (
    DEFAULT_DTYPE,
    TOGETHER,
    TOGETHER_REMEDY,
    keeps_no_more,
    right_beside_own_numbers,
)
from conformance.judging.oracles.wrapper import (
    require_same_modes,
    require_same_unless_reentrant,
)
from conformance.judging.oracles.wrapper_training import (
    require_all_batches,
    require_memory_back,
    require_same_frozen,
    require_same_graphs,
    require_same_half,
    require_same_long_run,
    require_same_or_refused,
    require_same_training,
    runs_again,
    without_ways,
)
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.conditions_together import WRAPPER as CONDITIONS
from conformance.scenarios.kinds_under_default_dtypes import WRAPPER as DEFAULT_DTYPES
from conformance.scenarios.probes_of_kinds import WRAPPER as PROBE
from conformance.scenarios.wrapper import ATTRIBUTES
from conformance.scenarios.wrapper_graphs import GRAPHS
from conformance.scenarios.wrapper_training import (
    COMPLEX,
    FROZEN,
    HALF,
    IN_CONTAINERS,
    INDICES,
    INPUTS,
    LARGE,
    LONG,
    MANY,
    OF_INTEGERS,
    OF_MODULES,
    PENALTY,
    RANGES,
    RETAINED,
    RETAINS_MASKS,
    SINGLE,
    WAYS_OF_WRITING,
    WRITTEN,
)
from conformance.subjects.claims import Claims

parity_rule = partial(rule, reads_all_runs=True, baseline="vanilla", since="1.3")


@parity_rule(
    "19.23",
    "Float32 training is as precise as without the wrapper",
    on=(SINGLE,),
    owns=(SINGLE,),
    needs=("19.1",),
    source="Chen et al., 2016: recomputed values are the same; torch documentation, "
    "torch.autograd.graph.saved_tensors_hooks",
    remedy="activations that are kept in bfloat16, float16 or fewer bits; a dtype that is chosen "
    "because the network computes in float32; memory that is made with the strides of a tensor, "
    "which may be 0; segments of an nn.Sequential that leave out a rest; saved tensors that are "
    "found again by their memory, shape and strides, without storage_offset()",
)
def single(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """In float32, on random values, outputs and gradients of linear layers, norms, attention, and
    convolutions of one, two and three dimensions are those without the wrapper up to 2**-14 of the
    largest magnitude; so are those of nn.Sequential, with each number of layers from 3 to 7, and
    with a drawn one from 8 to 16. So are those of expanded tensors, whose new dimension is the
    first, the second or the last one and has a drawn size from 2 to 5, and of a view with an offset
    and steps. So are those of products of the 2 to 4 parts of one linear layer, cut by chunk, split
    or unbind, as q, k and v are: the number, the way, the dimension and the order of the columns
    are drawn.

    This is the loss by another order of summation; activations in float16 or bfloat16 lose more.
    """
    require_same_training(runs, found)


@parity_rule(
    "19.24",
    "Large activations are as precise as small ones",
    on=(LARGE, RANGES, COMPLEX),
    owns=(LARGE, RANGES, COMPLEX),
    needs=("19.23",),
    source="torch documentation, torch.autograd.graph.saved_tensors_hooks; activations of training "
    "have millions of elements, and those of padded batches are zeros for the most part",
    remedy="a threshold in elements or bytes, beyond which tensors are kept in another way, in "
    "parts or in fewer bits; a part of a tensor that decides how all of it is kept; values outside "
    "the range of float16; a dtype that is kept as another one; NaN or infinities that are made "
    "finite; memory that is kept without the bits of is_conj() and is_neg()",
)
def large(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Blocks of 2**17 to 2**21 elements, three sizes that are drawn evenly over their logarithms,
    give the outputs and gradients without the wrapper up to 2**-20 of the largest magnitude.

    Values are random, times a drawn power of two from 2**-20 to 2**20. In the last step one block
    has zeros in all places but one, which is drawn.

    Blocks of bfloat16, float16, float32 and float64 have the results without the wrapper, bit for
    bit, on numbers of all magnitudes that are normal in their dtype. For each dtype two sizes of
    2**4 to 2**17 elements are drawn, and for each element the exponent. Products alone compute
    these results, and all of them are exact. In the second step each block has NaN and an infinity
    of either sign, whose gradients are those without the wrapper, too. In three more steps all
    elements but one, which is drawn, are zeros or small whole numbers: a sample of the elements
    tells nothing of that one.

    Blocks of complex64 and complex128, in two sizes each, have exact results of moderate
    magnitudes, or the wrapper raises an error. They get a conjugated input, and save conjugated and
    negated tensors: views whose memory is that of the others.
    """
    of_complex = {
        name: run for name, run in runs.items() if run.scenario.variant == COMPLEX.variant
    }
    others = {name: run for name, run in runs.items() if name not in of_complex}
    require_same_training(others, found)
    require_same_or_refused(of_complex, found)


@parity_rule(
    "19.25",
    "Many graphs and saved tensors at once are kept apart",
    on=(GRAPHS, MANY),
    owns=(GRAPHS, MANY),
    needs=("19.2", "19.23"),
    source="torch documentation, torch.autograd.backward; pipeline parallel schedules run several "
    "forwards before the first backward; a forward of many layers saves thousands of tensors",
    remedy="inputs, generator states or saved tensors that are kept on the wrapper, as those of "
    "the last forward, or in a queue; a pool of a fixed number of places, of which the oldest is "
    "used again; places that the first forward after a backward uses again, while other graphs "
    "still need them; buffers that are written back as they were after an earlier forward",
)
def graphs(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Two to six forwards of batches of other sizes come before their backwards, which run in the
    order of forwards, in reverse, or in a drawn order; a graph without a backward, and a forward
    under no_grad, come between them; one batch is empty. All gradients are those without the
    wrapper.

    So they are if forwards and backwards take turns, as in a pipeline: of five to nine graphs, two
    to four are alive at once. The next backward is that of the oldest graph, of the newest one, or
    of any, each in a step of its own without dropout, and in one with a share of 0.1 to 0.5. Three
    in four batches have the same number of rows. All of these are drawn. With the claim draws_anew
    the outputs alone are compared in steps with dropout.

    So they are if a block saves 4,100 to 5,000 tensors in one forward, and if 520 to 700 forwards
    of two blocks come before their backwards. These numbers are drawn, and the order of the
    backwards.

    One block multiplies the parts of a linear layer, which is cut as in 19.23. Another one, which
    is drawn, is inside one or two more, which are wrapped, too.

    Blocks count their batches in buffers. Afterwards each forward has counted, once, or again
    where it ran again: no update is lost because another forward came before the backward.
    """
    require_same_graphs(runs, claims, found)
    require_all_batches(runs, found)


@parity_rule(
    "19.26",
    "A second backward of one graph is right, or refused",
    on=(RETAINED,),
    owns=(RETAINED,),
    needs=("19.23",),
    source="torch documentation, torch.Tensor.backward: retain_graph",
    remedy="saved tensors that the first backward frees, clears or overwrites; a state of the "
    "generator that the first recomputation frees, that the next one goes on from, or that is kept "
    "for the block and not for each graph",
)
def retained(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """With retain_graph=True, another backward of the same graph adds the gradients that it adds
    without the wrapper, or the wrapper raises an error.

    In later steps blocks have dropout, whose share is drawn, and each of three backwards has the
    mask of the forward. So it has if two graphs of the same blocks have three backwards each, in
    turns, and if three graphs have two or three in a drawn order. One block, which is drawn, is
    inside one or two more, which are wrapped, too. With the claim draws_anew this is required of
    the steps without dropout. The steps before an error are right.
    """
    anew = claims.has("draws_anew")
    require_same_or_refused(runs, found, steps_compared=RETAINS_MASKS if anew else None)


@parity_rule(
    "19.27",
    "Input gradients, and penalties on them, are right or refused",
    on=(PENALTY, INPUTS),
    owns=(PENALTY, INPUTS),
    needs=("19.23",),
    source="Gulrajani et al., Improved Training of Wasserstein GANs, 2017; torch documentation, "
    "torch.autograd.grad: create_graph, only the gradients that are asked for; "
    "torch.autograd.function.once_differentiable; torch.utils.checkpoint: the reentrant variant "
    "raises under torch.autograd.grad",
    remedy="a backward whose own graph is lost: a custom Function without once_differentiable, "
    "saved tensors that are detached when they come back; a backward inside the backward, which "
    "adds to .grad of parameters that nobody has asked for",
)
def penalty(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """With create_graph=True, a loss that contains the gradient of the input has the gradients that
    it has without the wrapper, or the wrapper raises an error.

    The gradient of the input or of one parameter alone, by torch.autograd.grad or
    backward(inputs=), is the one without the wrapper, and no other .grad changes; or the wrapper
    raises an error. The order of these, with and without gradients that are there before, is drawn
    from the session's seed, as the parameter is.
    """
    require_same_or_refused(runs, found)


@parity_rule(
    "19.28",
    "Frozen parameters and inputs work",
    on=(FROZEN,),
    owns=(FROZEN,),
    needs=("19.23",),
    source="Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021; torch "
    "documentation, torch.Tensor.requires_grad; torch.nn.Module.load_state_dict: assign",
    remedy="a decision on the first parameter, the first input or the first step alone; a custom "
    "Function whose output always requires a gradient; no_grad for a block without trained "
    "parameters, whose input has a gradient; parameters that are listed when the module is wrapped",
)
def frozen(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Frozen blocks, frozen layers beside trained ones of low rank, an input with and without
    requires_grad, and blocks that are frozen and unfrozen between steps have the outputs, the
    gradients and the requires_grad that they have without the wrapper.

    So have blocks in which a parameter is replaced, or a layer is added, after the wrapping, or an
    error is raised. With the claim reentrant a block has no gradients if no input requires one,
    19.18, and the other steps are judged.
    """
    require_same_frozen(runs, claims, found)


@parity_rule(
    "19.29",
    "Saved indices and masks come back unchanged",
    on=(INDICES,),
    owns=(INDICES,),
    needs=("19.2", "19.23"),
    source="torch documentation, torch.nn.Embedding, torch.gather, torch.nn.Dropout; "
    "torch.autograd.graph.saved_tensors_hooks packs tensors of any dtype",
    remedy="integers and masks that are packed as numbers, in 16 bits or in float16; a second "
    "forward with another dropout mask",
)
def indices(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Tables of 70,000 to 200,000 rows, gathered and largest elements, masks, bytes, integers
    beyond 2**32 and dropout have the outputs and gradients without the wrapper. With the claim
    draws_anew this is required of the step without dropout."""
    require_same_training(runs, found, steps=1 if claims.has("draws_anew") else None)


@parity_rule(
    "19.30",
    "Autocast to float16, and several settings at once, work",
    on=(HALF,),
    owns=(HALF,),
    needs=("19.9",),
    source="torch documentation, torch.amp: float16 beside bfloat16",
    remedy="bfloat16 as a constant; the dtype of autocast belongs to the thread, as its state "
    "does, and both belong to a forward, not to the wrapper; a device that is taken from inputs by "
    "position alone",
)
def half(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A recomputation in a backward outside of autocast runs in float16 if the forward did, and
    gives the same gradients; also if the blocks have run under another autocast in between, as for
    a metric or a teacher.

    In two more steps forwards without autocast, in float16 and in bfloat16 have graphs at once, and
    each runs again under its own setting; the backward is one, or one for each forward. Their
    order is drawn. In each step one or two blocks of three, which are drawn, get their input by
    keyword alone.
    """
    require_same_half(runs, found)
    require_same_modes(runs, found)


@parity_rule(
    "19.31",
    "No copies are kept after the backward",
    on=(LARGE,),
    needs=("19.19", "19.24"),
    source="Chen et al., 2016; torch documentation, torch.autograd.graph.save_on_cpu: packed "
    "tensors are freed with the graph",
    remedy="copies of saved tensors in a list, a dict or a cache that outlives the graph; clones "
    "that are kept beside the recomputed activations",
)
def copies_go(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """After each step as much memory is in use as before it, apart from a pool that a wrapper fills
    once. If blocks run again, less is in use between forward and backward than without the
    wrapper: less than half with the claim recomputes, which also has no pool.

    19.19 sees the activations themselves; this rule also sees copies of them.
    """
    require_memory_back(runs, claims, found)


kept = keeps_no_more("19.32", on=(LONG,), needs=("19.31", "19.33"))


@parity_rule(
    "19.33",
    "Long runs are as right as short ones",
    on=(LONG,),
    owns=(LONG,),
    needs=("19.1", "19.23"),
    since="1.6",
    source="runs of training have many thousand steps; one wrapped module runs in each of them",
    remedy="a count of forwards or backwards that overflows, or that ends a warm-up; a pool of "
    "buffers, or of packed tensors, that is used again too early; the largest element of a saved "
    "tensor that has none; a block that has drawn no random "
    "numbers so far, or with these numbers in its modules, and is taken for one that never does: "
    "keep the generator's state of every forward",
)
def long_run(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """In each of 300 to 380 steps, outputs and gradients are those without the wrapper up to
    2**-14 of the largest magnitude.

    The number of steps and the rows of each batch, 0 to 12, are drawn from the session's seed, and
    so are steps from 60 to 150 at which dropout begins, as in a schedule of dropout: in each of
    five blocks at another one. Their share of dropout is in nn.Dropout, in settings that all blocks
    share, in an argument, in a class of the trainer's, or in a buffer. Every 8 to 24 steps, which
    are drawn, the network is evaluated: by eval(), a forward under no_grad, and train(). With the
    claim draws_anew the outputs alone are compared from the first step with dropout on.
    """
    require_same_long_run(runs, claims, found)


@parity_rule(
    "19.34",
    "Works under any default dtype of torch",
    on=(DEFAULT_DTYPES,),
    owns=(DEFAULT_DTYPES,),
    needs=("19.1", "19.23"),
    since="1.6",
    source=DEFAULT_DTYPE,
    remedy="tensors that are made without a dtype, as buffers on the host: torch.empty(n); take "
    "that of the activation",
)
def default_dtypes(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Results are the same as without the wrapper if torch's default dtype is float64, float16 or
    bfloat16, and if it changes between steps. The order of the three is drawn."""
    require_same_training(runs, found)


@parity_rule(
    "19.35",
    "Conditions of training come together",
    on=CONDITIONS,
    owns=CONDITIONS,
    needs=("19.25", "19.29", "19.30", "19.33", "19.34"),
    since="1.6",
    source=TOGETHER,
    remedy=TOGETHER_REMEDY,
)
def together(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """Results are the same as without the wrapper if conditions come together that other rules
    judge alone.

    Autocast to float16, several graphs at once, and saved indices and masks come under default
    dtypes of torch that change; 300 to 380 steps come under bfloat16. The numbers are drawn from
    the session's seed.
    """
    # With the claim draws_anew dropout, which begins with the second step, draws other masks.
    of_indices = {
        name: run for name, run in runs.items() if run.scenario.variant == INDICES.variant
    }
    long = {name: run for name, run in runs.items() if run.scenario.variant == LONG.variant}
    others = {name: run for name, run in runs.items() if name not in {*of_indices, *long}}
    of_half = {name: run for name, run in runs.items() if run.scenario.variant == HALF.variant}
    of_graphs = {name: one for name, one in others.items() if name not in of_half}
    require_same_graphs(of_graphs, claims, found)
    require_same_half(of_half, found)
    require_same_long_run(long, claims, found)
    require_same_modes(of_half, found)
    require_same_training(of_indices, found, steps=1 if claims.has("draws_anew") else None)


@parity_rule(
    "19.36",
    "Inputs that are changed in place are not read again",
    on=(WRITTEN,),
    owns=(WRITTEN,),
    needs=("19.23",),
    since="1.6",
    source="torch documentation, Autograd mechanics: in-place correctness checks, by a counter of "
    "versions of each tensor that is saved; torch.autograd.Function, save_for_backward",
    remedy="inputs that are kept beside the graph, as by checkpoint(lambda: module(x)) or ctx.x = "
    "x: torch compares the versions of saved tensors alone; pass inputs as arguments, or save "
    "them; inputs by keyword or in containers, whose versions torch's checkpoint does not compare; "
    "hooks on saved tensors that keep a tensor itself: torch compares no versions of what hooks "
    "return, of indices and masks neither; copy it, or compare tensor._version; versions that are "
    "noted after the forward, which may have changed its input; results of operations that "
    "selective checkpointing keeps, and that the block changes: allow_cache_entry_mutation=True",
)
def written(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """The input of a block that does not save it may be changed after the forward: by
    x.add_(block(x)), by a sum into some of its columns, or by the next batch. Gradients are those
    without the wrapper, or the wrapper raises an error.

    Inputs are given by position, by keyword, in a list, in a dict and in a list of a dict; with the
    claim reentrant this does not apply to tensors in containers. The same holds if the first
    operation of the block changes its own input: a second forward has another one.

    A block may change the result of its own product in place, as by h = linear(x); h += low(x). It
    is a linear layer, a matrix product or a convolution, and gets a branch in all columns or some,
    SiLU, a value in some places, or a division by a constant. A wrapper that keeps such results has
    the gradients without it, or raises an error.

    If the block saves the input, or its output, and that is changed, autograd raises an error. So
    does the wrapper, or gradients are those of the tensors as they were. The block also saves
    indices, a mask and bytes, which are given by position, by keyword or in a dict.

    The same holds for the block's parameters and buffers, as an optimizer changes them, unless the
    block runs again in the backward: 19.37.

    The order of these is drawn from the session's seed, and so are the products, the columns and
    the constant.
    """
    of_modules = OF_MODULES if runs_again(runs) else ()
    mapped = (way for way, given in OF_INTEGERS.items() if given == "mapping")
    in_containers = (*IN_CONTAINERS, *mapped) if claims.has("reentrant") else ()
    require_same_or_refused(without_ways(runs, (*of_modules, *in_containers)), found)


@parity_rule(
    "19.37",
    "Parameters and buffers that are changed in place are not read again",
    on=(WRITTEN,),
    needs=("19.36",),
    level=SHOULD,
    since="1.6",
    source="torch documentation, Autograd mechanics: in-place correctness checks; "
    "torch.utils.checkpoint: gradients may be wrong in silence if the function differs in the "
    "backward, for example by a global variable",
    remedy="compare tensor._version of the module's parameters, and of the buffers that its "
    "forward leaves alone, before the forward runs again",
)
def written_modules(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """If parameters or buffers of a block have been changed since its forward, gradients are those
    of the tensors as they were, or the wrapper raises an error.

    19.36 requires this of blocks that do not run again in the backward. For those that do, torch
    documents that a checkpoint may be wrong, so this is advice.
    """
    others = {way for way, _ in WAYS_OF_WRITING if way not in OF_MODULES}
    require_same_or_refused(without_ways(runs, others), found)


own_numbers = right_beside_own_numbers("19.38", (large, long_run), on=(PROBE,))


@parity_rule(
    "19.39",
    "Tensors in attributes have gradients",
    on=(ATTRIBUTES,),
    owns=(ATTRIBUTES,),
    needs=("19.1",),
    since="2.0",
    source="a mixture of experts leaves the loss of its router in an attribute (Fedus et al., "
    "Switch Transformers, JMLR 2022); embeddings of a condition are set before the forward",
    remedy="a custom Function has gradients for its arguments and results alone; claim reentrant "
    "if that is meant",
)
def attributes(runs: dict[str, Run], claims: Claims, found: Found) -> None:
    """A tensor that a block reads from an attribute has its gradient, and so has one that it leaves
    in an attribute, as a part of the loss; with the claim reentrant this does not apply.

    Some are in a list or a dict, and some are attributes of a layer inside the block.
    """
    require_same_unless_reentrant(runs, claims, found)
