"""Attention: its kinds, their masks, and their caches in decoding."""
