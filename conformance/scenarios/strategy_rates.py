"""Classes of the optimizers that a sync strategy is given, and learning rates of their groups.

A group rests while its rate is 0: layers are unfrozen one after another, a warm-up may begin at 0,
and a schedule may end there. Its gradients are means like all others: momentum, and Adam's
averages, take them in at any rate.

The groups have the keys that schedules of torch.optim put into them, and in the first step all of
them rest: a linear warm-up by LambdaLR begins with step / warm-up = 0.
"""

from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.strategy import SHARED

# Two optimizers have two groups each.
GROUPS = 4
_OPTIMIZERS = GROUPS // 2
_LEAST_EXPONENT = -12
_WARM_UP = 1  # steps in which all groups rest


# Classes of torch.optim, and the names of the states that each keeps of a parameter: they take in
# its gradients at any rate. Their groups have no momentum, or one of 0.
_WITHOUT_MOMENTUM = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "Adadelta": ("square_avg", "acc_delta"),
    "RMSprop": ("square_avg",),
}
_SGD = ("SGD", ("momentum_buffer",))


def classes(scenario: Scenario) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the classes of the optimizers, with the names of their states.

    One of two optimizers, which is drawn, is an SGD with momentum; the class of the other is drawn,
    and so is whether it has no states yet, as before its first step.
    """
    if scenario.variant != SHARED.variant:
        return (_SGD,) * _OPTIMIZERS
    draws = generator(scenario, "classes")
    name = draws.choice(sorted(_WITHOUT_MOMENTUM))
    has_states = draws.random() < 0.5
    other = (name, _WITHOUT_MOMENTUM[name] if has_states else ())
    return (_SGD, other) if draws.random() < 0.5 else (other, _SGD)


def rates(scenario: Scenario, step: int) -> tuple[float, ...]:
    """Return the rates of the groups in a step, of one optimizer after the other.

    In the first step all groups rest; in each later one, one of them moves at least. A drawn group
    goes on resting until a later step; another one moves at first, and rests from a drawn step on.
    The other two rest in drawn steps. In one step all groups of one optimizer rest, and in a later
    one all groups of the other.
    Rates of groups that move are 1e-12 to 1.

    Returns:
        The rates; () in scenarios in which all rates are 0.
    """
    if scenario.variant != SHARED.variant:
        return ()
    resting = resting_groups(scenario, step)
    draws = generator(scenario, f"rates {step}")
    drawn = [10 ** draws.uniform(_LEAST_EXPONENT, 0) for _ in range(GROUPS)]
    return tuple(0.0 if group in resting else rate for group, rate in enumerate(drawn))


def schedule_keys(scenario: Scenario, optimizer: int) -> dict[str, float]:
    """Return what a schedule has put into each group of an optimizer, beside its rate.

    One of two optimizers, which is drawn, has a LambdaLR, and the other one a OneCycleLR.

    Args:
        scenario: the scenario.
        optimizer: its number.
    """
    draws = generator(scenario, "schedules")
    largest = 10 ** draws.uniform(-4, 0)
    if optimizer == draws.randrange(_OPTIMIZERS):
        return {"initial_lr": largest}
    return {"initial_lr": largest / 25, "max_lr": largest, "min_lr": 0.0}


def resting_groups(scenario: Scenario, step: int) -> frozenset[int]:
    """Return the numbers of the groups that rest in a step; see :func:`rates`."""
    if step < _WARM_UP:
        return frozenset(range(GROUPS))
    draws = generator(scenario, "resting groups")
    late, early, *others = draws.sample(range(GROUPS), GROUPS)
    step -= _WARM_UP
    count = len(scenario.steps) - _WARM_UP
    late_moves_at = draws.randint(2, count - 2)
    early_rests_at = draws.randint(1, count - 2)
    one_moves_alone_at = draws.randrange(early_rests_at)
    others_move_alone_at = draws.randint(early_rests_at, count - 1)
    beside_early = {group for group in range(GROUPS) if group // 2 == early // 2}
    of_step = generator(scenario, f"resting groups {step}")
    resting = {group for group in others if of_step.random() < 0.5}
    if step < late_moves_at:
        resting.add(late)
    if step >= early_rests_at:
        resting.add(early)
    if step == one_moves_alone_at:
        # Groups of one optimizer are neighbours; the group that moves belongs to the other one.
        resting.update(group for group in range(GROUPS) if group not in beside_early)
    if step == others_move_alone_at:
        resting.update(beside_early)
    if len(resting) == GROUPS:
        # The optimizer that has not the early one has one of the others at least.
        resting.discard(next(group for group in others if group not in beside_early))
    return frozenset(resting)
