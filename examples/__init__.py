"""States for ``--state`` and set-ups for ``--setup``, one or more for each reference hook."""
