"""``chained``: a hook that needs a stream's order is judged with one collective at a time."""

import pytest

from conformance.judging.verdict import Verdict
from conformance.session.options import Options
from conformance.session.session import Session
from tests.cases import Case, own_judge

pytestmark = pytest.mark.ranks

TORCHS = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
STATE = (
    f"{TORCHS}:PowerSGDState,"
    "matrix_approximation_rank=4,start_powerSGD_iter=2,min_compression_rate=1"
)


def test_power_sgd_of_torch() -> None:
    """With several buckets it hangs on Gloo; in a stream's order it holds these rules."""
    rules = ("1.8", "3.1", "10.2", "10.3", "10.4", "13.1", "13.4")
    claims = "compressed(delta=0.25), warmup(2), chained"
    case = Case(f"{TORCHS}:powerSGD_hook", claims, STATE, worlds=(3,), rules=rules)
    judgements = own_judge().judge(case).items()
    others = {number: one.reason for number, one in judgements if one.verdict is not Verdict.PASS}
    assert others == {}


def test_the_profile_is_named_serialised() -> None:
    for claims, profile in (("exact, chained", "gloo-serialised"), ("exact", "gloo-cpu")):
        hook = "tests.right.chained:coarse_then_fine"
        options = Options(hook=hook, state="process_group", claims=claims, world_size="2")
        with Session.of(options) as session:
            session.start()
            session.begin()
            assert session.header["profile"]["name"] == profile
