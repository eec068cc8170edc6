"""Speed alone: CPU kernels, packed and int8 maps, and which precision is fastest. Results differ by rounding."""
