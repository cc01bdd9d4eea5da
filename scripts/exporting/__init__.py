"""Exporting: heads in other engines' formats and back, with the checks that an engine drafts what
was trained; and publishing them.
"""
