"""Decoding: one loop for every drafter, every batch size and plain decoding, and the rules that
leave the target's distribution as it is.

The contract: a drafter (drafters.py) sees committed tokens and the features that predicted
them, and proposes a DraftTree (tree.py) that states what every node was drawn from; nothing
else of it counts. The target scores the tree in one pass, verify.py picks a path and one token
more, and those are committed. So a broken drafter costs speed, never the distribution.
Random numbers are addressed by (seed, request, cycle, node, purpose): no row depends on its
neighbours. What a drafter decides must follow from earlier cycles alone.

Read in this order: verify.py (the rule) and residual.py (its arithmetic), engine.py (the cycle),
siblings.py (what the rule reads of a tree), tree.py, layout.py and grow.py (drafts), sampling.py
(distributions), scorer.py and cache.py (the pass); guidance.py doubles the rows of a batch,
checks.py holds what is refused. A drafter that knows logits level by
level implements grow.LevelSource and has chains, static and dynamic trees; one that works otherwise
implements drafters.Drafter. A model that cannot be scored is refused by probe.py, which asks the
model, not a table of names.

Not to be changed without the enumerator (tests/decode/test_verify*.py) and the golden tokens
(tests/golden): verify.py, residual.py, siblings.py, sampling.py, rng.py, grow.py, and the order in
which cache.py commits.
"""
