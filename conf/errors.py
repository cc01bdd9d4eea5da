"""The two exceptions every entry point turns into one line (see conf/schema.py `entry`)."""


class UserError(Exception):
    """A mistake the user can fix: one line, "key or file:line: what is wrong; the fix". Exit code 2, no traceback."""


class Interrupted(Exception):
    """A graceful stop after Ctrl-C or SIGTERM: the work done so far is saved. Exit code 130 (75 where "resume me" is meant)."""
