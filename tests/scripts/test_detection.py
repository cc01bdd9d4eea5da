"""The sampling layer of a certificate on decoders that are right and on wrong ones, through
the whole loop.
"""

from __future__ import annotations

import pytest

from outrider.decode.sampling import Sampling
from outrider.scripts.proofs.biases import FAMILIES
from outrider.scripts.proofs.controls import rules as wrong_rules
from tests.helpers import detection


@pytest.fixture(scope="module")
def bench() -> detection.Bench:
    return detection.Bench("float32")


def test_the_two_decoders_that_one_order_could_not_see_are_rejected(bench: detection.Bench) -> None:
    merged = bench.sample(Sampling(1.0), 800, 0, wrong_rules.merges_neighbours(0.02))
    assert detection.verdict(merged, 1e-4)["rejected"] and merged.outside == 0
    rough = detection.Bench("bfloat16")
    uncut = rough.sample(detection.CUT, 300, 0, wrong_rules.ignores_truncation)
    assert uncut.outside > 10 and detection.verdict(uncut, 1e-4)["rejected"]
    good = rough.sample(detection.CUT, 300, 0)
    assert good.outside == 0 and good.edge <= 1 and not detection.verdict(good, 1e-4)["rejected"]


def test_a_biased_rule_has_the_total_variation_it_says(bench: detection.Bench) -> None:
    rule = detection.biased_rule("temperature", 0, detection.VOCAB, Sampling(1.0), 0.05)
    bench.sample(Sampling(1.0), 500, 0, rule)
    assert rule.reached == pytest.approx(0.05, abs=0.01)
    assert detection.biased_rule("temperature", 0, 4, Sampling(1.0), 0.0).reached == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_is_rejected_at_full_size(bench: detection.Bench, name: str) -> None:
    assert detection.family(bench, name, 0)["rejected"]


@pytest.mark.slow
def test_the_sound_engine_passes_twenty_seeds() -> None:
    benches = {dtype: detection.Bench(dtype) for dtype in ("float32", "bfloat16")}
    found = []
    for seed in range(20):
        sampling, dtype = detection.SETTINGS[seed % len(detection.SETTINGS)]
        sample = benches[dtype].sample(sampling, detection.SOUND_TOKENS, 1000 + seed)
        found.append(detection.verdict(sample, detection.SOUND_ALPHA))
    assert not any(row["rejected"] for row in found)
    assert sum(row["p"] < 0.1 for row in found) <= 8
