"""Training of draft heads: entry points, the one loop, data, state on disk.

The contract: the target is frozen, and whatever subclasses heads.base.Head can be trained; the
loop knows no head by name. Batch k, the learning rate and every random number of step k are
functions of (seed, k), so a run that was stopped and started again ends with the same bits
(but with `minutes`, where the rate follows the clock). Losses are sums, divided once by the
count over all micro-batches and ranks. What a run writes is there whole or not at all.

In order of time: an entry point (medusa.py and its like: the formula, and a line) starts by
launch.py; setup.py makes the Run of run.py out of config.py's keys; loop.py steps, with
data/ for batches, features.py and following.py for features on disk, compiled.py, metrics.py
for sums and time, nonfinite.py for bad steps; evaluation.py decodes, checkpoint.py saves,
resuming.py says what a resume may change, log.py tells. measure.py, validate.py and dry_run/
say what it costs before it runs.

A new key goes into config.py, with a line above it; one that does not change what is
learned goes into MAY_CHANGE (resuming.py) as well. What follows from a row's text must
change the key of the token cache (data/).

Not to be changed without tests/train/test_reliability*.py: the order of save and
evaluation, what a checkpoint holds, what the ranks exchange.
"""
