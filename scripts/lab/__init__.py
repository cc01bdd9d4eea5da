"""The project's own laboratory: comparisons of engines, races, benches, proofs and the pages
that show their figures. Nothing outside imports it."""
