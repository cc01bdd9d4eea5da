"""Logs of a served model as training data: `prepare` reads them, drops what comes twice, masks
secrets and personal data, and splits by time. Who asks what the target did not answer itself is
`scripts/synthesize.py`."""

from scripts.extra.logs.prepare import LATER, TRAIN, LogOptions, LogsReport, prepare

__all__ = ["LATER", "TRAIN", "LogOptions", "LogsReport", "prepare"]
