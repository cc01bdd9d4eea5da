"""Proofs: exact enumeration, certificates and the statistics behind them. decode/verify.py is
what they judge.
"""
