"""Files that commands write, whole or not at all (conf/disk.py). And what a figure needs to be
believed: versions, machine, command.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outrider.conf.commit import commit
from outrider.conf.disk import write_bytes as write_bytes
from outrider.conf.disk import write_text as write_text
from outrider.conf.errors import UserError

PACKAGES = ("torch", "transformers", "accelerate", "numpy")
ROOT = Path(__file__).resolve().parents[2]


# Keys of commands that change nothing in what they report.
BESIDE = ("out", "quiet", "overwrite", "wandb", "wandb_project")


def asked(cfg: Any, beside: Iterable[str] = ()) -> dict[str, Any]:
    """Return what a command was asked for, as its report keeps it: its keys, some left out."""
    left_out = {*BESIDE, *beside}
    found = {key: value for key, value in asdict(cfg).items() if key not in left_out}
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def unclaimed(report: Path, wanted: dict[str, Any], overwrite: bool) -> None:
    """Raise UserError where `report` is there and not of what is `wanted` (`asked`), unless
    it may be replaced: the same command writes its own report anew."""
    if overwrite or not report.exists():
        return
    try:
        known = dict(json.loads(report.read_bytes())["asked"])
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    apart = [key for key in {**known, **wanted} if known.get(key) != wanted.get(key)]
    if apart:
        other = f" with another {', '.join(apart[:4])}" if known else ""
        raise UserError(
            f"out: {report} exists{other}; set overwrite=true to replace it, or give another folder"
        )


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def json_line(row: dict[str, Any]) -> str:
    """Return a row as a line of JSON, letters readable."""
    return json.dumps(row, ensure_ascii=False) + "\n"


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(map(json_line, rows)))


def here(path: Path) -> Path:
    """`path`, ~ being the home folder; where it is relative and not found, the repository's
    file of that name, so that the prompts that come with it are found from any folder."""
    path = path.expanduser()
    return path if path.exists() or not (ROOT / path).is_file() else ROOT / path


def sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes; it is looked for as `here` does."""
    with open(here(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return versions, processor or GPU, threads, commit: what a measured figure depends
    on."""
    import torch

    versions = {package: installed(package) or "absent" for package in PACKAGES}
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "versions": {"python": platform.python_version(), **versions},
        "processor": processor(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": commit() or "unknown",
    }


def origin(device: str = "cpu") -> dict[str, Any]:
    """Return where the figures of a file come from: created, command and environment."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "environment": environment(device),
    }


def installed(package: str) -> str:
    """Return the version of a package; "" where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def command() -> str:
    """Return the command line of this process as one would type it, relative to the
    repository."""
    import shlex

    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(name), *sys.argv[1:]])


def code_sha256(parts: Iterable[str], root: Path = ROOT) -> str:
    """Hash of all Python files in these folders of the repository."""
    digest = hashlib.sha256()
    for file in [file for part in parts for file in sorted((root / part).rglob("*.py"))]:
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def processor() -> str:
    """Return the name of this machine's processor."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (named or [platform.processor() or platform.machine()])[0]


@contextlib.contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Hold a file or folder that a command writes against a second process.

    Its lock file goes when the block ends.
    Raises UserError when another process holds it, or nothing can be written there.
    """
    from filelock import FileLock, Timeout

    path = path.expanduser().resolve()
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as e:
        raise UserError(
            f"out: another process is writing {path}; wait for it or give another name"
        ) from e
    except OSError as e:
        why = e.strerror or e
        raise UserError(f"out: cannot write to {path.parent} ({why}); choose another folder") from e
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
