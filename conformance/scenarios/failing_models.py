"""A scenario for hooks with a path for some dtypes: one model after another, and each one fails.

A collective of each model fails on all ranks: its call raises once it is issued, or its Work ends
with the error. All ranks notice it, as if a switch had failed, so that none waits for another, and
the next model can follow in the same processes. Each model has one dtype, a group and a state of
its own. Per dtype there are six models, of one parameter or of two to four: the Work fails for few
elements and for many, and the call for any number. These numbers are drawn from the session's seed:

elements    of a model: 2**2 to 2**10, or 2**10 to 2**19, every number as likely as its double; if
            the call fails, 2**2 to 2**19
buckets     one for all parameters of a model, or one for each
place       the collective of the step: the first, or the last
step        the first step of a model that fails: 1 to 3

Between these two, a rank could wait for a collective that another rank never issues, since it has
failed before: a leader of nodes issues more collectives than others.

If steps of a claimed warm-up come first, there are fewer models: those of ``_MOST_STEPS``, and at
least ``_FEWEST``. Under ``local`` the first collective fails that a rank issues.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from conformance.scenarios.hook import COLLECTIVE_RAISES, VALUES
from conformance.scenarios.model import EACH_MODEL_FAILS, Fault, Param, Scenario
from conformance.scenarios.seeds import generator

_DTYPES = ("float16", "bfloat16", "float64", "float32", "complex64")
_SMALL = (2, 10)  # exponents of two
_LARGE = (10, 19)
_ANY = (2, 19)
_LATEST = 3
_ATTEMPTS = 6
_ANY_PLACE = 1
_MOST_STEPS = 600
_FEWEST = 3

EACH_FAILS = replace(
    VALUES,
    name="each_fails",
    summary="one model after another, of parameters of one dtype each; a drawn collective of each "
    "fails on all ranks, as it is called or as it ends",
    params=tuple(Param((17,), dtype) for dtype in _DTYPES),
    steps=("tiled",) * _LATEST,
    world_sizes=(2,),
    fault=Fault(EACH_MODEL_FAILS, step=1, succeeding=_ANY_PLACE, attempts=_ATTEMPTS),
    prerequisite=COLLECTIVE_RAISES.name,
)
SCENARIOS = (EACH_FAILS,)


@dataclass(frozen=True)
class FailingModel:
    """One of the models.

    Attributes:
        scenario: the scenario with the model's parameters and buckets, and with the number of the
            step from which on it may fail.
        place: ``Fault.succeeding`` of hooks.
        fails_at_end: the Work of the collective fails, and not the call.
    """

    scenario: Scenario
    place: int
    fails_at_end: bool

    @property
    def dtype(self) -> str:
        return self.scenario.params[0].dtype

    @property
    def sizes(self) -> list[int]:
        """The numbers of elements of its parameters."""
        return [spec.shape[0] for spec in self.scenario.params]


def failing_models(scenario: Scenario) -> list[FailingModel]:
    """Return the models of a scenario, in the order in which they run."""
    dtypes = dict.fromkeys(spec.dtype for spec in scenario.params)
    models = [model for dtype in dtypes for model in _of_dtype(scenario, dtype)]
    generator(scenario, "order").shuffle(models)
    # A refusal of complex numbers comes last: it may not come on all ranks.
    models.sort(key=lambda model: model.dtype.startswith("complex"))
    steps = scenario.unrecorded_steps + scenario.fault.step + _LATEST
    return models[: max(_FEWEST, _MOST_STEPS // steps)]


def _of_dtype(scenario: Scenario, dtype: str) -> Iterator[FailingModel]:
    """Yield the models of a dtype."""
    draw = generator(scenario, dtype)
    # A backend whose Works end on a stream reports their failures through its watchdog.
    ways = (False,) if scenario.profile.ordered else (False, True)
    for fails_at_end in ways:
        shapes = list(product((False, True), (_SMALL, _LARGE) if fails_at_end else (_ANY,)))
        places = [0, -1] * (len(shapes) // 2)
        draw.shuffle(places)
        for (has_several, exponents), place in zip(shapes, places, strict=True):
            elements = int(2.0 ** draw.uniform(*exponents))
            count = draw.randint(2, min(4, elements)) if has_several else 1
            cap = draw.choice((16 / 2**20, 25.0))
            step = scenario.fault.step + draw.randrange(_LATEST)
            changed = replace(
                scenario,
                params=tuple(
                    Param((elements // count + (number < elements % count),), dtype)
                    for number in range(count)
                ),
                ddp=replace(scenario.ddp, bucket_cap_mb=cap),
                fault=replace(scenario.fault, step=step),
            )
            is_any = scenario.fault.succeeding == _ANY_PLACE
            yield FailingModel(changed, place if is_any else 0, fails_at_end)
