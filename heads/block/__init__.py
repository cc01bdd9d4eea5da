"""Block heads: one pass drafts a whole block (DFlash, its causal kind, DSpark)."""
