"""Wiring across depth: the histories of a stack, and the transparent memory between the stacks."""

from ziggurat.nn.history.base import History, HistoryOptions, HistoryState
from ziggurat.nn.history.kinds import Blocks, DepthWeighted, Dlcl, Latest, TopOnly, average, dense
from ziggurat.nn.history.transparent import Transparent

__all__ = [
    "Blocks",
    "DepthWeighted",
    "Dlcl",
    "History",
    "HistoryOptions",
    "HistoryState",
    "Latest",
    "TopOnly",
    "Transparent",
    "average",
    "dense",
]
