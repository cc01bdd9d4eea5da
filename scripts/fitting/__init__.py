"""Fitting a drafter to traffic: keys, budget, training, verdict, report. scripts/fit.py is the
command."""
