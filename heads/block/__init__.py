"""Block heads, DFlash and DSpark: one pass of a few layers over masks drafts a whole block."""
