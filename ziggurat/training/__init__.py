"""Training: loss, optimiser, the update, the run, checkpoints."""
