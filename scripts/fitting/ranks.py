"""A training of a fit: in this process, or in all that a launch starts.

As its own command, which `train` gives to accelerate, it is one of those processes:

    accelerate launch --config_file conf/launch/ddp.yaml scripts/fitting/ranks.py PLAN.json
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/fitting comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from outrider.train import launcher

    launcher.set_memory()

import yaml

from outrider.conf import threads
from outrider.conf.errors import CheckFailed, Interrupted, UserError, first_line
from outrider.conf.typed import from_json
from outrider.scripts.common import files
from outrider.scripts.fitting.config import FitConfig
from outrider.train.config import TrainConfig, entry_of

ENDS = {"UserError": UserError, "CheckFailed": CheckFailed}


def train(run: TrainConfig, cfg: FitConfig) -> None:
    """Train `run`, or go on. Raises as train.loop.fit does, in the words of a fit."""
    from outrider.train.loop import fit

    try:
        if cfg.accelerate:
            launched(run, cfg)
        else:
            fit(run)
    except UserError as error:
        raise UserError(in_words(str(error), cfg)) from error


def in_words(text: str, cfg: FitConfig) -> str:
    """A message of a training run with the names that its keys have in a fit."""
    source = "logs" if cfg.logs else "train"
    text = re.sub(r"(?<![\w.])data\.path(?![\w.])", source, text)
    return re.sub(r"(?<![\w.])out_dir(?![\w.])", "out", text)


def check_launch(cfg: FitConfig) -> None:
    """Raises UserError where this process is one of a launch, and for a file that starts none of
    one machine."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "accelerate: fit starts the processes of its training itself; give `outrider fit .. "
            "accelerate=conf/launch/ddp.yaml` in place of `accelerate launch`"
        )
    if not cfg.accelerate:
        return
    path = files.here(Path(cfg.accelerate))
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"accelerate: cannot read {cfg.accelerate} ({first_line(error)}); give a file of "
            "`accelerate config`, such as conf/launch/ddp.yaml"
        ) from None
    machines = content.get("num_machines", 1) if isinstance(content, dict) else 0
    if machines != 1:
        raise UserError(
            f"accelerate: {cfg.accelerate} is of {machines} machines; fit trains on one: give "
            "conf/launch/ddp.yaml, or train by train/eagle.py start=.."
        )


def launched(run: TrainConfig, cfg: FitConfig) -> None:
    """Train in the processes of cfg.accelerate. Raises UserError, CheckFailed or Interrupted as the
    first of them that came to its end by one."""
    plan = Path(run.out_dir).with_name(f"{Path(run.out_dir).name}.plan.json")
    ending = plan.with_suffix(".ending.json")
    ending.unlink(missing_ok=True)
    files.write_json(plan, {"parent": os.getpid(), "run": asdict(run)})
    argv = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    argv += ["--config_file", str(files.here(Path(cfg.accelerate)))]
    argv += ["--num_processes", str(cfg.processes)] if cfg.processes else []
    env = {**os.environ, **threads.waiting(os.environ, processes=2)}
    argv += [__file__, str(plan)]
    with (
        subprocess.Popen(
            argv,
            env=env,
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as child,
        passed_on(child) as heard,
    ):
        assert child.stderr is not None
        for line in child.stderr:
            if not ending.exists():  # else the launcher tells at length what a line will say
                print(line, end="", file=sys.stderr, flush=True)
        code = child.wait()
    end = json.loads(ending.read_text()) if ending.exists() else None
    for path in (plan, ending):
        path.unlink(missing_ok=True)
    if end is not None and end["kind"] == "Interrupted":
        raise Interrupted(end["text"], end["code"])
    if heard:
        raise Interrupted(code=130 if heard[0] == signal.SIGINT else 75)
    if end is not None:
        raise ENDS[end["kind"]](end["text"])
    if code:
        raise UserError(
            f"accelerate: the processes of {cfg.accelerate} ended with exit code {code}; see their "
            "messages above"
        )


@contextlib.contextmanager
def passed_on(child: subprocess.Popen[str]) -> Iterator[list[int]]:
    """The first signal that asks this process to stop is handed to `child`, which is in no
    terminal's group and saves before it ends. Yields the signals that came."""
    heard: list[int] = []

    def hand_on(number: int, _: Any) -> None:
        if not heard:
            child.send_signal(signal.SIGTERM)
        heard.append(number)

    before = {n: signal.signal(n, hand_on) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- one of the processes


def main(path: Path) -> int:
    """Train by a plan; what ends it in a line is left beside the plan. Returns the exit code."""
    from outrider.train.loop import fit

    plan = json.loads(path.read_text())
    _follow(plan["parent"])
    run, problems = from_json(plan["run"], entry_of(plan["run"]["head"]["kind"])[1])
    assert not problems, problems
    try:
        fit(run)
    except (UserError, CheckFailed, Interrupted) as error:
        code = getattr(error, "code", 2)
        ending = path.with_suffix(".ending.json")
        if not ending.exists():  # the first one knows why
            end = {"kind": type(error).__name__, "text": str(error), "code": code}
            files.write_json(ending, end)
        return int(code)
    return 0


def _follow(parent: int) -> None:
    """Stop, and save, when the fit is gone."""

    def watch() -> None:
        while True:
            try:
                os.kill(parent, 0)
            except OSError:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    launcher.run(lambda: sys.exit(main(Path(sys.argv[1]))))
