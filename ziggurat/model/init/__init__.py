"""Initialisation schemes: functions of a parameter's role, shape and depth, never of its name."""
