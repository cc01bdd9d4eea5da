"""A process that has the large libraries in memory and none of ours: it forks a child for
every trial of a mutant, and the child imports our code from the folder it runs in. Reads a job
per line of stdin, writes a result per line.

    python -m scripts.proofs.mutants.nursery (in a copy of the repository; \\
        scripts/mutants.py starts it)

A job: {"layer": "enumeration" | "tests" | "certificate", "file": the mutated file, "settings":
numbers of the certificates, "known": what correct code found for each, "trace": report
executed lines, "seconds": CPU limit}. A result: {"caught": bool, "why": str, "layer": str,
"lines": {file: [numbers]}, "known": parts by setting, "seconds": float}.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

LIBRARIES = (
    "torch",
    "transformers",
    "pytest",
    "hypothesis",
    "numpy",
    "scipy.stats",
    "matplotlib.pyplot",
    "omegaconf",
    "hydra",
    "rich.progress",
    "transformers.models.llama.modeling_llama",
    "datasets",
    "transformers.models.mistral.modeling_mistral",
    "transformers.generation",
)
# parts of a certificate that the code under test has no hand in, or no layer looks at
REFERENCE = ("noise", "reference", "plainly", "power")
WAIT = 20  # times its limit of CPU that a trial may take by the clock
WATCHED = ("decode", "heads")  # folders whose lines are reported


def serve() -> None:
    """Answer jobs until stdin ends."""
    import importlib

    for name in LIBRARIES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line))), flush=True)


def _forked(job: dict[str, Any]) -> dict[str, Any]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = os.fork()
        if child == 0:
            _child(job, answer)
        _, status = os.waitpid(child, 0)
        found = {"caught": True, "why": "", "layer": "", "lines": {}, "known": {}}
        if answer.is_file():
            found |= json.loads(answer.read_text())
        else:
            found["why"] = f"died or ran beyond {job['seconds']} s of CPU (status {status})"
            found["layer"] = "ended"
    return {**found, "seconds": round(time.monotonic() - start, 2)}


def _child(job: dict[str, Any], answer: Path) -> None:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"], job["seconds"]))
        signal.alarm(WAIT * job["seconds"])  # one that waits for ever uses no CPU
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        sys.dont_write_bytecode = not job.get("trace")
        found = _trial(job)
        answer.with_suffix(".part").write_text(json.dumps(found))
        answer.with_suffix(".part").rename(answer)
        code = 0
    finally:
        os._exit(code)


def _trial(job: dict[str, Any]) -> dict[str, Any]:
    lines: dict[str, set[int]] = {}
    known: dict[str, Any] = {}
    caught, why, layer = False, "", ""
    if job.get("trace"):
        sys.settrace(_tracer(lines))
    try:
        layer, why = _run(job, known)
        caught = bool(layer)
    except AssertionError as error:
        caught, why, layer = True, str(error)[:300], "wrong"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        caught, why, layer = True, f"{type(error).__name__} in {place}: {error}"[:300], "raised"
    sys.settrace(None)
    seen = {name: sorted(numbers) for name, numbers in lines.items()}
    return {"caught": caught, "why": why, "layer": layer, "lines": seen, "known": known}


def _run(job: dict[str, Any], known: dict[str, Any]) -> tuple[str, str]:
    """(layer, why) when the code was found wrong, else empty words."""
    if job["layer"] == "tests":
        from scripts.proofs.mutants.unit_tests import unit_tests

        unit_tests(job["file"])
        return "", ""
    from scripts.proofs.mutants import worlds as mutant_worlds

    if job["layer"] == "enumeration":
        mutant_worlds.enumeration()
        return "", ""
    from scripts.common.parts import Parts

    exact: list[Any] = []
    for number in job["settings"]:
        setting, parts = mutant_worlds.CERTIFIED[number], Parts(None)
        parts.memory.update(job["known"].get(str(number), {}))
        if exact:  # knows nothing of the drafter: once is enough
            parts.memory["exact"] = exact
        wrong = mutant_worlds.certify(setting, job["tokens"], parts)
        if wrong:
            name, why = next(iter(wrong.items()))
            return name, f"{setting.name}: {why}"
        exact = parts.memory.get("exact", [])
        kept = {k: v for k, v in parts.memory.items() if k.startswith(REFERENCE)}
        known[str(number)] = kept
    return "", ""


def _tracer(lines: dict[str, set[int]]) -> Any:
    root = os.getcwd()

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            lines[os.path.relpath(frame.f_code.co_filename, root)].add(frame.f_lineno)
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        name = os.path.relpath(frame.f_code.co_filename, root)
        if name.partition(os.sep)[0] not in WATCHED:
            return None
        lines.setdefault(name, set()).add(frame.f_lineno)
        return line

    return call


if __name__ == "__main__":
    serve()
