"""Scores of translations, systems compared with tests of significance, robustness under disturbances."""
