"""Serving: heads in other engines' formats, and the checks that those engines draft what was
trained.
"""
