"""Is an engine's sampled speculation lossless, version by version? Each engine serves one tiny
target without a draft, the control, and with each draft that it knows; every answer token is placed
in the distribution of the same weights here, as scripts/certify.py url=... does.

    python scripts/lab/serving/versions.py                # all that can run here; goes on
    python scripts/lab/serving/versions.py transformers   # those whose names begin so

llama.cpp (the wheel that `make engines ONLY=llamacpp` installs) and our own server are asked over
HTTP, 1, 2 and 8 requests at a time; transformers' assisted generation runs in this process, which
decodes one row at a time. The draft is the target's own first two layers. Every case runs twice,
under two seeds. Writes docs/results/engine-versions.json, a row as it is done; rows of another
version stay, and a row that is there is not run again. The table stands in docs/engines.md.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else this folder comes first
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch

from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.tiny import END, START, STOP
from outrider.decode.sampling import Sampling
from outrider.scripts.common import files
from outrider.scripts.common.memo import Memo
from outrider.scripts.extra.llamacpp import server as llamacpp
from outrider.scripts.lab.pages import sampled_versions as page
from outrider.scripts.lab.serving.llamacpp_cases import PATIENCE
from outrider.scripts.proofs import certificate
from outrider.scripts.proofs.greedy import Plain
from outrider.scripts.proofs.served import SampledAnswer
from outrider.scripts.serving import gguf_export, server_certificate
from outrider.scripts.serving.asking import Address
from outrider.scripts.serving.sampled_answers import SampledResponse, own_distributions

WORK = files.ROOT / "runs/engine-versions"
PYTHON = files.ROOT / ".venv-llamacpp/bin/python"
SHAPE: dict[str, Any] = {"hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 260}
LAYERS, DRAFT_LAYERS, DRAFTED = 8, 2, 3
PROMPTS = [[5, 77, 200, 31], [9, 8, 7], [100, 101, 102, 103, 104, 105], [40]]
TOKENS, LIMIT, GREEDY, SEEDS = 2400, 32, 2, (0, 1)
SAMPLING, ALPHA, DETECT, MEMBERS = Sampling(0.8), 1e-3, 0.25, 2
NONE = "none"


def lettered() -> Any:
    """A tokenizer whose words spell UTF-8 in any order, which servers want of their answers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = [END, START, STOP, *(f"w{i}" for i in range(3, SHAPE["vocab"]))]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=STOP, pad_token=END)


class Pair:
    """Target and draft, in memory and as folders."""

    def __init__(self) -> None:
        self.folders = WORK / "target", WORK / "draft"
        whole = load_target(TargetConfig(kind="tiny", layers=LAYERS, **SHAPE), "float32", "cpu")
        cut = load_target(TargetConfig(kind="tiny", layers=DRAFT_LAYERS, **SHAPE), "float32", "cpu")
        cut.model.load_state_dict(whole.model.state_dict(), strict=False)
        for folder, made in zip(self.folders, (whole, cut), strict=True):
            made.model.save_pretrained(folder)
            lettered().save_pretrained(folder)
        self.target, self.draft = (
            load_target(TargetConfig(kind="local", path=str(folder)), "float32", "cpu")
            for folder in self.folders
        )
        self.plain = Plain(self.target)


def how(seed: int, levels: tuple[int, ...]) -> server_certificate.How:
    """What is asked, and how it is judged."""
    sizes = (TOKENS, LIMIT, GREEDY, levels, ALPHA, DETECT, 0.0, seed, MEMBERS)
    return server_certificate.How(SAMPLING, *sizes)


def asked(pair: Pair, url: str, seed: int) -> dict[str, Any]:
    """The certificate of a server."""
    address = Address(url, PATIENCE, connections=8)
    levels = how(seed, (1, 2, 8))
    tell = lambda *_: None
    return server_certificate.certified(
        pair.target, PROMPTS, levels, address, None, Memo(None), tell
    )


# --- llama.cpp


def served_by_llamacpp(pair: Pair, draft: str, seed: int) -> dict[str, Any]:
    """draft: none, greedy or probabilistic."""
    kind, prompts = gguf_export.Kind("float32"), [torch.tensor(p) for p in PROMPTS[:2]]
    paths = WORK / "target.gguf", WORK / "draft.gguf"
    for path, made in zip(paths, (pair.target, pair.draft), strict=True):
        if not path.exists():
            gguf_export.write_model(path, made.model, pair.target, prompts, kind)
    settings = llamacpp.LlamaServerSettings(str(paths[0]), slots=8, context=256, talk=1)
    if draft != NONE:
        drawn = draft == "probabilistic"
        settings = llamacpp.LlamaServerSettings(
            str(paths[0]), str(paths[1]), "SIMPLE", DRAFTED, drawn, 8, 256, talk=1
        )
    with llamacpp.running(PYTHON, settings, WORK, f"llamacpp-{draft}") as server:
        return asked(pair, server.url, seed)


# --- our own server


