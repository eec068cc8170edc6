"""Export of models to other toolkits, verified against the original, and import of their models."""
