"""Models: layers, residuals, histories across depth, attention, initialisation, stacks, and the folders that hold them.

`fast` holds optimised inference kernels, which change results by rounding only.
"""
