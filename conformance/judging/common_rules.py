"""Make the rules that several sections of the rule book share; each section gives its own number.

Assign the rule to a name of the section's file: pytest collects the rules among the file's names.
"""

from conformance.judging.oracles.failure import require_raised
from conformance.judging.oracles.kept import require_models_gone, require_nothing_kept
from conformance.judging.rule import Rule, WorldSizes, rule
from conformance.judging.side_effects import require_no_side_effects
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.model import CALL_FAILS, WORK_FAILS, Scenario
from conformance.subjects.claims import Claims

ON_MORE_RANKS = (
    "torch documentation, torchrun, Environment Variables; fairscale#132, hivemind#440: equal on "
    "two ranks, different on more"
)
"""The source of the rules of clusters."""

DEFAULT_DTYPE = (
    "torch documentation, torch.set_default_dtype: torch.zeros(n) and torch.tensor(0.5) have that "
    "dtype; scripts set it to bfloat16 to make a large model"
)
"""The source of the rules of default dtypes."""

AUTOCAST_OPERATIONS = (
    "torch documentation, Automatic Mixed Precision, of operations that autocast to half precision"
)
"""The source of the rules on autocast."""


TOGETHER = (
    "training changes many things at once; pairwise testing (Kuhn, Wallace and Gallo, IEEE "
    "Transactions on Software Engineering 30, 2004): most defects need one or two conditions"
)
"""The source of the rules of conditions that come together."""

TOGETHER_REMEDY = (
    "code for two conditions at once, such as a path for half precision on more than four ranks, "
    "or a count in a tensor of torch's default dtype, which is saved or is exact to 256 only"
)
"""The likely causes of the same rules."""


def leaves_no_trace(
    number: str,
    title: str = "Leaves the process as it was",
    *,
    on: tuple[Scenario, ...],
    needs: tuple[str, ...] = (),
    since: str = "1.0",
    source: str = (
        "torch documentation, reproducibility; the same as 9.1, 9.3, 9.4 and 9.6 of hooks"
    ),
    remedy: str = (
        "a seed that is set; a setting or a patched function that is not put back; "
        "a thread or a file that is left; a file, a thread or a group that is opened in every step"
    ),
) -> Rule:
    """Enter a rule in the book: the process of every rank is the same after the run as before.

    The rule watches every run of its kind; ``on`` names the plainest. A section with more to
    require decorates a function of its own, and calls
    :func:`conformance.judging.side_effects.require_no_side_effects` in it.

    Use it so::

        no_trace = leaves_no_trace("14.14", on=(PLAIN,))
    """
    enter = rule(
        number,
        title,
        on=on,
        needs=needs,
        since=since,
        source=source,
        remedy=remedy,
        watches=True,
    )
    return enter(_leaves_no_trace)


def _leaves_no_trace(run: Run, claims: Claims, found: Found) -> None:
    """After every run, random generators, settings of the process, functions of torch and Python,
    threads, child processes and temporary files are as they were before it, and no step leaves a
    descriptor, a thread or a process group more than the step before.
    """
    require_no_side_effects(run, claims, found)


def refuses_fewer_ranks(
    number: str,
    title: str = "Refuses fewer ranks than it takes",
    *,
    on: tuple[Scenario, ...],
    owns: tuple[Scenario, ...] = (),
    needs: tuple[str, ...] = (),
    since: str = "1.0",
    source: str = "the same as 2.11 of hooks",
    remedy: str,
) -> Rule:
    """Enter a rule in the book: a group smaller than the claim ``min_world_size`` is refused.

    The rule is judged at world sizes below the claim. It does not apply without the claim.

    Use it so::

        fewer = refuses_fewer_ranks("14.13", on=(PLAIN,), remedy="check the group's size ...")
    """
    enter = rule(
        number,
        title,
        on=on,
        owns=owns,
        needs=needs,
        since=since,
        source=source,
        remedy=remedy,
        claimed="min_world_size",
        worlds=WorldSizes.BELOW_MINIMUM,
    )
    return enter(_refuses_fewer_ranks)


