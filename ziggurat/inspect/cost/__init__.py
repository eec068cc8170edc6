"""Costs of training, estimated before it begins: arithmetic, memory and time of an update."""
