"""Commands: evaluate, certify, tune, synthesize, export and others; a room for each topic.

The contract: a command is a file here with a typed configuration, a docstring that says how it
is called, and an exit code (0 done, 1 a check failed, 2 a mistake to mend in one line, 75 and
130 stopped and resumable). It reads its keys from conf/NAME.yaml, writes JSON beside every
page it draws, and leaves whole files or none.

Where things go: the entry point stays short and hands over to its room (`scoring/`,
`tuning/`, `data/`, `certificate/`, `exporting/` for other engines,
`serve_http/` for the page of our own server, `reports/`); `common/` is what several rooms need. A
configuration that a room reads is in that room's config.py, so that no room imports its own
command. Rooms import train, heads, decode and conf; nothing imports scripts. cli.py is the command
`outrider`, which runs these files; api.py is for Python.
"""
