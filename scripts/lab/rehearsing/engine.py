"""A `llama-server` command line of the page, served by llama.cpp's wheel, which has no such
program."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from outrider.conf.errors import UserError
from outrider.scripts.extra.llamacpp import server
from outrider.scripts.extra.llamacpp.process import Running

FLAGS = {  # flag -> its value where it is left out
    "-m": "",
    "-md": "",
    "--port": "8080",
    "--spec-type": "",
    "--spec-draft-n-max": "0",
    "--spec-draft-p-min": "0",
    "-np": "1",
    "-c": "2048",
    "-fa": "auto",
    "-ctk": "f16",
    "-ctv": "f16",
}
METHODS = {
    "": "",
    "draft-eagle3": "EAGLE3",
    "draft-dflash": "DFLASH",
    "draft-dspark": "DSPARK",
    "draft-simple": "SIMPLE",
}


def read(words: tuple[str, ...]) -> dict[str, str]:
    """The flags of a command line. Raises UserError for one that is not known here."""
    given = dict(zip(words[1::2], words[2::2], strict=False))
    unknown = [flag for flag in given if flag not in FLAGS]
    if len(words) % 2 == 0 or unknown or "-m" not in given:
        flags = ", ".join(unknown) or "it"
        raise UserError(f"{words[0]}: {flags} cannot be read here; give {', '.join(FLAGS)}")
    return {**FLAGS, **given}


def settings(words: tuple[str, ...], threads: int) -> server.LlamaServerSettings:
    """What such a server runs. Raises UserError for flags that our starter does not have."""
    given = read(words)
    slots = int(given["-np"])
    exact = (given["-fa"], given["-ctk"], given["-ctv"]) == ("off", "f32", "f32")
    if given["--spec-type"] not in METHODS or float(given["--spec-draft-p-min"]):
        known = ", ".join(filter(None, METHODS))
        raise UserError(f"--spec-type: give one of {known}, and --spec-draft-p-min 0")
    return server.LlamaServerSettings(
        model=given["-m"],
        draft=given["-md"],
        method=METHODS[given["--spec-type"]],
        draft_tokens=int(given["--spec-draft-n-max"]),
        slots=slots,
        context=int(given["-c"]) // slots,
        threads=threads,
        talk=1,
        exact=exact,
    )


def address(words: tuple[str, ...]) -> str:
    """Where the page says that it listens."""
    return f"http://localhost:{read(words)['--port']}"


def running(
    words: tuple[str, ...], python: Path, work: Path, threads: int
) -> AbstractContextManager[Running]:
    """The server while the block runs, at an address of its own."""
    name = f"port-{read(words)['--port']}"
    return server.running(python, settings(words, threads), work, name)
