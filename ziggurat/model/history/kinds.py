"""History kinds: how the next layer's input depends on y_0, the stack's input, and y_l, the output of layer l.

    Latest                  layer l + 1 reads y_l
    CrossModule the same, but layer p + 1 also reads LN(y_0)
    Dlcl, dense, average    layer l + 1 reads a combination G_l(y_0, ..., y_l)
    Blocks                  the same over blocks of layers
    TopOnly                 layers read y_l, only the stack's output is a combination
    DepthWeighted           after every `period`-th layer, a combination of every `dilation`-th output
    Transparent             the memory of each reader is its own mixture of all encoder layers

A combination is a weighted sum with an optional norm at its sources or on itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.history.base import History, HistoryOptions, HistoryState, inherited, weighted_sum
from ziggurat.model.roles import Role, Roles

_SHARE_OF_ZEROS = 0.05
"""Share, under a softmax, of the sources that would otherwise have weight 0: no finite logit gives 0, and one that
gives almost 0 hardly learns."""


def _joined_logits(old: Tensor, added: int) -> Tensor:
    """Return the logits `old` [sources, ...] followed by those of `added` more sources, which share _SHARE_OF_ZEROS."""
    if not added:
        return old
    # n added logits of value v have the share n e^v / (e^L + n e^v) = s, where L is the logsumexp of the old ones, so v
    # = L + log(s / (1 - s) / n).
    share = math.log(_SHARE_OF_ZEROS / (1 - _SHARE_OF_ZEROS) / added)
    return torch.cat([old, (old.logsumexp(0, keepdim=True) + share).expand(added, *old.shape[1:])])


def _start_row(options: HistoryOptions, length: int) -> Tensor:
    """Return the initial parameters of a combination of `length` outputs: [length], or [length, groups] for several.

    `options.start` gives the weights of the newest `window` outputs, n of them: `average` 1/n, `one` 1, `last` 1 for
    the newest and 0 for the others. With `softmax` the parameters are logits: `one` starts uniform like `average`, and
    with `last` the others share _SHARE_OF_ZEROS. Parameters left of the window are 0 and never read.
    """
    newest = min(length, options.window or length)
    row = torch.zeros(length)
    match options.start:
        case "last":
            row[-1] = 1.0
            if options.softmax:
                row[length - newest :] = _joined_logits(torch.zeros(1), newest - 1).flip(0)
        case "average" if not options.softmax:
            row[length - newest :] = 1.0 / newest
        case "one" if not options.softmax:
            row[length - newest :] = 1.0
        case "average" | "one":
            pass  # equal logits give uniform weights
        case _:
            assert_never(options.start)
    return row if options.groups == 1 else row[:, None].repeat(1, options.groups)


class Combination(History):
    """A history that mixes outputs by weights; its subclasses define which outputs, and when.

    Every output is kept, in the form that combinations read, until it leaves the window; kinds that combine fewer keep
    fewer. With `learnable` false the weights are a buffer, neither optimised nor saved, because they follow from the
    configuration.

    Args:
        options: see HistoryOptions.
        start: initial weights, with leading axes as the kind needs them and an axis [groups] if `groups` > 1; None: no
            combination is ever formed.
        normed: indices of the outputs y_k (sources) or combinations (consumers) that have a norm.
        last: the largest index.
    """

    roles: ClassVar[Roles] = {"weight": Role.WIRING}
    weight: Tensor

    def __init__(self, options: HistoryOptions, start: Tensor | None, normed: Iterable[int], last: int) -> None:
        super().__init__()
        # Keeps numbers only: the factories belong to the model builder and would be copied with every copy of this
        # module.
        self.options = dataclasses.replace(options, norm=nn.Identity, dropout=nn.Identity)
        if options.learnable or start is None:
            self.register_parameter("weight", None if start is None else nn.Parameter(start))
        else:
            self.register_buffer("weight", start)
        having = set(normed)
        indices = range(0 if options.norm_at == "none" else last + 1)
        # Identities fill the slots without a norm, so that the number in a norm's name is its index.
        self.norms = nn.ModuleList(options.norm() if k in having else nn.Identity() for k in indices)
        self.dropout = options.dropout()

    def start(self, x: Tensor) -> HistoryState:
        """Keep y_0 as combinations read it."""
        return HistoryState(self._joined((), 0, x), x, 0)

    def push(self, state: HistoryState, y: Tensor) -> HistoryState:
        """Return the state after one more layer, whose output is `y`."""
        return HistoryState(self._joined(state.kept, state.depth + 1, y), y, state.depth + 1)

    def _joined(self, kept: tuple[Tensor, ...], k: int, y: Tensor) -> tuple[Tensor, ...]:
        """Return `kept` with y_k added, as combinations read it, and without the output that leaves the window."""
        source = self.norms[k](y) if self.options.norm_at == "sources" else y
        kept = (*kept, source)
        return kept if self.options.window is None else kept[-self.options.window :]

    def _mixed(self, parameters: Tensor, terms: Sequence[Tensor], row: int) -> Tensor:
        """Return combination `row`, [batch, length, d_model]; `parameters` are [terms] or [terms, groups]."""
        weights = parameters.softmax(0) if self.options.softmax else parameters
        if weights.dim() == 2:
            weights = weights.repeat_interleave(self.options.d_model // self.options.groups, dim=1)
        mixed = weighted_sum(weights, terms)
        if self.options.norm_at == "consumers":
            mixed = self.norms[row](mixed)
        return self.dropout(mixed)

    def _weights(self, parameters: Tensor) -> Tensor:
        """Return the weights of one combination, [terms], for `table`; `parameters` are [terms] or [terms, groups]."""
        weights = parameters.softmax(0) if self.options.softmax else parameters
        return weights if weights.dim() == 1 else weights.mean(1)

    def _plain_table(self, units: int) -> Tensor:
        """Return the table of a stack of `units` layers in which each reads the one below."""
        table = self.weight.new_full((units + 1, units + 1), torch.nan)
        return table.fill_diagonal_(1.0)

    def _extended_norms(self, old: Mapping[str, Tensor], last: int) -> dict[str, Tensor]:
        """Return the norms' tensors, given those of a stack whose largest index is `last`: new ones copy its last.

        The released loader of Li et al. 2020 resets the old last norm through an index slip; here trained norms stay.
        """
        return {
            f"norms.{k}.{name}": inherited(old, f"norms.{min(k, last)}.{name}", values.shape)
            for k, norm in enumerate(self.norms)
            for name, values in norm.named_parameters()
        }


class Latest(History):
    """The plain stack: each layer reads the one below (Vaswani et al. 2017)."""

    def forward(self, state: HistoryState) -> Tensor:
        """Return the latest output."""
        return state.latest

    def table(self) -> None:
        """Return None: each layer reads the one below."""

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Return nothing: there are no parameters."""
        return {}


