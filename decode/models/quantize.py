"""Quantised targets through the libraries that machines have: bitsandbytes or torchao, by
transformers' own loaders.

A quantised model is another distribution than the one in full precision: "lossless" then
means with respect to the quantised one. Heads trained on the original weights fit it (the
weights' hash is that of the files) and accept a little less.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from outrider.conf.errors import UserError, first_line

# name -> (library, bits per weight with scales)
KINDS: dict[str, tuple[str, float]] = {
    "bnb-int8": ("bitsandbytes", 8.1),
    "bnb-nf4": ("bitsandbytes", 4.5),
    "torchao-int8": ("torchao", 8.3),
    "torchao-int4": ("torchao", 4.5),
}
NONE = "none"
# What is read as plain numbers: gpt-oss's two weights a byte with a scale for 32, and FP8 with a
# scale a block. The kernels for the packed ones are compiled code that transformers would fetch
# from the hub, and a machine that has them would give other numbers than one that has not.
UNPACKED = ("mxfp4", "fp8")


def _stored(folder: Path) -> dict[str, Any]:
    """Return how a checkpoint keeps its weights, by its config.json; {} for plain numbers."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return dict(found["quantization_config"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def stored(folder: Path) -> str:
    """Return the name of how a checkpoint keeps its weights; "" for plain numbers."""
    return str(_stored(folder).get("quant_method", ""))


def unpacked(folder: Path, kind: str) -> Any:
    """transformers' config that reads the weights of a checkpoint of UNPACKED as plain numbers.

    Raises UserError where they shall be quantised by `kind` as well."""
    if kind != NONE:
        raise UserError(
            f"target.quantize: the checkpoint keeps its weights in {stored(folder).upper()} and is "
            f"read as plain numbers; {kind} on top of it is not supported, leave it out"
        )
    from transformers.quantizers.auto import AutoQuantizationConfig

    found = AutoQuantizationConfig.from_dict(_stored(folder))
    found.dequantize = True
    return found


def bits(kind: str) -> float | None:
    """Bits per weight of the matrices, None without quantisation."""
    return None if kind == NONE else KINDS[kind][1]


def config(kind: str, dtype: Any) -> Any:
    """transformers' quantisation config for `kind`.

    Raises UserError where the library is not installed or too old.
    """
    library = KINDS[kind][0]
    if importlib.util.find_spec(library) is None:
        raise UserError(
            f"target.quantize: {kind} needs the library {library}, which is not installed; "
            f"pip install {library}, or set target.quantize=none"
        )
    try:
        if library == "bitsandbytes":
            from transformers import BitsAndBytesConfig

            if kind == "bnb-int8":
                # LLM.int8 keeps the columns in 16 bits where any token of a pass exceeds a
                # threshold (6 by default): a token's row would hang on what is drafted behind it.
                return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
            return BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            )
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        fewer = Int8WeightOnlyConfig if kind == "torchao-int8" else Int4WeightOnlyConfig
        return TorchAoConfig(fewer())
    except (ImportError, AttributeError, RuntimeError, ValueError) as error:
        raise UserError(
            f"target.quantize: {kind} does not work with this version of {library} "
            f"({first_line(error)}); update it, or set target.quantize=none"
        ) from error
