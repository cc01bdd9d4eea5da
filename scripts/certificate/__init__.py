"""The proof that decoding is lossless: exact enumeration, a sample with its statistics, and the
two-minute check of a server. decode/verify.py is what they judge.
"""
