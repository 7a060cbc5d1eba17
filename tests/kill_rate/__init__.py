"""Break the references mechanically, one place at a time, and count how many of the broken ones the
rule book refuses.

    python -m tests.kill_rate [--module sign ...] [--sample 20] [--seed 0] [--survivors] [--short]
    python -m tests.kill_rate --sample 0 --limit 60 --record results.jsonl

Not part of the test run. Each mutation is made in a copy of ``hooks_ref`` and ``examples`` under
other names, in a folder of its own. It is judged until a MUST rule fails: beside its own original,
under ``like`` (13.8, 14.9), and by the commands of ``hooks_ref/README.md`` that use the module. All
cases are judged by the rules whose runs are short, and then the first by the other rules. Survivors
are printed with their place and their change. A person then writes the reason into
``kill_rate.toml``: the mutation is equivalent, or no claim covers it, or the book has a hole.
Mutations listed there are counted, and judged only with ``--survivors``; those that are proposed
there, from reading alone, are judged as all others are.

``mutating.py`` makes the mutations, ``cases.py`` has the cases, ``judging.py`` judges a mutation,
and ``__main__.py`` runs them all and prints the table.
"""

import tomllib

from tests.kill_rate.cases import USERS
from tests.kill_rate.mutating import ROOT, Mutation, keys, mutations

__all__ = ["ROOT", "USERS", "Mutation", "explained", "keys", "mutations", "on_file"]
PROPOSED = "proposed"


def explained() -> dict[str, tuple[str, str]]:
    """Return, by key, the kind of each survivor and the reason why it survives."""
    return {key: (kind, reason) for key, (kind, reason) in on_file().items() if kind != PROPOSED}


def on_file() -> dict[str, tuple[str, str]]:
    """Return the same, and beside it the proposals."""
    kinds = tomllib.loads((ROOT / "tests" / "kill_rate.toml").read_text())
    return {
        key: (kind, reason)
        for kind, reasons in kinds.items()
        for reason, keys in reasons.items()
        for key in keys
    }