class CrossModule(History):
    """Each layer reads the one below, but the upper module's first reads y_p + LN(y_0): Wu et al. 2019 (Depth Growing).

    The lower module is the p = `period` lowest layers; in the paper it is a shallow model that is trained first and
    then frozen while the upper module is trained on top of it. The paper adds the embedding, its code LN(y_0). The code
    makes the sum in place, so that the decoder's lower module reads the sum; here it reads y_p, as in the paper
    (`memory: hierarchical`). A stack of p layers is plain and has no such norm.
    """

    def __init__(self, options: HistoryOptions) -> None:
        super().__init__()
        self.period = options.period
        self.norm = options.norm() if options.units > options.period else None

    def start(self, x: Tensor) -> HistoryState:
        """Keep LN(y_0) until the upper module starts."""
        return HistoryState(() if self.norm is None else (self.norm(x),), x, 0)

    def push(self, state: HistoryState, y: Tensor) -> HistoryState:
        """Return the state after one more layer, whose output is `y`."""
        return HistoryState(state.kept if state.depth < self.period else (), y, state.depth + 1)

    def forward(self, state: HistoryState) -> Tensor:
        """Return the latest output, plus LN(y_0) where the upper module starts."""
        return state.latest + state.kept[0] if state.kept and state.depth == self.period else state.latest

    def table(self) -> None:
        """Return None: each layer reads the one below, apart from LN(y_0)."""

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Keep the norm, or initialise it if the shallower stack was the lower module; see History."""
        mine = {name: values.detach().clone() for name, values in self.named_parameters()}
        return {name: inherited(old, name, values.shape) if old else values for name, values in mine.items()}


class Dlcl(Combination):
    """x_{l+1} = G_l(y_0, ..., y_l), and the stack's output is G_L (Wang et al. 2019, section 4).

    With norms at the sources (pre-norm) G_l = sum_k W[l, k] LN_k(y_k): one norm per output, applied once, when the
    output is made. With norms at the consumers (post-norm) G_l = LN_l(sum_k W[l, k] y_k). As in the released code, y_0
    (sources) or combination 0 (consumers) has a norm only with `normalize_embedding`, so there are L of them. Dropout
    comes last.

    `weight` is W, [L+1, L+1], with an axis [groups] for several: group i weighs the d_model/groups channels that start
    at i d_model/groups (in the released code, channel c belongs to group c mod groups). Entries above the diagonal and
    left of the window are never read (the released code applies the window only to its initial weights and under the
    softmax).
    """

    def __init__(self, options: HistoryOptions) -> None:
        normed = range(0 if options.normalize_embedding else 1, options.units + 1)
        super().__init__(options, _triangle(options), normed, options.units)

    def forward(self, state: HistoryState) -> Tensor:
        """Return G_l for l = `state.depth`."""
        return self._combined(state.depth, state.kept)

    def _combined(self, row: int, kept: tuple[Tensor, ...]) -> Tensor:
        return self._mixed(self.weight[row, row + 1 - len(kept) : row + 1], kept, row)

    def table(self) -> Tensor:
        """See History."""
        table = self._plain_table(len(self.weight) - 1)
        for row in range(len(table)):
            first = max(0, row + 1 - (self.options.window or len(table)))
            table[row, first : row + 1] = self._weights(self.weight[row, first : row + 1])
        return table

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Keep the rows of W and the norms of the shallower stack (Li et al. 2020); see History.

        So the first added layer reads the former output of the stack. New rows are those of a new model: uniform if
        `start` is `average`. New norms are copies of the last old one.
        """
        rows = self._rows(old_units)
        extended = self._extended_norms(old, rows - 1)
        if isinstance(self.weight, nn.Parameter):
            grown = _triangle(self.options).to(self.weight)
            grown[:rows, :rows] = inherited(old, "weight", (rows, rows, *grown.shape[2:]))
            extended["weight"] = grown
        return extended

    def _rows(self, units: int) -> int:
        """Return the number of combinations in a stack of `units` layers."""
        return units + 1


