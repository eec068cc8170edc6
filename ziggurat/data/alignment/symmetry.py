"""Symmetrisation: one alignment from two, each of which links every word of its own side at most once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, get_args

from ziggurat.data.alignment.links import Link

Symmetrisation = Literal["grow-diag-final-and", "grow-diag-final", "grow-diag", "intersection", "union"]
"""`intersection`: links that both directions have. `union`: those that any has. `grow-diag`: the intersection, and
links of the union beside links so far, diagonals included, where one of the two words has none. `-final`: and links of
either direction where one of the two words has none, `-final-and`: where neither has any (Koehn et al. 2005)."""

SYMMETRISATIONS: tuple[Symmetrisation, ...] = get_args(Symmetrisation)

_NEIGHBOURS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


def symmetrise(forward: Collection[Link], backward: Collection[Link], how: Symmetrisation) -> set[Link]:
    """Return one alignment from that of source to target and that of target to source, both as (source, target)."""
    one, other = set(forward), set(backward)
    if how == "intersection":
        return one & other
    if how == "union":
        return one | other
    grown = _Grown(one & other)
    grown.grow(one | other)
    if how != "grow-diag":
        allowed = grown.either_free if how == "grow-diag-final" else grown.both_free
        for links in (one, other):
            grown.finish(links, allowed)
    return grown.links


class _Grown:
    """An alignment that grows."""

    def __init__(self, links: set[Link]) -> None:
        self.links = links
        self._sources = {source for source, _ in links}
        self._targets = {target for _, target in links}

    def either_free(self, link: Link) -> bool:
        """Return True if one of the two words has no link yet."""
        return link[0] not in self._sources or link[1] not in self._targets

    def both_free(self, link: Link) -> bool:
        """Return True if neither of the two words has a link yet."""
        return link[0] not in self._sources and link[1] not in self._targets

    def grow(self, union: set[Link]) -> None:
        """Add links of `union` beside those that are there, until none can be added."""
        # In the order of the words, and seeing at once what was added, as Moses does: the result depends on it.
        before = -1
        while len(self.links) != before:
            before = len(self.links)
            for link in sorted(union):
                if link in self.links:
                    self._grow_from(link, union)

    def _grow_from(self, link: Link, union: set[Link]) -> None:
        for down, right in _NEIGHBOURS:
            beside = link[0] + down, link[1] + right
            if beside in union and beside not in self.links and self.either_free(beside):
                self._add(beside)

    def finish(self, links: set[Link], allowed: Callable[[Link], bool]) -> None:
        """Add those of `links` that are `allowed` when their turn comes, in the order of the words."""
        for link in sorted(links):
            if link not in self.links and allowed(link):
                self._add(link)

    def _add(self, link: Link) -> None:
        self.links.add(link)
        self._sources.add(link[0])
        self._targets.add(link[1])
