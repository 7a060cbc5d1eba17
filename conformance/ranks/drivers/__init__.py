"""What ranks do with a subject that is no hook: one module for each kind, with ``play(stage)``. Runs in ranks only."""
