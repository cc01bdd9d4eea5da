"""The proof that decoding is lossless: exact enumeration, a sample with its statistics, and the
two-minute check of a server. decode/verify.py is what they judge.
"""

FEWEST = 400  # judged tokens below which nothing is decided in favour of a server
