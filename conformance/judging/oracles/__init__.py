"""Compute the right results from a run's inputs, and the largest error of a right result.

``mean`` serves hooks with an exact claim, ``lossy`` hooks with a lossy one; every other kind of
subject has an oracle of its own.
"""
