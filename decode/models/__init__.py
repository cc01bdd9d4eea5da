"""Loading: models, tokenizers and what they say about themselves. The algorithm of decoding is
one folder up.
"""
