"""Experiment trackers: TensorBoard, Weights & Biases, MLflow; none of them can stop or delay a run."""
