"""The card of a published head (README.md): what it is for, what was measured and how, how
it is decoded with, and nothing that nobody has tried."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from outrider.conf.errors import UserError
from outrider.heads.hub import LIBRARY
from outrider.heads.registry import title
from outrider.scripts.common.rendering import render
from outrider.scripts.exporting.card import trained_depth

TASK, REPORT = "text-generation", "report.json"


@dataclass(frozen=True)
class Row:
    """How a head drafted ("chain of 3", "tree of 16 nodes"), and the accepted length that
    came of it, bonus token counted, with its 95 % interval."""

    shape: str
    mean: float
    low: float
    high: float


@dataclass
class Publication:
    """What goes up. repository: OWNER/NAME. base_model: the target's repository, "" where
    it has none. card: head.json. manifest: outrider.json of an export, {} without one.
    files: by their place in the repository, their content or where they lie here. rows,
    prompts, protocol: what an evaluation says. training: what the run says of itself, by
    name."""

    repository: str
    base_model: str
    license: str
    datasets: list[str]
    card: dict[str, Any]
    manifest: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes | Path] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    prompts: str = ""
    protocol: str = ""
    training: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Say what it is and for which target."""
        target, what = self.card["target"] or {}, title(self.card["kind"])
        return f"{what[0].upper()}{what[1:]} for {self.base_model or target.get('name')}"


def page(about: Publication) -> str:
    """Return README.md: metadata as the hub reads it, then text."""
    from huggingface_hub import EvalResult, ModelCardData

    row = next((one for one in about.rows if one.shape.startswith("chain")), (*about.rows, None)[0])
    result = (
        EvalResult(
            task_type=TASK,
            dataset_type="".join(c if c.isalnum() else "-" for c in about.prompts),
            dataset_name=about.prompts,
            metric_type="accepted_length",
            metric_name=f"accepted length, {row.shape} [{row.low:.2f}, {row.high:.2f}]",
            metric_value=round(row.mean, 3),
        )
        if row
        else None
    )
    engine = about.manifest.get("engine_format")
    data = ModelCardData(
        license=about.license,
        library_name=LIBRARY,
        pipeline_tag=TASK,
        base_model=about.base_model or None,
        datasets=about.datasets or None,
        tags=["speculative-decoding", about.card["kind"], *([str(engine)] if engine else [])],
        model_name=about.repository.partition("/")[2],
        eval_results=[result] if result else None,
    )
    depth = trained_depth(about.card["head"]["config"])
    return render("published.md", metadata=data.to_yaml(), about=about, depth=depth)


def measured(place: Path, about: Publication) -> None:
    """Take what the report at `place` (or in that folder) says of this very head.

    Raises UserError where it is no report, of another target, or tells nothing of that head.
    """
    path = place / REPORT if place.is_dir() else place
    weights, target = about.card["weights"]["sha256"], about.card["target"] or {}
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        other = report["target"].get("weights_sha256") != target.get("weights_sha256")
        rows = [r for r in report["drafters"] if r.get("weights_sha256") == [weights]]
        about.rows = [_row(r) for r in rows if r["accepted_length"]["low"] is not None]
        about.prompts, about.protocol = _protocol(report["settings"])
    except OSError as error:
        raise UserError(f"report: {path}: {error.strerror}; give OUT of evaluate") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"report: {path} is no report of evaluate ({type(error).__name__}); give its OUT"
        ) from None
    if other:
        raise UserError(f"report: {path} was measured with another target; evaluate with this one")
    if not about.rows:
        raise UserError(
            f"report: {path} measured no head with these weights ({weights[:12]}); evaluate "
            "this one, or leave report out"
        )


def _row(row: dict[str, Any]) -> Row:
    length = row["accepted_length"]
    chain = f"chain of {int(row['max_depth'])}"
    shape = chain if row["shape"] == "chain" else f"tree of {int(row['max_nodes'])} nodes"
    return Row(shape, *(float(length[key]) for key in ("mean", "low", "high")))


def _protocol(how: dict[str, Any]) -> tuple[str, str]:
    """(name of the prompts, how they were asked, in a line)."""
    name = PurePath(str(how["prompts"]["path"])).name.removeprefix("suite=")
    heat, sha256 = float(how["temperature"]), str(how["prompts"]["sha256"])[:12]
    words = [
        f"{int(how['num_prompts'])} prompts of {name} (sha256 {sha256})",
        f"temperature {heat:g}" if heat else "greedy",
        f"at most {int(how['max_new_tokens'])} new tokens",
        f"{str(how['dtype'])[:10]}, {int(how['batch_size'])} at a time",
        "the bonus token counted, cycles cut by an end of answer left out",
        "95 % bootstrap intervals over prompts",
    ]
    return name, "; ".join(words)
