"""Training: loss, optimiser, the update, the run, checkpoints, growth, and measures of depth while a model trains."""
