"""Scores of translations against references."""
