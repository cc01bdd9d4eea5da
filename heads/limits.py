"""How large the numbers of a head's configuration may be: what a file or a command line asks
for is compared with these before anything of that size is made."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Interval

MOST_NODES, MOST_DEPTH, MOST_WIDTH = 1024, 64, 256  # of a draft
MOST_LAYERS = 256  # of a stack: heads, blocks, decoder layers
MOST = 2**31 - 1  # of anything else that is counted

# The same as types of keys (conf/rules.py).
Shape = Literal["chain", "tree"]
Draw = Literal["sampled", "fixed"]
Nodes = Annotated[int, Interval(ge=1, le=MOST_NODES)]
Levels = Annotated[int, Interval(ge=1, le=MOST_DEPTH)]
Width = Annotated[int, Interval(ge=1, le=MOST_WIDTH)]
Layers = Annotated[int, Interval(ge=1, le=MOST_LAYERS)]
SomeLayers = Annotated[int, Interval(ge=0, le=MOST_LAYERS)]
Count = Annotated[int, Interval(ge=1, le=MOST)]
CountOrZero = Annotated[int, Interval(ge=0, le=MOST)]
TokenId = Annotated[int, Interval(ge=-1, le=MOST)]  # -1: none
Size = Annotated[float, Interval(ge=0, le=MOST)]
