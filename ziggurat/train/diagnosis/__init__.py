"""Depth measures: states and gradients of a model, layer by layer, and warnings when they leave healthy bands."""
