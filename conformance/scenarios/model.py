"""The experiments, as data.

A scenario defines the steps of the ranks and the observations that are recorded. It knows no
verdicts: each scenario runs once per world size, and many rules read its records. Scenarios travel
to the ranks as JSON.
"""

import functools
from dataclasses import asdict, dataclass, fields
from typing import Any

from conformance.scenarios.profiles import GLOO_CPU, Profile, profile_from_json

# The kinds of gradient (``gradients.KINDS``) that are fed until residuals are empty, after the
# steps in which ranks leave out parameters, or run out of inputs.
DRAINING = ("faint", "small_faint", "settling")
# A run of so many steps may take longer than a deadline.
MANY_STEPS = 400
# Seconds that any run on a device may take beyond its deadline.
ON_A_DEVICE = 60.0


@dataclass(frozen=True)
class Param:
    """One parameter of the probe model.

    Attributes:
        shape: its shape.
        dtype: a name that torch has, e.g. ``"float32"``.
        layout: ``contiguous``, ``channels_last``, ``channels_last_3d``, ``transposed``,
            ``columns`` (of a wider tensor), or ``sparse`` (an embedding whose gradient is a sparse
            tensor).
        frozen: it requires no gradient.
        frozen_under: the numbers of the DDPs under which it requires no gradient; the first is 0.
        version_of: the number of the parameter that this one is from some DDP on, with another
            dtype or shape; -1 for a parameter of its own. All other versions are frozen then.
        uses: how often the forward uses it. Its gradient is the sum over all uses.
        exponent: its gradients are multiplied by ``2**exponent``, which is exact; if they repeat a
            table, only those from element 2**24 on.
        exponents: the same for each step, in place of ``exponent``, again and again; () for none.
        output_layout: of the outputs of a collective, if it is not that of the inputs.
        rows: of a sparse parameter, how many rows each rank uses in each step; () for the few that
            ``gradients.sparse_rows`` has by itself.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    frozen: bool = False
    frozen_under: tuple[int, ...] = ()
    version_of: int = -1
    uses: int = 1
    exponent: int = 0
    exponents: tuple[int, ...] = ()
    output_layout: str = ""
    rows: tuple[tuple[int, ...], ...] = ()

    @property
    def is_contiguous(self) -> bool:
        """Whether inputs and outputs of a collective are contiguous."""
        return {self.layout, self.output_layout or self.layout} == {"contiguous"}

    def exponent_at(self, step: int) -> int:
        """Return the exponent of a step."""
        return self.exponents[step % len(self.exponents)] if self.exponents else self.exponent


@dataclass(frozen=True)
class DDPOptions:
    """DistributedDataParallel's arguments.

    Attributes:
        bucket_cap_mb: the largest size of a bucket, in MiB.
        gradient_as_bucket_view: gradients are views of the buckets.
        find_unused_parameters: some ranks leave some parameters out of the forward
            (``gradients.uses``).
        static_graph: the graph is the same in every step.
        broadcast_buffers: the buffers of the first rank are sent to all ranks.
    """

    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True


@dataclass(frozen=True)
class Observation:
    """The records that are made besides the gradients of every step.

    Attributes:
        hook: the hook is registered inside an observer; if false, exactly as it was given.
        memory: memory is measured after every step.
        other_gradients: gradients outside the bucket are compared before and after each hook call.
        bytes_sent: the sizes of the tensors that the subject passes to collectives.
        collectives: every collective, before it begins.
        gradients: the gradients of every step, and the parameters of a fused hook. Without them no
            result is judged.
        coverage: the lines and branches of the subject's own files that run.
        growth: the memory and the objects in use, at places that are evenly spaced over the steps
            (``ranks/instruments/kept.py``).
    """

    hook: bool = True
    memory: bool = False
    other_gradients: bool = False
    bytes_sent: bool = False
    collectives: bool = False
    gradients: bool = True
    coverage: bool = False
    growth: bool = False


FAULTY_RANK = 1
"""The rank that dies, or fails in another way, if a scenario has a fault."""

# Failures of a collective on one rank, for other kinds than hooks.
CALL_FAILS = "call_fails"
WORK_FAILS = "work_fails"
COLLECTIVE_FAULTS = (CALL_FAILS, WORK_FAILS)
# For hooks: a collective of each of several models fails, on all ranks.
EACH_MODEL_FAILS = "each_model_fails"


@dataclass(frozen=True)
class Fault:
    """A failure that the kit causes.

    Attributes:
        kind: ``none``; for hooks ``peer_dies``, ``peer_dies_later``, ``collective_raises``,
            ``peer_silent`` or ``each_model_fails`` (``scenarios/failing_models.py``); for other
            kinds ``call_fails`` or ``work_fails`` (``instruments/failing_collective.py``).
        step: the step in which it happens; for other kinds than hooks, the first step in which it
            may happen.
        group_timeout: the process group's own timeout in seconds, if it is to expire; else 0.
        succeeding: for other kinds than hooks, the number of collectives that succeed from that
            step on, before one fails. For hooks, 0 if the first collective of the step raises, -1
            if the last one does, and a larger number for one between the first and the last
            (``instruments/raising_collective.py``).
        least_bytes: collectives to which the rank gives fewer bytes, and from which it receives
            fewer, are not counted.
        rank: for other kinds than hooks, the rank on which the collective fails.
        attempts: of hooks; the number of steps, from ``step`` on, that may fail: the first one with
            the collective that is to raise does.
        in_post_hooks: collectives in post hooks of joins alone are counted, and ``succeeding`` is
            taken modulo their number in an earlier context.
    """

    kind: str = "none"
    step: int = 2
    group_timeout: float = 0.0
    succeeding: int = 0
    least_bytes: int = 0
    rank: int = FAULTY_RANK
    attempts: int = 1
    in_post_hooks: bool = False


@dataclass(frozen=True)
class Resume:
    """Saving a state, and going on from it in new processes.

    Attributes:
        saves_at: the number of steps after which the subject's state is saved; 0 for never.
        also_taken_at: the number of steps after which the state is taken as well, and thrown away;
            0 for never. Optimizers alone.
        resumes: start from the state that the run of the prerequisite saved.
        passes_on: the loaded state is saved and loaded once more before the first step, as by a job
            that is preempted at once. Hooks alone.
        of_rank_0: all ranks start from the state that rank 0 saved, and there may be another number
            of ranks than saved it.
        saved_in: the folder of that run; '' before it is known.
        rolls_back_at: the step before which the process loads the state that it has saved; 0 for
            never.
        starts_over_at: the step before which the process loads the state that it has saved before
            the first step, and repeats the first steps; 0 for never.
    """

    saves_at: int = 0
    also_taken_at: int = 0
    resumes: bool = False
    passes_on: bool = False
    of_rank_0: bool = False
    saved_in: str = ""
    rolls_back_at: int = 0
    starts_over_at: int = 0


@dataclass(frozen=True)
class LongRun:
    """A run as long as training's schedules (``scenarios/long_runs.py``).

    A round is a number of consecutive steps that feed the same gradients. ``Scenario.steps`` has
    the kind of gradient of each round, and records have a row for each round: the sum of its
    results. Records therefore stay small, however many steps there are.

    Attributes:
        drawn: the number of rounds before claims are considered; 0 if the scenario is no long run.
        period: the number of different gradients of a kind, which come again and again; a prime.
        hold: the number of rounds that feed the same gradients.
        warm_up: the first rounds, which are those of a claimed warm-up. They have one step each.
        steps_per_round: the number of steps of each later round.
        rate_falls: the bits by which learning rates fall (``scenarios/learning_rates.py``).
        rate_rests: the rate of fused hooks is 0 for some steps.
        moves_apart: parameters move by other amounts on each rank after the warm-up
            (``scenarios/parameter_moves.py``).
    """

    drawn: int = 0
    period: int = 1
    hold: int = 1
    warm_up: int = 0
    steps_per_round: int = 1
    rate_falls: int = 0
    rate_rests: bool = False
    moves_apart: bool = False

    def __bool__(self) -> bool:
        return self.drawn > 0


_LONG_FALL = 2.0**-6  # of the loss scale, from one step to the next


@dataclass(frozen=True)
class Scenario:
    """One experiment.

    Attributes:
        name: runs of the scenario are called ``name@world_size``.
        summary: a sentence fragment for people, printed in RULES.md.
        params: the probe model's parameters; empty for the real network of ``training``.
        steps: the kind of gradient (``gradients.KINDS``) that each step feeds.
        world_sizes: the world sizes that it is meant for; () for every size of the profile.
        ddp: the arguments of DistributedDataParallel.
        microbatch_weights: one integer for each micro-batch of a step; its gradient is the step's
            gradient times that integer, and they sum to 1. All but the last run under ``no_sync``.
        uneven: ranks have different numbers of inputs (``inputs_of``), and train under ``Join``.
        groups: disjoint groups of global ranks, each with a model of its own; () for WORLD.
        size: the number of ranks that the scenario brings itself, whatever world sizes the profile
            has; 0 if the profile decides. Groups bring their own ranks, too.
        nodes: the number of ranks on each simulated node, in the order of ranks; () if all are on
            one node. Ranks see their node in the variables of torchrun (``ranks/torchrun.py``).
        idle: ranks that register the subject on a model of their own, and never train it.
        observe: the records that are made.
        order: the order in which ranks enter the hook and callbacks run: ``free``, or an order of
            ``ranks/instruments/schedule.py``.
        seed: the seed of that order.
        fault: the failure that the kit causes.
        rewraps: steps before which DDP is made anew over the same model, with other frozen
            parameters; the same hook and state are registered on it.
        ddp_anew: the arguments of each of these DDPs; () for those of the first one.
        prerequisite: a scenario; if its run breaks, this one is skipped, since it would break too.
        first_step: the number of the first step for the inputs, if a run continues another.
        repeat: distinguishes runs of the same experiment.
        initial_value: the parameters' first value. It is far from zero, so that a hook that mixes
            parameters into gradients shows; it is zero if parameters are stepped, since small steps
            would be lost in the roundings of a large value.
        simulated: numbers of ranks to simulate in one process (``simulated_ranks.py``); if there
            are any, nothing else is run.
        training_loop: train by ``models/training_loop.py``, which also scales the loss; parameters
            are recorded after every step.
        poststep: the trainer makes a call after backward (``DDPModel.register``).
        call: the name of that call, or '' if the set-up brings its own.
        serialised: each collective ends before the next one begins, as on a single stream.
        fused: parameters are recorded after every step, and results too if the hook frees
            gradients.
        fused_rate: the learning rate that a fused hook claims. The trainer's optimizer, which makes
            no step, has it as well, but for long runs: a hook may read it there.
        twin: another model with the same subject trains in turns with this one, on other inputs.
        joint: the losses of the model and its twin are added, and one backward serves both.
        twin_groups: disjoint groups of global ranks for the twins; () if a twin has the group of
            the model.
        default_dtypes: torch's default dtype in each step, again and again; () for float32.
        matmul_precisions: of hooks; the precision of float32 matrix products in each step, again
            and again; () for torch's default.
        clocks_jump: the clocks that the subject reads differ between ranks, and jump between and
            within steps (``instruments/clocks.py``).
        world_only: the subject claims to use WORLD, whatever group its model has.
        other_hash_seed: run in processes with another PYTHONHASHSEED than the other scenarios.
        hash_seeds_differ: ranks with odd numbers have another PYTHONHASHSEED than the others.
        deadline: seconds after which the run counts as hanging; 0 for the pool's own deadline.
        kind: the kind of subject (``subjects/kinds``); it decides how ``steps`` are read and which
            driver runs.
        variant: which experiment of its kind this is, if there are several.
        options: the parts of the subject's claims that ranks need.
        delayed: slow kernels precede gradients and collectives (``instruments/stream_delays.py``).
        captured: a step is captured in a CUDA graph and replayed (``drivers/cuda_graph.py``).
        unrecorded_steps: steps of a long warm-up that come before ``steps`` and leave no record.
        unrecorded_kind: the kind of gradient that they feed.
        long_run: the schedule of a run of more than a thousand steps.
        profile: the backend and the device; set by the engine.
        session_seed: the seed that numbers are drawn from (``draws.py``); set by the engine.
        period: the length of the table that all gradients repeat (``scenarios/tables.py``); 0 for
            gradients that repeat nothing.
        folded: results are recorded as the smallest and largest value at each place of the table,
            of the whole ``model`` or of each ``bucket``; '' for every element.
        loss_scales: for each step, the exponent of two of the loss scale that its gradients are
            multiplied by; () for none.
        rescale_call: the name of the call that tells the subject of a new loss scale, or ''.
        seeds_differ: of hooks; each rank seeds the global generators with a number of its own, as
            scripts do that add the rank to the seed. If false, all ranks seed them alike.
        in_eval_mode: of hooks; the model trains in eval mode, as fine-tuning with frozen batch norm
            does.
        renews_storage: of hooks; parameters get new storage after every step, as by
            ``parameter.data = parameter.data - update``.
        most_inputs: of joinables; the contexts of a run have at most so many inputs. 0 if there are
            few of them.
        freezes_unused_from: of hooks; from this step on, a parameter that no rank uses in a step
            requires no gradient in it, and DDP stays as it is; 0 for never.
    """

    name: str
    summary: str
    params: tuple[Param, ...]
    steps: tuple[str, ...]
    world_sizes: tuple[int, ...] = ()
    ddp: DDPOptions = DDPOptions()
    microbatch_weights: tuple[int, ...] = (1,)
    uneven: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    size: int = 0
    nodes: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    observe: Observation = Observation()
    order: str = "free"
    seed: int = 0
    fault: Fault = Fault()
    resume: Resume = Resume()
    rewraps: tuple[int, ...] = ()
    ddp_anew: tuple[DDPOptions, ...] = ()
    prerequisite: str = "values"
    first_step: int = 0
    repeat: int = 0
    initial_value: float = 1024.0
    simulated: tuple[int, ...] = ()
    training_loop: bool = False
    poststep: bool = False
    call: str = ""
    serialised: bool = False
    fused: bool = False
    fused_rate: float = 0.0
    twin: bool = False
    joint: bool = False
    twin_groups: tuple[tuple[int, ...], ...] = ()
    default_dtypes: tuple[str, ...] = ()
    matmul_precisions: tuple[str, ...] = ()
    clocks_jump: bool = False
    world_only: bool = False
    other_hash_seed: bool = False
    hash_seeds_differ: bool = False
    deadline: float = 0.0
    kind: str = "hook"
    variant: str = ""
    options: tuple[str, ...] = ()
    delayed: bool = False
    captured: bool = False
    unrecorded_steps: int = 0
    unrecorded_kind: str = "crafted"
    long_run: LongRun = LongRun()
    profile: Profile = GLOO_CPU
    session_seed: int = 0
    period: int = 0
    folded: str = ""
    loss_scales: tuple[int, ...] = ()
    rescale_call: str = ""
    seeds_differ: bool = False
    in_eval_mode: bool = False
    renews_storage: bool = False
    most_inputs: int = 0
    freezes_unused_from: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def family(self) -> str:
        """The scenario in the rule book that this one stands for: ``probe`` for all probes of a
        hook, ``averager_probe`` for those of an averager.
        """
        if not self.is_probe:
            return self.name
        return "probe" if self.kind == "hook" else f"{self.kind}_probe"

    @property
    def is_probe(self) -> bool:
        """Whether the scenario is made for a number in the subject's own code."""
        return self.name.startswith("probe_")

    @property
    def intercepts(self) -> bool:
        """Whether collectives pass through the kit."""
        of_hooks = ("collective_raises", "peer_dies_later", EACH_MODEL_FAILS)
        faulty = self.fault.kind in (*of_hooks, *COLLECTIVE_FAULTS)
        records = self.observe.bytes_sent or self.observe.collectives
        return self.order != "free" or faulty or records or self.serialised

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """The hash that ``dataclass`` would compute anew for each look-up in a cache."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def loss_scale(self, step: int) -> float:
        """Return the loss scale of a step; 1 if the scenario has none."""
        if not self.loss_scales:
            return 1.0
        return 2.0 ** self.loss_scales[min(max(step, 0), len(self.loss_scales) - 1)]

    def rescales(self, step: int) -> tuple[float, ...]:
        """Return the factors of the loss scale that a subject is told before a step.

        It is told of a long fall in two parts: the scale has fallen twice while the model rested.
        If it loads a state before the step, the trainer has gone back to the scale of that state.
        """
        if step and step in (self.resume.rolls_back_at, self.resume.starts_over_at):
            return ()
        factor = self.loss_scale(step) / self.loss_scale(step - 1)
        if factor == 1:
            return ()
        return (0.125, 8 * factor) if factor <= _LONG_FALL else (factor,)

    @property
    def patience(self) -> float:
        """Seconds that a run may take beyond its deadline if its ranks go on recording events.

        A deadline is for hangs: this is ten times as long as a step takes with three ranks on a
        busy core, and much longer than a number of simulated ranks takes. Short runs on a CPU get
        none. Ranks that share a GPU wait for each other, which no clock of the host can see. A step
        of a joinable takes one input.
        """
        steps = self.unrecorded_steps + 100 * len(self.simulated) + self.most_inputs
        if self.long_run:
            steps += len(self.steps) * self.long_run.steps_per_round
        elif len(self.steps) >= MANY_STEPS:
            steps += len(self.steps)
        return steps / 10 + (ON_A_DEVICE if self.profile.device != "cpu" else 0.0)

    def default_dtype(self, step: int) -> str:
        """Return the name of torch's default dtype in a step."""
        if not self.default_dtypes:
            return "float32"
        return self.default_dtypes[max(step, 0) % len(self.default_dtypes)]

    def matmul_precision(self, step: int) -> str:
        """Return the precision of float32 matrix products in a step; '' for torch's default."""
        precisions = self.matmul_precisions
        return precisions[step % len(precisions)] if precisions else ""

    def inputs_at(self, step: int) -> int:
        """Return the number of a step for its inputs."""
        start = self.resume.starts_over_at
        return step - start if start and step >= start else step + self.first_step

    def is_frozen(self, index: int, step: int) -> bool:
        """Whether a parameter requires no gradient in a step."""
        spec = self.params[index]
        return spec.frozen or self.ddp_number(step) in spec.frozen_under

    def ddp_number(self, step: int) -> int:
        """Return the number of the DDP that a step trains; the first is 0."""
        return sum(step >= at for at in self.rewraps)

    def ddp_options(self, number: int) -> DDPOptions:
        """Return the arguments of a DDP."""
        return self.ddp_anew[number - 1] if number and self.ddp_anew else self.ddp

    @property
    def has_versions(self) -> bool:
        """Whether parameters change their dtypes or shapes when DDP is made anew."""
        return any(spec.version_of >= 0 for spec in self.params)

    def group_of(self, rank: int, world: int) -> tuple[int, ...]:
        """Return the global ranks of the group that ``rank`` trains in."""
        return next((group for group in self.groups if rank in group), tuple(range(world)))

    def twin_group_of(self, rank: int, world: int) -> tuple[int, ...]:
        """Return the global ranks of the group that the twin of ``rank`` trains in."""
        own = self.group_of(rank, world)
        return next((group for group in self.twin_groups if rank in group), own)

    @property
    def own_size(self) -> int:
        """The number of ranks that the scenario brings itself; 0 if the profile decides."""
        return self.size or sum(map(len, self.groups))

    def inputs_of(self, rank: int, world: int) -> int:
        """Return the number of steps before a rank runs out of inputs.

        If inputs are uneven, rank 0 has all, the last of three or more ranks has none, and the
        others have half of them. The steps that empty residuals do not count: they are the next
        epoch, in which all ranks have all inputs. Idle ranks have none.
        """
        if rank in self.idle:
            return 0
        if not self.uneven:
            return len(self.steps)
        epoch = sum(kind not in DRAINING for kind in self.steps)
        if rank == 0:
            return epoch
        if rank == world - 1 and world > 2:
            return 0
        return epoch // 2

    def has_input(self, rank: int, world: int, step: int) -> bool:
        """Whether a rank has an input at a step, see :meth:`inputs_of`."""
        is_next_epoch = self.uneven and self.steps[step] in DRAINING and rank not in self.idle
        return is_next_epoch or step < self.inputs_of(rank, world)

    def fits(self, worlds: tuple[int, ...]) -> tuple[int, ...]:
        """Return the world sizes at which the scenario runs, out of those of the profile.

        If the profile has none of the scenario's sizes, it runs at the smallest size above 1.
        """
        if self.simulated:
            return (1,)
        if self.own_size:
            return (self.own_size,) if max(worlds) > 1 else ()
        fitting = tuple(w for w in worlds if not self.world_sizes or w in self.world_sizes)
        if fitting:
            return fitting
        larger_than_1 = sorted(w for w in worlds if w > 1)
        return tuple(larger_than_1[:1])


