"""Cleaning of parallel text: what is repaired, told apart, compared and scored, on blocks of texts without files."""
