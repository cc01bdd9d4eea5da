"""Negative controls: known wrong code that every proof must reject. Nothing outside the proofs
may import it.
"""
