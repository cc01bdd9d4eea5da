"""heads/interop/engines.yaml: the one table of engines, versions and drafters."""

from __future__ import annotations

import datetime

import pytest

from outrider.heads.interop import LAYOUTS, engines
from outrider.heads.interop.engines import ENGINES, Engine, Support


@pytest.mark.parametrize("key", ENGINES)
def test_versions_are_in_order_and_sources_are_named(key: str) -> None:
    engine = ENGINES[key]
    for name, support in engine.drafters.items():
        given = [v for v in (support.since, support.until, engine.newest) if v]
        assert given == sorted(given, key=engines.order), name
        assert support.source, name
        assert support.until != engine.newest or not engine.newest, f"{name}: leave until out"


def test_every_layout_is_one_that_its_engine_loads_or_loaded() -> None:
    assert datetime.date.fromisoformat(engines.CHECKED)
    for (format, kind), layout in LAYOUTS.items():
        assert kind in layout.engine.drafters, (format, kind)


def test_what_versions_load_is_told_by_all_parts_of_a_head() -> None:
    old = Engine("E", {"a": Support(since="0.9"), "b": Support("0.10", "1.2"), "c": Support()}, "2")
    assert old.versions("a") == "E 0.9 to 2" and old.versions("c") == "E 2"
    assert old.versions("a", "b") == "E 0.10 to 1.2" and old.versions("c", "b") == "E 0.10 to 1.2"
    assert old.loads("a", "c") and not old.loads("a", "b") and not old.loads("d")
    last = Engine("E", {"medusa": Support(until="1.2")}, "2")
    assert last.versions("medusa") == "E up to 1.2" and "E 2" in last.gone("medusa")
    assert not last.gone("eagle3") and not old.gone("a")
