"""The proposals of --claims auto for hooks with each kind of result."""

import pytest

from conformance.hosts.pool import Pool
from conformance.judging.rule import Rule, with_needed
from conformance.session.claim_search import SEARCHED, proposal_lines, search_claims
from conformance.session.engine import Engine
from conformance.session.run_sources import LocalSource
from conformance.subjects.claims import Claims
from conformance.subjects.spec import REFERENCE, SubjectSpec, parse_subject

STATE = "tests.right._common:State"
WORLDS = (2, 3)


@pytest.mark.parametrize(
    ("subject", "claims"),
    [
        # In every run, test_claims_are_proposed searches for claims by the command line.
        pytest.param(
            parse_subject("tests.right.exact:gives_sum", None, None),
            ("sum",),
            marks=pytest.mark.rarely,
        ),
        pytest.param(
            parse_subject("tests.right.few_bits:fp8", "process_group", None),
            ("compressed(feedback=False, delta=0.999)",),
            marks=pytest.mark.rarely,
        ),
        pytest.param(
            parse_subject("tests.right.sparse:less_by_step", STATE, None),
            ("compressed(delta=0.5), warmup(2)",),
            marks=pytest.mark.rarely,
        ),
        pytest.param(
            parse_subject(None, None, "examples.setups:own"),
            ("local(ratio=0), warmup(2)",),
            marks=pytest.mark.rarely,
        ),
        pytest.param(
            parse_subject("tests.right.at_random:qsgd_int8", STATE, None),
            ("compressed(feedback=False, delta=0.9)", "unbiased"),
            marks=pytest.mark.rarely,
        ),
        pytest.param(
            parse_subject("tests.mutants.feedback:residual_lost", None, None),
            (),
            marks=pytest.mark.rarely,
        ),
    ],
    ids=lambda value: value.name if isinstance(value, SubjectSpec) else "",
)
def test_proposes_the_strictest_that_hold(
    pool: Pool, rules: dict[str, Rule], subject: SubjectSpec, claims: tuple[str, ...]
) -> None:
    source = LocalSource(pool)
    control = Engine(source, rules, REFERENCE, Claims(), WORLDS)
    searched = with_needed(rules, SEARCHED)
    tried = search_claims(lambda claims: Engine(source, searched, subject, claims, WORLDS, control))
    assert [str(one.claims) for one in tried if one.refused_by is None] == list(claims)
    lines = proposal_lines(tried)
    proposed = [line for line in lines if line.startswith("proposed")]
    assert proposed == [f'proposed  --claims "{text}"' for text in claims]
    assert ("none of the claims holds" in lines[-1]) == (not claims)
