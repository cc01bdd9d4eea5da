"""`engines.py sampled`: is llama.cpp's sampled speculation lossless? Its server with a drafter,
taking the draft's best tokens (`greedy`) or drawing them from its law (`probabilistic`: true
rejection sampling, which this version has for a separate draft alone), certified over HTTP
against the same weights here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from conf.errors import UserError
from conf.rules import AboveZero, AtATime, Filled, Inside, OneOrMore, Seed, one_of
from conf.schema import entry
from decode.models.load import TargetConfig
from decode.sampling import Sampling
from heads.interop import exported
from scripts.common.parts import Parts
from scripts.reports.block import md_table
from scripts.serving import gguf_export, llamacpp_cases, server_certificate
from scripts.serving import llamacpp as server
from scripts.serving.asking import Address
from scripts.serving.drafter_laws import drafter_laws
from scripts.serving.engines import shared
from scripts.serving.engines.llamacpp import MAKE, target_file

PROBABILISTIC, GREEDY = "probabilistic", "greedy"
MODES = (PROBABILISTIC, GREEDY)
DRAWN = ("small_lm",)  # drafters whose law it samples; others take their best tokens all the same


@dataclass
class SampledConfig:
    """Keys of scripts/engines.py sampled."""

    # run folders or head folders to export and serve
    drafters: list[str]
    # JSON to write
    out: str = "docs/results/engines-llamacpp-sampled.json"
    # folder for exports and for the answers that are there
    work: str = "runs/engines-llamacpp"
    # the target of all of them
    target: TargetConfig = field(default_factory=TargetConfig)
    # how the draft is drawn: probabilistic, greedy
    modes: Filled[Annotated[str, one_of(MODES)]] = field(default_factory=lambda: [GREEDY])
    # draft tokens of a cycle
    draft_tokens: OneOrMore = 3
    # what is asked of the server
    temperature: AboveZero = 1.0
    # keep the k likeliest tokens; 0 = off
    top_k: int = 0
    # nucleus; 1 = off
    top_p: float = 1.0
    # sampled tokens, spread evenly over `at_a_time`
    tokens: OneOrMore = 3000
    # most tokens per answer
    max_new_tokens: OneOrMore = 64
    # numbers of requests that are asked together
    at_a_time: AtATime = field(default_factory=lambda: [1, 2, 8])
    # false-alarm rate of all tests together
    alpha: Inside = 1e-3
    # mean total variation from which on a bias of every known family must be found
    detect: Inside = 0.2
    # random biases of each family that the power is measured on
    members: OneOrMore = 4
    # JSONL of prompts
    prompts: str = "scripts/prompts/demo.jsonl"
    # how many of them
    num_prompts: OneOrMore = 50
    # of our own decoding, which this does not need
    batch_size: OneOrMore = 8
    # each slot's context
    context: OneOrMore = 512
    # the server's threads
    threads: OneOrMore = 1
    # addresses all random numbers
    seed: Seed = 0
    # Python of the environment with xllamacpp
    engine: str = ".venv-llamacpp/bin/python"

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        try:
            self.sampling()
        except UserError as error:
            return [str(error)]
        return []

    def sampling(self) -> Sampling:
        """What is asked of the server."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    def how(self) -> server_certificate.How:
        """What is asked of the server, and how it is judged."""
        return server_certificate.How(
            self.sampling(),
            self.tokens,
            self.max_new_tokens,
            2,
            tuple(self.at_a_time),
            self.alpha,
            self.detect,
            0.0,
            self.seed,
            self.members,
        )


@entry("engines_sampled", SampledConfig)
def main(cfg: SampledConfig) -> int:
    """Export, serve, certify, write."""
    python = shared.environment(cfg.engine, MAKE)
    stage = shared.Stage(cfg)
    target = target_file(stage, "float32")
    cases = []
    version = ""
    for found in stage.drafters():
        if PROBABILISTIC in cfg.modes and found.kind not in DRAWN:
            raise UserError(
                f"modes: {cfg.modes}; llama.cpp draws the tokens of a separate draft alone from "
                f"its law, {found.spec} is {found.kind}: set modes=[{GREEDY}]"
            )
        version, rows = served(cfg, stage, found, python, target)
        cases += rows
    about = {
        "temperature": cfg.temperature,
        "top_k": cfg.top_k,
        "top_p": cfg.top_p,
        "tokens": cfg.tokens,
        "at_a_time": list(cfg.at_a_time),
        "alpha": cfg.alpha,
        "detect": cfg.detect,
        "seed": cfg.seed,
        "cache": "float32",
        "threads": cfg.threads,
    }
    print(markdown(stage.report({"xllamacpp": version}, about, cases)))
    return stage.end()


