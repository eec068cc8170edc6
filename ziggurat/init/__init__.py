"""Initialisation schemes: functions of a parameter's role, shape and depth, never of its name."""

from ziggurat.init.admin import constant_omega, profile_omega
from ziggurat.init.depth import Depth
from ziggurat.init.roles import Role, Slot, assign_roles
from ziggurat.init.schemes import INIT, initialise

__all__ = ["INIT", "Depth", "Role", "Slot", "assign_roles", "constant_omega", "initialise", "profile_omega"]