def _triangle(options: HistoryOptions) -> Tensor:
    rows = options.units + 1
    weights = torch.zeros(rows, rows, *([options.groups] if options.groups > 1 else []))
    for row in range(rows):
        weights[row, : row + 1] = _start_row(options, row + 1)
    return weights


def dense(options: HistoryOptions) -> History:
    """Return a Dlcl whose weights stay 1: dense residual connections (Wang et al. 2019, figure 2b)."""
    return Dlcl(dataclasses.replace(options, start="one", learnable=False, softmax=False))


def average(options: HistoryOptions) -> History:
    """Return a Dlcl whose rows stay averages (Wang et al. 2019, table 6)."""
    return Dlcl(dataclasses.replace(options, start="average", learnable=False, softmax=False))


class Blocks(Dlcl):
    """Dlcl over y_0 and the outputs of blocks of `period` layers; inside a block each layer reads the one below.

    Sparse connections: Li et al. 2020. Layers left over at the top form a last, shorter block.
    W is [blocks+1, blocks+1], and there is one norm per block. With `period` 1 it is Dlcl. With one block,
    `start: last` and no norms it is the plain stack.
    """

    def __init__(self, options: HistoryOptions) -> None:
        super().__init__(dataclasses.replace(options, units=_blocks(options.units, options.period)))
        self.layers = options.units

    def push(self, state: HistoryState, y: Tensor) -> HistoryState:
        """Return the state after one more layer, whose output is `y`."""
        depth = state.depth + 1
        kept = self._joined(state.kept, self._rows(depth) - 1, y) if self._ends_block(depth) else state.kept
        return HistoryState(kept, y, depth)

    def forward(self, state: HistoryState) -> Tensor:
        """Return the combination at the end of a block, otherwise the latest output."""
        if not self._ends_block(state.depth):
            return state.latest
        return self._combined(self._rows(state.depth) - 1, state.kept)

    def table(self) -> Tensor:
        """See History."""
        blocks, table = super().table(), self._plain_table(self.layers)
        ends = [depth for depth in range(self.layers + 1) if self._ends_block(depth)]
        table[ends] = torch.nan
        for row, end in enumerate(ends):
            table[end, ends] = blocks[row]
        return table

    def _ends_block(self, depth: int) -> bool:
        """Return whether y_depth is the output of a block; y_0 counts as one."""
        return depth % self.options.period == 0 or depth == self.layers

    def _rows(self, units: int) -> int:
        return _blocks(units, self.options.period) + 1


