"""The experiments, as data.

A scenario defines the steps of the ranks and the observations that are recorded. It knows no
verdicts: each scenario runs once per world size, and many rules read its records. Scenarios travel
to the ranks as JSON.
"""

from dataclasses import asdict, dataclass
from typing import Any

from conformance.scenarios.profiles import GLOO_CPU, Profile, profile_from_json


@dataclass(frozen=True)
class Param:
    """One parameter of the probe model.

    Attributes:
        shape: its shape.
        dtype: a name that torch has, e.g. ``"float32"``.
        layout: ``contiguous``, ``channels_last``, ``transposed``, or ``sparse`` (an embedding whose
            gradient is a sparse tensor).
        frozen: it requires no gradient.
        uses: how often the forward uses it. Its gradient is the sum over all uses.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    frozen: bool = False
    uses: int = 1


@dataclass(frozen=True)
class DDPOptions:
    """DistributedDataParallel's arguments.

    Attributes:
        bucket_cap_mb: the largest size of a bucket, in MiB.
        gradient_as_bucket_view: gradients are views of the buckets.
        find_unused_parameters: some ranks leave some parameters out of the forward
            (``gradients.uses``).
        static_graph: the graph is the same in every step.
    """

    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False


@dataclass(frozen=True)
class Observation:
    """The records that are made besides the gradients of every step.

    Attributes:
        hook: the hook is registered inside an observer; if false, exactly as it was given.
        memory: memory is measured after every step.
        other_gradients: gradients outside the bucket are compared before and after each hook call.
        bytes_sent: the sizes of the tensors that the subject passes to collectives.
        collectives: every collective, before it begins.
        process: the state that every library in the process shares: settings, generators, threads,
            files, replaced functions. The first scenario of each kind always records it.
    """

    hook: bool = True
    memory: bool = False
    other_gradients: bool = False
    bytes_sent: bool = False
    collectives: bool = False
    process: bool = False


@dataclass(frozen=True)
class Fault:
    """A failure that the kit causes.

    Attributes:
        kind: ``none``, ``peer_dies``, ``peer_dies_later``, ``collective_raises`` or
            ``peer_silent``.
        step: the step in which it happens.
        group_timeout: the process group's own timeout in seconds, if it is to expire; else 0.
    """

    kind: str = "none"
    step: int = 2
    group_timeout: float = 0.0


@dataclass(frozen=True)
class Resume:
    """Saving a state, and going on from it in new processes.

    Attributes:
        saves_at: the number of steps after which the subject's state is saved; 0 for never.
        resumes: start from the state that the run of the prerequisite saved.
        saved_in: the folder of that run; '' before it is known.
    """

    saves_at: int = 0
    resumes: bool = False
    saved_in: str = ""


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
        observe: the records that are made.
        order: the order in which ranks enter the hook and callbacks run: ``free``, or an order of
            ``ranks/instruments/schedule.py``.
        seed: the seed of that order.
        fault: the failure that the kit causes.
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
        twin: another model with the same subject trains in turns with this one, on other inputs.
        other_hash_seed: run in processes with another PYTHONHASHSEED than the other scenarios.
        deadline: seconds after which the run counts as hanging; 0 for the pool's own deadline.
        kind: the kind of subject (``subjects/kinds``); it decides how ``steps`` are read and which
            driver runs.
        variant: which experiment of its kind this is, if there are several.
        options: the parts of the subject's claims that ranks need.
        delayed: slow kernels precede gradients and collectives (``instruments/stream_delays.py``).
        captured: a step is captured in a CUDA graph and replayed (``drivers/cuda_graph.py``).
        profile: the backend and the device; set by the engine.
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
    observe: Observation = Observation()
    order: str = "free"
    seed: int = 0
    fault: Fault = Fault()
    resume: Resume = Resume()
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
    twin: bool = False
    other_hash_seed: bool = False
    deadline: float = 0.0
    kind: str = "hook"
    variant: str = ""
    options: tuple[str, ...] = ()
    delayed: bool = False
    captured: bool = False
    profile: Profile = GLOO_CPU

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def watches_process(self) -> bool:
        """Whether the state of the process is recorded (``Observation.process``).

        The plainest scenario of each kind, which is its own prerequisite, always records it.
        """
        return self.observe.process or self.name == self.prerequisite

    @property
    def intercepts(self) -> bool:
        """Whether collectives pass through the kit."""
        faulty = self.fault.kind in ("collective_raises", "peer_dies_later")
        records = self.observe.bytes_sent or self.observe.collectives
        return self.order != "free" or faulty or records or self.serialised

    def group_of(self, rank: int, world: int) -> tuple[int, ...]:
        """Return the global ranks of the group that ``rank`` trains in."""
        return next((group for group in self.groups if rank in group), tuple(range(world)))

    def inputs_of(self, rank: int, world: int) -> int:
        """Return the number of steps for which a rank has inputs.

        If inputs are uneven, rank 0 has all, the last of three or more ranks has none, and the
        others have half.
        """
        if not self.uneven or rank == 0:
            return len(self.steps)
        if rank == world - 1 and world > 2:
            return 0
        return len(self.steps) // 2

    def fits(self, worlds: tuple[int, ...]) -> tuple[int, ...]:
        """Return the world sizes at which the scenario runs, out of those of the profile.

        If the profile has none of the scenario's sizes, it runs at the smallest size above 1.
        """
        if self.simulated:
            return (1,)
        if self.groups:
            # The groups fix the world size, whatever sizes the profile has.
            return (sum(map(len, self.groups)),) if max(worlds) > 1 else ()
        fitting = tuple(w for w in worlds if not self.world_sizes or w in self.world_sizes)
        if fitting:
            return fitting
        larger_than_1 = sorted(w for w in worlds if w > 1)
        return tuple(larger_than_1[:1])


def scenario_from_json(data: dict[str, Any]) -> Scenario:
    """Rebuild a scenario that travelled as JSON."""
    params = tuple(Param(**{**p, "shape": tuple(p["shape"])}) for p in data["params"])
    groups = tuple(tuple(group) for group in data["groups"])
    tuples = {
        name: tuple(data[name])
        for name in ("steps", "world_sizes", "microbatch_weights", "simulated", "options")
    }
    nested = {
        "params": params,
        "groups": groups,
        "ddp": DDPOptions(**data["ddp"]),
        "observe": Observation(**data["observe"]),
        "fault": Fault(**data["fault"]),
        "resume": Resume(**data["resume"]),
        "profile": profile_from_json(data["profile"]),
    }
    return Scenario(**{**data, **tuples, **nested})
