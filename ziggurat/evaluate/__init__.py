"""Scores of translations, comparison of systems with significance tests, and robustness to perturbations."""