def tell(what: str, done: int, total: int) -> None:
    """A line now and then."""
    if done == total or done % 500 < 8:
        print(f"{what}: {done} of {total}", flush=True)


def served(
    cfg: SampledConfig, stage: shared.Stage, found: shared.Found, python: Path, target: Path
) -> tuple[str, list[dict[str, Any]]]:
    """(version of the server, a row for every mode) of one drafter."""
    how, version, rows = cfg.how(), "", []
    folder = stage.exported(f"{found.kind}-float32", found, "gguf", "dtype=float32")
    towards = drafter_laws(str(found.folder), stage.target, cfg.sampling())
    draft = (exported(folder) or {})["files"][gguf_export.DRAFT]["sha256"]
    for mode in cfg.modes:
        settings = server.Settings(
            str(target),
            str(folder / gguf_export.DRAFT),
            llamacpp_cases.METHODS[found.kind],
            cfg.draft_tokens,
            probabilistic=mode == PROBABILISTIC,
            slots=max(cfg.at_a_time),
            context=cfg.context,
            threads=cfg.threads,
            talk=1,
        )
        name = f"sampled-{found.kind}-{mode}"
        key = [draft, mode, cfg.draft_tokens, vars(how) | {"members": None, "detect": None}]
        parts = Parts(stage.work / name, key)
        print(f"llama.cpp, {mode}: {found.spec}", flush=True)
        with server.running(python, settings, stage.work, name) as one:
            version = one.version
            address = Address(one.url, llamacpp_cases.PATIENCE, connections=max(cfg.at_a_time))
            paper = server_certificate.certified(
                stage.target, stage.ids, how, address, None, parts, tell, towards
            )
        rows.append(
            {
                "case": found.kind,
                "mode": mode,
                "drafter": found.spec,
                "card_sha256": found.card_sha256,
                "draft_tokens": cfg.draft_tokens,
                **brief(paper),
            }
        )
    return version, rows


def brief(paper: dict[str, Any]) -> dict[str, Any]:
    """A certificate without its single tests, of which only the smallest p-value stays; and
    without the address, which is another one in every run."""
    layers = []
    for layer in paper["layers"]:
        tests = layer.get("tests", [])
        kept = {k: v for k, v in layer.items() if k != "tests"}
        layers.append(kept | ({"tests": len(tests), "smallest": tests[0]} if tests else {}))
    power = paper["power"]
    return {
        "verdict": paper["verdict"],
        "reasons": paper["reasons"],
        "drafted": paper["server"]["drafted"],
        "layers": layers,
        "negative_controls": paper["negative_controls"],
        "min_detectable": power.get("min_detectable"),
        "notes": paper["notes"],
        "untested": paper["untested"],
    }


COLUMNS = (
    "served by llama.cpp",
    "draft drawn",
    "K",
    "sampled tokens",
    "drafted",
    "greedy tokens off",
    "sampling, p",
    "controls rejected",
    "bias surely found",
    "verdict",
)


def cells(report: dict[str, Any]) -> list[list[str]]:
    """The table's rows as text."""
    out = []
    for row in report["cases"]:
        layers = {layer["name"]: layer for layer in row["layers"]}
        greedy, sampling = layers["greedy"], layers["sampling"]
        least = row["min_detectable"]
        controls = row["negative_controls"]
        out.append(
            [
                row["case"],
                row["mode"],
                str(row["draft_tokens"]),
                f"{sampling['tokens']:,}",
                f"{row['drafted']:,}",
                f"{greedy['beyond_ties']} of {greedy['tokens']}",
                f"{sampling['p']:.2g}",
                f"{sum(c['rejected'] for c in controls)} of {len(controls)}",
                "–" if least is None else f"{least:.2f}",
                row["verdict"],
            ]
        )
    return out


def title(report: dict[str, Any]) -> str:
    """Where and how it was measured."""
    said = report["settings"]
    return (
        f"llama.cpp (xllamacpp {report['engine']['xllamacpp']}) on the CPU · sampled "
        f"(T = {said['temperature']:g}), {', '.join(map(str, said['at_a_time']))} at a time · "
        f"alpha {said['alpha']:g}"
    )


def markdown(report: dict[str, Any]) -> str:
    """The table for documents."""
    return md_table(COLUMNS, cells(report), (0, 1, -1))
