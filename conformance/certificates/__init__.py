"""Certificates: how they are issued, read, compared, and passed on.

``certificate`` issues one from the judgements of a session. ``reader`` reads a file, and ``flaws``
checks its content before anything relies on it: the rules and world sizes that are missing, and the
entries that contradict each other (``contradictions``). ``sources`` compares the digests of the
subject's source files with the files themselves, and ``signatures`` verifies a signature.
``schema`` validates by the JSON Schema, ``canonical`` makes the digest, ``versions`` converts
version 1 of the format, and ``reproduction`` makes the command that repeats a run. ``comparison``
compares a certificate with a baseline, for the gate. ``in_toto`` turns one into a statement that CI
can sign, and ``markdown_summary`` into a page of a CI job, by way of ``markdown``, which escapes
foreign text. No module here imports torch.
"""
