"""Examine the matrices of a model, find what is wrong, and say what to try."""

MODULES = ("torch", "kappascope.clinic.diagnosing")  # what a worker needs
