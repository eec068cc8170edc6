"""Models: layers, residuals, histories across depth, attention, initialisation, stacks, and the folders that hold them.

`fast` holds what is only speed.
"""
