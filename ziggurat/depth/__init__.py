"""Will it train: a short trial of a configuration, a verdict on it, and what would do better."""
