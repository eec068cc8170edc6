"""Wiring across depth: the histories of a stack, and the transparent memory between the stacks."""
