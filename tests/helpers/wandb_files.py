"""What wandb wrote in an offline run, read back: RUN.wandb is a LevelDB log of its own protocol's
records, which the library itself no longer reads in Python."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, MAGIC, BEGIN, HEAD = 32768, b":W&B", 7, 7
FULL, FIRST, LAST = 1, 2, 4


def records(path: Path) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB of pieces (checksum 4, size 2, type 1)."""
    data, at, whole = path.read_bytes(), BEGIN, b""
    assert data.startswith(MAGIC), path
    while at + HEAD <= len(data):
        if (left := BLOCK - at % BLOCK) < HEAD:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole = (b"" if kind in (FULL, FIRST) else whole) + data[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (FULL, LAST):
            yield whole


@dataclass
class Logged:
    """steps: the values of each step. summary, config: as they were last. project, id: of the
    run. staged: artifact -> name -> where this file waits to be sent."""

    project: str = ""
    id: str = ""
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    staged: dict[str, dict[str, Path]] = field(default_factory=dict)

    def table(self, step: int, name: str) -> list[dict[str, Any]]:
        """The rows of a table that was logged."""
        artifact, _, file = (
            self.steps[step][name]["artifact_path"].partition("://")[2].partition("/")
        )
        found = json.loads(self.staged[artifact][file].read_text())
        return [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]


def logged(folder: Path) -> Logged:
    """The one offline run under `folder`/wandb."""
    from wandb.proto import wandb_internal_pb2 as proto

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found = Logged()
    for data in records(path):
        record = proto.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            found.project, found.id = record.run.project, record.run.run_id
            found.config |= _values(record.run.config.update)
        contents = record.artifact.manifest.contents
        staged = {one.path: Path(one.local_path) for one in contents}
        found.staged |= {record.artifact.client_id: staged} if staged else {}
        found.config |= _values(record.config.update)
        found.summary |= _values(record.summary.update)
        if record.HasField("history"):
            values = _values(record.history.item)
            found.steps.setdefault(record.history.step.num, {}).update(values)
    return found


def _values(items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        *above, name = item.nested_key or [item.key]
        place = found
        for key in above:
            place = place.setdefault(key, {})
        place[name] = json.loads(item.value_json)
    return found
