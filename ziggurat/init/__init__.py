"""Initialisation schemes: functions of a parameter's role, shape and depth, never of its name."""

from ziggurat.init.admin import constant_omega, profile_omega
from ziggurat.init.schemes import INIT, ModelDepth, initialise
from ziggurat.nn.roles import Role, Slot, assign_roles

__all__ = ["INIT", "ModelDepth", "Role", "Slot", "assign_roles", "constant_omega", "initialise", "profile_omega"]