@contextlib.contextmanager
def our_server(pair: Pair, drafter: str) -> Iterator[str]:
    """scripts/serve.py while the block runs."""
    command = [
        *(sys.executable, str(files.ROOT / "scripts/serve.py"), "target=local", "port=0"),
        *(f"target.path={pair.folders[0]}", f"drafters=[{drafter}]", "dtype=float32", "key_env="),
    ]
    with open(WORK / "serve.log", "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield line.strip().rpartition(": ")[2]
        finally:
            process.terminate()
            process.wait()


def served_by_us(pair: Pair, draft: str, seed: int) -> dict[str, Any]:
    """draft: none, ngram or model."""
    drafter = f"{pair.folders[1]}@chain:{DRAFTED}" if draft == "model" else draft
    with our_server(pair, drafter) as url:
        return asked(pair, url, seed)


# --- transformers


@dataclass
class Passes:
    """Forward passes of a model while the block runs, and the tokens that they read."""

    model: Any
    count: int = 0
    read: int = 0

    def __enter__(self) -> Passes:
        self.hook = self.model.register_forward_pre_hook(self._passed, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.remove()

    def _passed(self, model: Any, args: Any, keys: dict[str, Any]) -> None:
        self.count, self.read = self.count + 1, self.read + keys["input_ids"].shape[1]

    def drafted(self, answers: Sequence[SampledAnswer]) -> int:
        """Tokens that were verified: of the first pass of an answer those behind the prompt, of
        the others those behind the token that was drawn last."""
        prompts = sum(len(answer.prompt) for answer in answers)
        return self.read - prompts - (self.count - len(answers))


ASSISTED: dict[str, Callable[[Pair], dict[str, Any]]] = {
    NONE: lambda pair: {},
    "assistant model": lambda pair: {"assistant_model": pair.draft.model},
    "prompt lookup": lambda pair: {"prompt_lookup_num_tokens": DRAFTED},
}


def answers(pair: Pair, draft: str, count: int, seed: int | None) -> Iterator[SampledAnswer]:
    """Of transformers' generate, until so many tokens came. seed: None for greedy answers."""
    model, number = pair.target.model, 0
    chosen: dict[str, Any] = {"do_sample": False}
    if seed is not None:
        heat = SAMPLING.temperature
        chosen = {"do_sample": True, "temperature": heat, "top_k": 0, "top_p": 1.0}
    while count > 0:
        prompt = PROMPTS[number % len(PROMPTS)]
        torch.manual_seed((seed or 0) * 1_000_003 + number)
        ids = torch.tensor([prompt])
        more = chosen | ASSISTED[draft](pair)
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, **more
            )
        tokens = out[0, len(prompt) :].tolist()
        yield SampledAnswer(number, number, 1, prompt, tokens)
        count, number = count - len(tokens), number + 1


def generated(pair: Pair, draft: str, seed: int) -> dict[str, Any]:
    """The certificate of transformers' own loop, draft by draft. Its settings are the defaults."""
    plan, probs = how(seed, (1,)), own_distributions(pair.plain)
    tie = server_certificate.SAFETY * pair.plain.rounding(PROMPTS[:2])["gap"]
    with Passes(pair.target.model) as passes:
        greedy = [*answers(pair, draft, GREEDY * LIMIT, None)]
        sampled = [*answers(pair, draft, TOKENS, seed)]
    drafted = passes.drafted([*greedy, *sampled])
    layers = [server_certificate.greedy_layer(greedy, probs, tie, Address("in process"))]
    replies = SampledResponse("transformers", sampled, greedy, drafted, [])
    tell = lambda *_: None
    layer, negative, power = server_certificate.sampling_layers(
        pair.target, replies, probs, plan, tell
    )
    layers.append(layer)
    power["cycles_with_a_draft"] = drafted if draft != NONE else None
    verdict, reasons = certificate.verdict(layers, negative, power, DETECT)
    return {
        "verdict": verdict,
        "reasons": reasons,
        "server": {"drafted": drafted},
        "layers": layers,
        "negative_controls": negative,
        "power": power,
    }


# --- all of them

Run = Callable[[Pair, str, int], dict[str, Any]]
# engine -> package, its run, drafts
ENGINES: dict[str, tuple[str, Run, tuple[str, ...]]] = {
    "llama.cpp": ("xllamacpp", served_by_llamacpp, (NONE, "greedy", "probabilistic")),
    "transformers": ("transformers", generated, tuple(ASSISTED)),
    "outrider": ("outrider", served_by_us, (NONE, "ngram", "model")),
}


def package_version(package: str) -> str:
    """Of the engine: xllamacpp lives in an environment of its own, ours is named by its commit
    as well."""
    if package == "outrider":
        return f"{version(package)}, {files.commit(':!docs', ':!*.md')}"
    if package != "xllamacpp":
        return version(package)
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    said = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    return said.stdout.strip()


def brief(found: dict[str, Any]) -> dict[str, Any]:
    """What the table needs of a certificate."""
    sampling = next(layer for layer in found["layers"] if layer["name"] == "sampling")
    greedy = next(layer for layer in found["layers"] if layer["name"] == "greedy")
    controls = found["negative_controls"]
    return {
        "verdict": found["verdict"],
        "reasons": found["reasons"],
        "tokens": sampling["tokens"],
        "drafted": found["server"]["drafted"],
        "p": sampling["p"],
        "smallest": sampling["tests"][0],
        "tests": len(sampling["tests"]),
        "greedy_off": greedy["beyond_ties"],
        "greedy_tokens": greedy["tokens"],
        "controls": len(controls),
        "controls_rejected": sum(control["rejected"] for control in controls),
        "min_detectable": found["power"].get("min_detectable"),
    }


def main(names: Sequence[str]) -> None:
    """Case after case; the control of an engine first, in the same run."""
    WORK.mkdir(parents=True, exist_ok=True)
    pair = Pair()
    for engine, (package, run, drafts) in ENGINES.items():
        if names and not engine.startswith(tuple(names)):
            continue
        which = package_version(package)
        for seed in SEEDS:
            for draft in drafts:
                known = page.read()
                about: dict[str, Any] = {"engine": engine, "package": package, "version": which}
                about |= {"draft": draft, "seed": seed}
                if any(about.items() <= row.items() for row in known):
                    continue
                row = about | brief(run(pair, draft, seed)) | files.origin()
                files.write_json(page.RESULTS, {"rows": [*known, row]})
                print(json.dumps({k: v for k, v in row.items() if k != "environment"}), flush=True)
    page.refresh()


if __name__ == "__main__":
    main(sys.argv[1:])
