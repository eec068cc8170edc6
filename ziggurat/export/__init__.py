"""Models in other formats: export and import."""
