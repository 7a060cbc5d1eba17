"""States and set-ups as they are given to ``--state`` and ``--setup``: one for each reference hook, to run and to copy."""
