"""Inspection: whether a depth trains, what it costs, what each layer is worth, which rate it needs; reports and figures
of runs.
"""
