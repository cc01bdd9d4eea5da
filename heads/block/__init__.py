"""Block heads: one pass drafts a whole block (DFlash, DSpark)."""
