"""History kinds: wiring of a stack across depth."""

from ziggurat.nn.history.base import Combining, History, Latest, Past
from ziggurat.nn.history.blocks import Blocks
from ziggurat.nn.history.depth_weighted import DepthWeighted
from ziggurat.nn.history.dlcl import Dlcl, average, dense
from ziggurat.nn.history.top_only import TopOnly
from ziggurat.nn.history.transparent import Transparent

__all__ = [
    "Blocks",
    "Combining",
    "DepthWeighted",
    "Dlcl",
    "History",
    "Latest",
    "Past",
    "TopOnly",
    "Transparent",
    "average",
    "dense",
]
