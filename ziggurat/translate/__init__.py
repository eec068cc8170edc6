"""Search and scoring with trained models."""
