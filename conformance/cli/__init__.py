"""The command lines: pytest's and those of ``python -m conformance``.

``pytest_items`` makes each rule a pytest item, and prints the conclusion of the session. The other
modules are one subcommand each, for results that exist already: ``gate`` compares a certificate
with a baseline, ``summary`` writes Markdown for the page of a CI job, and ``statement`` writes an
in-toto statement. They read arguments and print, and import no torch; ``_arguments`` has their
parser. ``_shared`` has the stash key of the pool, which the kit's own tests share with the plugin.
"""