def _blocks(units: int, period: int) -> int:
    """Return the number of blocks of `units` layers, a shorter one included."""
    return -(-units // period)


class TopOnly(Combination):
    """Each layer reads the one below; the stack's output, before its final norm, is Dlcl's G_L.

    Fusion of all layers at the top (Wang et al. 2019, figure 2(c), after Bapna et al. 2018). `weight` is row L of W:
    [L+1], or [L+1, groups] for several groups. With norms at the sources, each output has a norm that only the
    combination reads; with norms at the consumers, only the combination has one.
    """

    def __init__(self, options: HistoryOptions) -> None:
        last = options.units
        sources = range(0 if options.normalize_embedding else 1, last + 1)
        normed = sources if options.norm_at == "sources" else [last]
        super().__init__(options, _start_row(options, last + 1), normed, last)

    def forward(self, state: HistoryState) -> Tensor:
        """Return the latest output."""
        return state.latest

    def output(self, state: HistoryState) -> Tensor:
        """Return G_L."""
        return self._mixed(self.weight[state.depth + 1 - len(state.kept) :], state.kept, state.depth)

    def table(self) -> Tensor:
        """See History."""
        last = len(self.weight) - 1
        first = max(0, last + 1 - (self.options.window or last + 1))
        table = self._plain_table(last)
        table[last, first:] = self._weights(self.weight[first:])
        return table

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Keep the weights and norms of the shallower stack; see History.

        Added layers have weight 0, so the output is unchanged; with `softmax` they share 5 % of the sum. A window moves
        up with the top, so its weights start as in a new model. New norms are copies of the last old one.
        """
        extended = self._extended_norms(old, old_units)
        if not isinstance(self.weight, nn.Parameter):
            return extended
        before = inherited(old, "weight", (old_units + 1, *self.weight.shape[1:]))
        added = len(self.weight) - len(before)
        if self.options.window is not None:
            grown = _start_row(self.options, len(self.weight)).to(before)
        elif self.options.softmax:
            grown = _joined_logits(before, added)
        else:
            grown = torch.cat([before, before.new_zeros(added, *before.shape[1:])])
        return {**extended, "weight": grown}


class DepthWeighted(Combination):
    """After every `period`-th layer i, Y_i = sum_j alpha_{i,j} y_j over the j <= i with j = i modulo `dilation`.

    DenseFormer: Pagliardini et al. 2024. Y_i is the input of layer i+1, or the stack's output; after other layers Y_i =
    y_i. Nothing is normalised. Initially alpha_{i,i} = 1 and the rest is 0: the plain stack. The options used are
    `learnable`, `dropout`, `groups`, `period` and `dilation`.

    `weight` holds only the entries that are read: the rows of layers `period`, 2 `period`, ... one after the other,
    each with its floor(i / dilation) + 1 sources, oldest first: [sum of these], with an axis [groups] for several. It
    is None in a stack of fewer than `period` layers.
    """

    def __init__(self, options: HistoryOptions) -> None:
        options = dataclasses.replace(options, start="last", softmax=False, window=None, norm_at="none")
        sizes = _row_sizes(options, options.units)
        super().__init__(options, _rows_in_turn(options, sizes) if sizes else None, (), options.units)
        self.sizes = sizes
        self.units = options.units
        self.kept_every = math.gcd(options.period, options.dilation)  # no combination reads any other output

    def push(self, state: HistoryState, y: Tensor) -> HistoryState:
        """Return the state after one more layer, whose output is `y`."""
        depth = state.depth + 1
        return HistoryState(state.kept if depth % self.kept_every else (*state.kept, y), y, depth)

    def forward(self, state: HistoryState) -> Tensor:
        """Return Y_i for i = `state.depth`."""
        i, period, dilation = state.depth, self.options.period, self.options.dilation
        if i == 0 or i % period:
            return state.latest
        # `kept` has every kept_every-th output: entry n is y_(n * kept_every).
        terms = state.kept[i % dilation // self.kept_every :: dilation // self.kept_every]
        return self._mixed(self.weight.split(self.sizes)[i // period - 1], terms, i)

    def table(self) -> Tensor | None:
        """See History; None if the stack is too shallow to combine anything."""
        if not self.sizes:
            return None
        period, dilation = self.options.period, self.options.dilation
        table = self._plain_table(self.units)
        for number, parameters in enumerate(self.weight.split(self.sizes), start=1):
            row = number * period
            table[row] = torch.nan
            table[row, row % dilation : row + 1 : dilation] = self._weights(parameters)
        return table

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Keep the trained rows; new rows leave the output unchanged. See History."""
        if not isinstance(self.weight, nn.Parameter):
            return {}
        grown = _rows_in_turn(self.options, self.sizes).to(self.weight)
        if before := sum(_row_sizes(self.options, old_units)):
            grown[:before] = inherited(old, "weight", (before, *grown.shape[1:]))
        return {"weight": grown}


def _row_sizes(options: HistoryOptions, units: int) -> list[int]:
    """Return the number of outputs that each combination of a stack of `units` layers reads."""
    return [i // options.dilation + 1 for i in range(options.period, units + 1, options.period)]


def _rows_in_turn(options: HistoryOptions, sizes: list[int]) -> Tensor:
    return torch.cat([_start_row(options, size) for size in sizes])


class Transparent(nn.Module):
    """z_j = sum_i s_ij h^i, what reader j attends to, with s_j = softmax(dropout(w_j + 1/sources)): Bapna et al. 2018.

    h^i are the encoder's states, including the embedding if it is one of them; each attention to the memory is a
    reader. As in the released code (lingvo), `weight` w [readers, sources] starts at 0: uniform mixtures. The constant
    cancels in the softmax but not under dropout (exact, not rounded to 1/256), which sets logits to 0: a dropped source
    still has roughly an average weight.
    """

    roles: ClassVar[Roles] = {"weight": Role.WIRING}

    def __init__(self, sources: int, readers: int, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(readers, sources))
        self.p = dropout

    def mixtures(self) -> Tensor:
        """Return s, [readers, sources]; each row sums to 1."""
        return F.dropout(self.weight + 1 / self.weight.shape[1], self.p, self.training).softmax(-1)

    def forward(self, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return one [batch, length, d_model] per reader for the `sources` encoder states, each of that shape."""
        return tuple(weighted_sum(weights, states) for weights in self.mixtures().unbind())

    def extend(self, old: Mapping[str, Tensor], old_units: int) -> dict[str, Tensor]:
        """Return the parameters for an encoder that has grown from `old_units` layers, given the old ones.

        Trained logits stay. The added sources, which come last, start with 5 % of each mixture in total, so that every
        memory is nearly unchanged. Raises ConfigError when `old` has other readers.
        """
        readers, sources = self.weight.shape
        known = old["weight"].shape[1] if "weight" in old else sources
        before = inherited(old, "weight", (readers, known))
        return {"weight": _joined_logits(before.T, sources - known).T.contiguous()}
