"""Wiring across depth: histories within a stack, and transparent memory between the stacks."""
