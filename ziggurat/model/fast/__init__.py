"""Optimisations only: CPU kernels, packed and int8 maps, the fastest precision. Results differ by rounding."""
