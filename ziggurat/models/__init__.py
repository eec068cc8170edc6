"""Whole models: layers, stacks, the encoder-decoder, and how they are built and opened."""
