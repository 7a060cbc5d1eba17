"""Compute from a run's inputs what its results must be, and how far a right result can be from it.

``mean`` serves hooks with an exact claim, ``lossy`` hooks with a lossy one; every other kind of
subject has an oracle of its own.
"""
