"""What listens to a run: TensorBoard, Weights & Biases, MLflow; none of them can stop it or hold it up."""
