"""Corpora made: fetched, translated in bulk, synthesised, and the pipeline from corpora to a student."""
