"""``chained``: what counts on a stream's order is judged with one collective at a time, and the certificate says so."""

import pytest

from conformance.judging.verdict import Verdict
from conformance.session.options import Options
from conformance.session.session import Session
from tests.cases import Case, own_judge

pytestmark = pytest.mark.ranks

TORCHS = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
STATE = f"{TORCHS}:PowerSGDState,matrix_approximation_rank=4,start_powerSGD_iter=2,min_compression_rate=1"


def test_power_sgd_of_torch() -> None:
    """With several buckets it hangs on Gloo, as they come; in a stream's order all of this holds."""
    rules = ("1.8", "3.1", "10.2", "10.3", "10.4", "13.1", "13.4")
    case = Case(f"{TORCHS}:powerSGD_hook", "compressed(delta=0.25), warmup(2), chained", STATE, worlds=(2, 3), rules=rules)
    judgements = own_judge().judge(case)
    assert {number: one.reason for number, one in judgements.items() if one.verdict is not Verdict.PASS} == {}


def test_the_profile_says_so() -> None:
    for claims, profile in (("exact, chained", "gloo-serialised"), ("exact", "gloo-cpu")):
        options = Options(hook="tests.right.chained:coarse_then_fine", state="process_group", claims=claims, world_size="2")
        with Session.of(options) as session:
            session.start()
            session.begin()
            assert session.header["profile"]["name"] == profile