def scenario_from_json(data: dict[str, Any]) -> Scenario:
    """Rebuild a scenario that travelled as JSON."""
    params = tuple(
        Param(
            **{
                **p,
                **{name: tuple(p[name]) for name in ("shape", "exponents", "frozen_under")},
                "rows": tuple(map(tuple, p.get("rows", ()))),
            }
        )
        for p in data["params"]
    )
    groups, twin_groups = (
        tuple(tuple(group) for group in data[name]) for name in ("groups", "twin_groups")
    )
    tuples = {
        name: tuple(data[name])
        for name in (
            "steps",
            "world_sizes",
            "microbatch_weights",
            "simulated",
            "options",
            "loss_scales",
            "default_dtypes",
            "matmul_precisions",
            "nodes",
            "idle",
            "rewraps",
        )
    }
    nested = {
        "params": params,
        "groups": groups,
        "twin_groups": twin_groups,
        "ddp": DDPOptions(**data["ddp"]),
        "ddp_anew": tuple(DDPOptions(**options) for options in data["ddp_anew"]),
        "observe": Observation(**data["observe"]),
        "fault": Fault(**data["fault"]),
        "resume": Resume(**data["resume"]),
        "long_run": LongRun(**data["long_run"]),
        "profile": profile_from_json(data["profile"]),
    }
    return Scenario(**{**data, **tuples, **nested})
