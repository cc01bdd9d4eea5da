"""One file for each engine that is run, one for what their runs share. scripts/lab/engines.py is
the command line."""
