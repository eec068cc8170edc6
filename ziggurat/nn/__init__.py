"""Building blocks, one idea per file. Modules take numbers, never configuration objects."""
