"""Text to ids on disk to batches. Only loader.py imports torch."""
