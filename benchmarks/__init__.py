"""Measurements: speed as ratios within one run, memory as peaks of child processes."""
