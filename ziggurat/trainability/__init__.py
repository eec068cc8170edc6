"""The depth check: a short trial of a configuration, a verdict on whether it trains, and remedies if it does not."""
