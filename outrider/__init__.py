"""Outrider under one import name: `outrider.train`, `outrider.heads`, `outrider.decode`, ..

In a clone these are links to the folders beside this one, in a wheel the folders themselves, so
nothing here meets a `scripts/` or a `train.py` of a user's own. `outrider.api` is the Python side.
Importing this loads nothing.
"""
