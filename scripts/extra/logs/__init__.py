"""Logs of a served model as training data: `prepare` reads them, drops what comes twice, masks
secrets and personal data, and splits by time; `write` is `scripts/synthesize.py logs=...`,
which also asks what the target did not answer itself."""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.decode.models.load import load_tokenizer
from outrider.scripts.common.files import sole_folder
from outrider.scripts.extra.logs.ask import asker
from outrider.scripts.extra.logs.prepare import (
    LATER,
    TRAIN,
    LogOptions,
    LogsReport,
    LogWork,
    files_of,
    prepare,
)
from outrider.scripts.synthesis.config import SynthesizeConfig

__all__ = ["LATER", "TRAIN", "LogOptions", "LogWork", "LogsReport", "files_of", "prepare", "write"]


def write(cfg: SynthesizeConfig, out: Path) -> None:
    """Rows from logs into the folder `out`. Raises UserError, or Interrupted."""
    options = LogOptions(tuple(cfg.served), cfg.later, cfg.mask, tuple(cfg.regions), cfg.category)
    with sole_folder(out):
        report = prepare(
            cfg.log_files,
            out,
            cfg.target,
            load_tokenizer(cfg.target),
            options,
            asker(cfg) if cfg.again else None,
            LogWork(cfg.workers, quiet=False),
        )
    for line in report.lines():
        print(f"synthesize: {line}", file=sys.stderr)
    print(f"written: {report.train}, {report.later}")
