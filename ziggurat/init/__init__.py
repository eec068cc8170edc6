"""Initialisation schemes: functions of a parameter's role, shape and depth, never of its name."""

from ziggurat.init.roles import Role, Slot, assign_roles
from ziggurat.init.xavier import xavier

__all__ = ["Role", "Slot", "assign_roles", "xavier"]
