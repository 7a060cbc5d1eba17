"""What --claims auto proposes for hooks of each kind."""

import pytest

from conformance.hosts.pool import Pool
from conformance.judging.rule import Rule
from conformance.session.claim_search import proposal_lines, search_claims
from conformance.session.engine import Engine
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import Claims
from conformance.subjects.spec import REFERENCE, parse_subject


@pytest.mark.parametrize(
    ("hook", "state", "claims"),
    [
        ("tests.right.exact:gives_sum", None, ("sum",)),
        ("tests.right.few_bits:fp8", "process_group", ("compressed(feedback=False, delta=0.999)",)),
        ("tests.right.sparse:less_by_step", "tests.right._common:State", ("compressed(delta=0.5), warmup(2)",)),
        ("setup:examples.setups:own", None, ("local, warmup(2)",)),
        ("tests.right.at_random:qsgd_int8", "tests.right._common:State", ("compressed(feedback=False, delta=0.9)", "unbiased")),
        ("tests.mutants.feedback:residual_lost", None, ()),
    ],
)
def test_proposes_the_strictest_that_hold(
    pool: Pool, rules: dict[str, Rule], hook: str, state: str | None, claims: tuple[str, ...]
) -> None:
    source, worlds = LocalSource(pool), (2, 3)
    subject = parse_subject(None, state, hook.removeprefix("setup:")) if hook.startswith("setup:") else parse_subject(hook, state, None)
    control = Engine(source, rules, REFERENCE, Claims(), worlds)
    tried = search_claims(lambda claims: Engine(source, rules, subject, claims, worlds, control))
    assert [str(one.claims) for one in tried if not one.failed] == list(claims)
    lines = proposal_lines(tried)
    assert [line for line in lines if line.startswith("proposed")] == [f'proposed  --claims "{one}"' for one in claims]
    assert ("none of the claims holds" in lines[-1]) == (not claims)
