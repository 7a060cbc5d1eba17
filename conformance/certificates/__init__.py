"""Certificates: how they are issued, read, compared, and passed on.

``certificate`` issues one from the judgements of a session, and ``reader`` checks a file before
anything relies on it. ``comparison`` compares a certificate with a baseline, for the gate.
``in_toto`` turns one into a statement that CI can sign, and ``markdown_summary`` into a page of a
CI job, by way of ``markdown``, which escapes foreign text. No module here imports torch.
"""
