"""Training of draft heads: entry points, the one loop, data, state on disk.

The contract: the target is frozen, and whatever subclasses heads.base.Head can be trained; the
loop knows no head by name. Batch k, the learning rate and every random number of step k are
functions of (seed, k), so a run that was stopped and started again ends with the same bits.
Losses are sums, divided once by the count over all micro-batches and ranks. What a run writes
is there whole or not at all.

Where things go: `loop.py` is the run in order of time, `run.py` what it works with, `data/`
rows and batches, `features/` features on disk; medusa.py, eagle.py,
hydra_heads.py and draft.py are entry points of ten lines. A new key goes into config.py, with
a line above it; one that does not change what is learned goes into LOGISTICS as well. What
follows from a row's text must change the key of the token cache (`data/batches.py`).

Not to be changed without tests/train/test_reliability*.py: the order of save and evaluation, what a
checkpoint holds, what the ranks exchange.
"""
