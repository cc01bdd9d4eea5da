"""Serving: questions to running servers, what they count, and the two-minute certificate."""
