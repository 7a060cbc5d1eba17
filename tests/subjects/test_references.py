"""Rule 13.8: hooks give the results of the reference that they claim with ``like(reference)``.

Torch's own hooks hold the rule. Hooks with slightly different options do not.
"""

import pytest

from conformance.errors import TargetError
from conformance.judging.verdict import Judgement, Verdict
from tests.cases import Case, own_judge

pytestmark = pytest.mark.ranks

POWER_SGD = (
    "like(powerSGD_hook, matrix_approximation_rank=2, start_powerSGD_iter=2, "
    "min_compression_rate=1)"
)
TORCHS = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
SETTING = "matrix_approximation_rank=2,start_powerSGD_iter=2,min_compression_rate=1"


def judge(hook: str, claims: str, state: str) -> Judgement:
    case = Case(hook, claims, state, worlds=(2,), rules=("13.8",))
    return own_judge().judge(case)["13.8"]


@pytest.mark.parametrize(
    ("setting", "verdict"),
    [
        (SETTING, Verdict.PASS),
        (f"{SETTING},use_error_feedback=False", Verdict.FAIL),
        pytest.param(SETTING.replace("rank=2", "rank=3"), Verdict.FAIL, marks=pytest.mark.rarely),
        pytest.param(SETTING.replace("iter=2", "iter=3"), Verdict.FAIL, marks=pytest.mark.rarely),
    ],
)
def test_power_sgd_of_torch(setting: str, verdict: Verdict) -> None:
    """The model has one bucket: with several, torch's hook hangs on Gloo."""
    claims = f"compressed, warmup(2), {POWER_SGD}"
    judged = judge(f"{TORCHS}:powerSGD_hook", claims, f"{TORCHS}:PowerSGDState,{setting}")
    assert judged.verdict is verdict, judged


@pytest.mark.parametrize(
    ("state", "claims", "verdict"),
    [
        ("terngrad", "unbiased, like(TernGrad)", Verdict.PASS),
        pytest.param("terngrad", "unbiased, like(QSGD)", Verdict.FAIL, marks=pytest.mark.rarely),
        pytest.param(
            "qsgd_4_bits",
            "unbiased, like(QSGD, levels=7, block=16)",
            Verdict.PASS,
            marks=pytest.mark.rarely,
        ),
        pytest.param(
            "top_k_dgc",
            "compressed, like(TopK, ratio=0.25)",
            Verdict.FAIL,
            marks=pytest.mark.rarely,
        ),
        ("top_k_dgc", "compressed, like(TopK, ratio=0.25, momentum=0.5)", Verdict.PASS),
        ("scaled_sign", "compressed, like(OneBit)", Verdict.FAIL),
    ],
)
def test_compressors(state: str, claims: str, verdict: Verdict) -> None:
    judged = judge("hooks_ref:compression_hook", claims, f"examples.states:{state}")
    assert judged.verdict is verdict, judged


def test_unknown_options_of_the_reference_are_refused() -> None:
    with pytest.raises(TargetError, match=r"like\(TopK, part=1\).*part"):
        judge(
            "hooks_ref:compression_hook", "compressed, like(TopK, part=1)", "examples.states:top_k"
        )