def _refuses_fewer_ranks(run: Run, claims: Claims, found: Found) -> None:
    """With fewer ranks than ``min_world_size`` claims, the subject or its set-up raises an error
    on every rank, and no rank hangs.
    """
    # The engine counts a run that every rank refused as a pass. Only completed runs come here.
    found.require(
        False,
        "an error on every rank",
        f"{run.name}: every rank came to its end without an error",
        "min_world_size is claimed, but the subject does not check it",
    )


def right_beside_own_numbers(
    number: str,
    judges: tuple[Rule, ...],
    *,
    on: tuple[Scenario, ...],
    title: str = "Is right on both sides of the numbers in its own code",
    since: str = "1.6",
    source: str = (
        "code that takes another path for large tensors, or after some steps, than its tests have; "
        "the same as 25.1 of hooks"
    ),
    remedy: str = "the branch that begins at the number: it is right on one side of it only",
) -> Rule:
    """Enter a rule in the book: runs that are made for a number in the subject's code are right.

    Args:
        judges: the rules on large models and on long runs. A run is judged by the one whose
            scenario it is made from; without a variant, by the first.
        on: the scenario that stands for these runs.

    Use it so::

        own_numbers = right_beside_own_numbers("14.27", (large, long_run), on=(PROBE,))
    """
    by_variant = {scenario.variant: judge for judge in judges for scenario in judge.on}
    by_variant.setdefault("", judges[0])

    def is_right(records: Run | dict[str, Run], claims: Claims, found: Found) -> None:
        """If no other run took a branch that compares with a number, runs made for that number
        give right results too. So do runs for numbers that bound something without a branch: the
        size of a cache or a pool, the length of a plan, the numbers in a table.

        The number is evaluated from the code (``judging/oracles/code_numbers.py``). The runs have
        sizes, counts or steps below and above it (``scenarios/probes_of_kinds.py``), and are judged
        as large models and long runs are. At most eight numbers are tried, up to 2**22 elements
        or 2**24 bytes, 2,048 tensors and 2,048 steps. The certificate names them.
        """
        run = records if isinstance(records, Run) else next(iter(records.values()))
        by_variant[run.scenario.variant].check(records, claims, found)
        for failure in found.failures:
            failure.actual = f"{failure.actual} ({run.scenario.summary})"

    enter = rule(
        number,
        title,
        on=on,
        owns=on,
        needs=tuple(judge.number for judge in judges),
        baseline=judges[0].baseline,
        reads_all_runs=judges[0].reads_all_runs,
        since=since,
        source=source,
        remedy=remedy,
        probes=True,
    )
    return enter(is_right)


def right_however_strings_hash(
    number: str,
    judge: Rule,
    *,
    on: tuple[Scenario, ...],
    title: str = "Ranks may hash strings differently",
) -> Rule:
    """Enter a rule in the book: a subject is right if ranks hash strings differently.

    Args:
        judge: the rule on such a run whose ranks hash strings alike.

    Use it so::

        hash_seeds = right_however_strings_hash("14.28", dtypes, on=(HASH_SEEDS,))
    """

    def is_right(records: Run | dict[str, Run], claims: Claims, found: Found) -> None:
        """Results are right if ranks hash strings differently, as the processes of a cluster do:
        every second rank has another PYTHONHASHSEED.

        The ranks of other runs are forked from one process, and iterate over a set in one order.
        """
        judge.check(records, claims, found)

    enter = rule(
        number,
        title,
        on=on,
        owns=on,
        needs=(judge.number,),
        may_refuse=judge.may_refuse,
        baseline=judge.baseline,
        reads_all_runs=judge.reads_all_runs,
        since="2.0",
        source="Python documentation, PYTHONHASHSEED: strings are hashed with a value that is "
        "drawn anew for each process",
        remedy="a loop over a set of names or dtypes, or another order that depends on hashes: "
        "sorted() gives one that all ranks share; hash(), which differs between processes",
    )
    return enter(is_right)


