"""Scoring: drafters decode the same prompts side by side, and what came out is counted,
compared and explained.
"""
