"""Where an export or an imported head may be written."""

from __future__ import annotations

from pathlib import Path

from outrider.conf.errors import UserError
from outrider.heads.checkpoint import recover
from outrider.heads.interop import MANIFEST, exported


def free_place(out: Path, overwrite: bool, by: str) -> Path:
    """`out`, if it may be written. by: the file by which an earlier one that may be replaced is
    known. Raises UserError for a folder that exists."""
    recover(out)
    if not out.exists() and not out.is_symlink():
        return out
    if not out.is_dir():
        raise UserError(f"out: {out} is a file; give a folder")
    if not any(out.iterdir()):
        return out
    if not overwrite:
        raise UserError(
            f"out: {out} exists; set overwrite=true to replace it as a whole, or give another "
            "folder"
        )
    if not (exported(out) if by == MANIFEST else (out / by).is_file()):
        raise UserError(
            f"out: {out} is no earlier one of these (no {by}); overwrite=true would delete all "
            "that is there: give another folder"
        )
    return out
