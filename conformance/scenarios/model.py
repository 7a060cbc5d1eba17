"""The experiments, as data. A scenario says what ranks do and what is observed; it knows no verdicts.

Each scenario of a plan runs once per world size, and many rules read its records.
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
        uses: how often the forward uses it; its gradient is the sum of as many.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    frozen: bool = False
    uses: int = 1


@dataclass(frozen=True)
class Scenario:
    """One experiment.

    Attributes:
        name: what its runs are called: ``name@world_size``.
        what: one line for people.
        params: the probe model's parameters; empty for the real network of ``training``.
        steps: the kind of gradient (``inputs.KINDS``) that each step feeds.
        world_sizes: the world sizes it is meant for; () means every one of the profile.
        bucket_cap_mb: DDP's, in MiB.
        view: DDP's ``gradient_as_bucket_view``.
        find_unused: DDP's ``find_unused_parameters``; some ranks then leave some parameters out (``inputs.uses``).
        static_graph: DDP's.
        shares: one for each micro-batch of a step, all but the last under ``no_sync``: what its gradient is a multiple of the
            step's by; integers that sum to 1.
        uneven: ranks have different numbers of inputs (``inputs_of``), and train under ``Join``.
        groups: disjoint groups of global ranks that each train their own model; () means WORLD.
        observed: the hook is registered inside an observer; if false, exactly as it was given.
        order: in which order ranks enter the hook, and callbacks run: ``free``, or one of ``schedule.py``.
        seed: of that order.
        fault: what the kit does to the run at ``fault_step``: ``none``, ``peer_dies``, ``peer_dies_later``,
            ``collective_raises`` or ``peer_silent``.
        group_timeout: the process group's own timeout, in seconds, where it is to expire; 0 means that it is not.
        growth: measure memory after every step.
        outside: around every call of the hook, the gradients that are not in its bucket are compared.
        after: the scenario without whose end this one is not tried: it would only say the same again.
        first_step: the number that the first step has to the inputs, where a run continues another.
        repeat: distinguishes runs that are the same experiment.
        counted: what the subject gives to collectives is on record at the fault.
        twin: another model with the same subject trains in between, on other inputs.
        saves_at: the number of steps after which the subject's state is saved; 0 means that it is not.
        resumes: goes on from what the run of ``after`` has saved, in new processes.
        saved_in: the folder of that run.
        recorded: every collective is on record, before it begins.
        elsewhere: in processes where Python hashes strings otherwise than in those of the other scenarios.
        deadline: seconds until it is taken to hang; 0 means the pool's.
        level: what parameters hold at first: far from zero, so that it shows where a hook mixes them into gradients; zero where
            they are stepped, since small steps would be lost in its roundings.
        simulated: numbers of ranks that are simulated in one process, see ``simulate.py``; nothing else is run then.
        recipe: trains by ``recipe.py``, by which gradients are scaled too; parameters are on record after every step.
        poststep: the trainer makes a call when backward is over, see ``Trainee.register``.
        call: its name, or '' where the set-up says what it is.
        serialised: a collective is over before the next one begins, as if all were on one stream.
        kind: of the subject, see ``kinds``; what follows from it are the steps and what ``drive`` makes of them.
        case: which of the experiments of its kind it is, where there are several.
        said: what ranks have to know of what the subject says.
        delayed: work that takes its time lies in front of gradients, and of collectives, see ``streams.py``.
        captured: a step is captured in a CUDA graph and replayed, see ``graphs.py``.
        watched: what its process has that every library in it shares is watched (settings, generators, threads, files, functions that
            were replaced), as in the plainest scenario of each kind.
        profile: where it is run, which the engine says.
        fused: parameters are on record after every step, and results too where the hook has freed the gradients.
    """

    name: str
    what: str
    params: tuple[Param, ...]
    steps: tuple[str, ...]
    world_sizes: tuple[int, ...] = ()
    bucket_cap_mb: float = 25.0
    view: bool = False
    find_unused: bool = False
    static_graph: bool = False
    shares: tuple[int, ...] = (1,)
    uneven: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    observed: bool = True
    order: str = "free"
    seed: int = 0
    fault: str = "none"
    fault_step: int = 2
    group_timeout: float = 0.0
    growth: bool = False
    outside: bool = False
    after: str = "values"
    first_step: int = 0
    repeat: int = 0
    level: float = 1024.0
    simulated: tuple[int, ...] = ()
    recipe: bool = False
    poststep: bool = False
    call: str = ""
    serialised: bool = False
    fused: bool = False
    counted: bool = False
    twin: bool = False
    saves_at: int = 0
    resumes: bool = False
    saved_in: str = ""
    recorded: bool = False
    elsewhere: bool = False
    deadline: float = 0.0
    kind: str = "hook"
    case: str = ""
    said: tuple[str, ...] = ()
    delayed: bool = False
    captured: bool = False
    watched: bool = False
    profile: Profile = GLOO_CPU

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def watches_process(self) -> bool:
        """Whether the process is watched: in the plainest scenario of each kind, and in those that say so. In others a rule finds nothing
        of it on record."""
        return self.watched or self.name == self.after

    @property
    def intercepts(self) -> bool:
        """Whether collectives pass through the kit."""
        faulty = self.fault in ("collective_raises", "peer_dies_later")
        return self.order != "free" or faulty or self.counted or self.recorded or self.serialised

    def group_of(self, rank: int, world: int) -> tuple[int, ...]:
        """Return the global ranks of the group that ``rank`` trains in."""
        return next((group for group in self.groups if rank in group), tuple(range(world)))

    def inputs_of(self, rank: int, world: int) -> int:
        """Return how many steps ``rank`` has inputs for: rank 0 for all, others for less, the last of three or more for none."""
        if not self.uneven or rank == 0:
            return len(self.steps)
        return 0 if rank == world - 1 > 1 else len(self.steps) // 2

    def fits(self, worlds: tuple[int, ...]) -> tuple[int, ...]:
        """Return the world sizes to run at, out of those of the profile.

        A scenario meant for sizes that the profile lacks runs at the smallest size above 1.
        """
        if self.simulated:
            return (1,)
        if self.groups:
            return (sum(map(len, self.groups)),) if max(worlds) > 1 else ()
        wanted = tuple(w for w in worlds if not self.world_sizes or w in self.world_sizes)
        return wanted or tuple(sorted(w for w in worlds if w > 1)[:1])


def scenario_from_json(data: dict[str, Any]) -> Scenario:
    """Rebuild a scenario that travelled as JSON."""
    params = tuple(Param(**{**p, "shape": tuple(p["shape"])}) for p in data["params"])
    groups = tuple(tuple(group) for group in data["groups"])
    plain = {name: tuple(data[name]) for name in ("steps", "world_sizes", "shares", "simulated", "said")}
    return Scenario(**{**data, **plain, "params": params, "groups": groups, "profile": profile_from_json(data["profile"])})
