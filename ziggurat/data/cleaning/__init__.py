"""Cleaning of parallel text: repair, filters, comparison and scoring of blocks of text, without files."""