def keeps_no_more(
    number: str,
    *,
    on: tuple[Scenario, ...],
    needs: tuple[str, ...],
    title: str = "Keeps no more with every step",
    since: str = "1.6",
    source: str = "pytorch#63162, pytorch#45968; the same as 23.8 of hooks",
    remedy: str = (
        "lists and dicts that collect values, futures, handles or Work objects; hooks that are "
        "registered in every step; sums that keep the graphs of all steps"
    ),
) -> Rule:
    """Enter a rule in the book: a long run keeps no more after two thirds of it than before.

    Args:
        on: the scenarios, which observe growth.

    Use it so::

        kept = keeps_no_more("14.23", on=(LONG,), needs=("14.21",))
    """
    enter = rule(
        number,
        title,
        on=on,
        needs=needs,
        since=since,
        source=source,
        remedy=remedy,
    )
    return enter(_keeps_no_more)


def _keeps_no_more(run: Run, claims: Claims, found: Found) -> None:
    """Tensors and their bytes, graphs of autograd, objects, entries of lists and dicts, keys in the
    store of process groups, temporary files and memory do not grow from step to step in a long run.

    Caches have two thirds of the run to fill. After that each count may rise for good once: an
    object in every k-th of n steps is found for k up to 3 n / 10, and growth that begins late
    (``judging/oracles/kept.py``).

    Of averagers: after the run eight further models come one after another, each with an averager
    that is called until it has averaged once. When all have gone, at most the last one may be kept,
    unless each averager has started a thread.
    """
    require_nothing_kept(run, found)
    require_models_gone(run, found)


def raises_if_collective_fails(
    number: str,
    *,
    call: str,
    on: tuple[Scenario, ...],
    needs: tuple[str, ...],
    since: str = "1.6",
    title: str = "Raises if its collective fails",
    source: str = (
        "torch documentation, torch.distributed.Work.wait: a failed collective raises; the same as "
        "12.1 of hooks"
    ),
    remedy: str = (
        "except clauses around collectives, and warnings in place of errors: let the exceptions "
        "pass; a collective with async_op=True whose wait() is never called"
    ),
) -> Rule:
    """Enter a rule in the book: the error of a failed collective leaves the subject's call.

    Args:
        call: the call, in words: ``average_parameters()``.

    Use it so::

        fails = raises_if_collective_fails("14.22", call="average_parameters()", on=..., needs=...)
    """

    def raises(run: Run, claims: Claims, found: Found) -> None:
        """If a collective fails on one rank, in the call that issues it or in its wait(), an error
        leaves the subject on that rank in the same step: the collective's own, or one that names
        it.

        From a drawn step on, the first, the second or the third collective fails, each in a run of
        its own; if wait() fails, one that is drawn, and sizes are drawn, too: 2**12 to 2**19
        elements. Both ranks have their turn.
        """
        require_error_of_collective(run, call, found)

    enter = rule(
        number,
        title,
        on=on,
        owns=on,
        needs=needs,
        since=since,
        source=source,
        remedy=remedy,
    )
    return enter(raises)


NO_CLOSURE = "step() takes no closure"

# The likely causes, by the failure that the kit has caused.
_SWALLOWED = {
    CALL_FAILS: "an except clause around the collective, or a context that ends errors, swallows "
    "the failure",
    WORK_FAILS: "wait() of an asynchronous collective is never called, or its error is swallowed; "
    "so is that of a future whose value is never read",
}


def require_error_of_collective(run: Run, call: str, found: Found) -> None:
    """Require that the error of the collective that the kit has failed leaves a call.

    Args:
        run: the run.
        call: the call, in words.
        found: receives the findings.
    """
    rank = run.ranks[run.scenario.fault.rank]
    if rank.first("takes_no_closure"):
        found.does_not_apply(NO_CLOSURE)
        return
    for fault in rank.all("fault"):
        if not fault["started"] and run.scenario.fault.in_post_hooks:
            found.leaves_out("its post hooks issue no collective that the kit sees")
        elif not fault["started"]:
            found.does_not_apply("the subject issues no collective that the kit sees")
        elif fault["unused"]:
            found.lacks_evidence("no collective came that the kit could fail")
        else:
            event = f"{fault['collective']} had failed"
            cause = _SWALLOWED[run.scenario.fault.kind]
            require_raised(found, fault, rank.rank, call, event, cause, "call wait()")
