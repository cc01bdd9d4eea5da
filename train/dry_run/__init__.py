"""A training run by formula (`validate dry_run=true`): its memory by part and its hours, from
the configs of target and head alone. Nothing is loaded, read or run."""
