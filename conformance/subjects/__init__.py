"""Subjects: their strings, their kinds and their claims. Imports no torch."""
