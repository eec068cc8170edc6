"""History kinds: wiring of a stack across depth."""

from ziggurat.nn.history.base import History, Latest

__all__ = ["History", "Latest"]
