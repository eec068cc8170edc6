"""Recurrences over whole sequences: layer-normalised LSTM layers (RNMT+, Chen et al. 2018), and `decayed_sum`.

Backward passes are written by hand. In an LSTM, everything that does not depend on the previous step is one matrix
product over all steps: the input's part of the gates and, in the backward pass, the gradients of weights and input.
cuDNN does the same for a plain LSTM (Appleyard et al. 2016). This leaves about ten kernels per step in each pass, for
all gates and both directions at once. Sums and gates have the dtype of the gains (fp32 under autocast), products that
of input and weights.

The passes are torch operators, opaque to torch.compile: a compiled layer contains one call, not a loop unrolled over
the steps. They are registered by hand because `torch.library.custom_op` imports the whole compiler when an operator is
first called, which takes more than a second.

Shapes: T steps, B batch, D directions, I width of the input, C width of the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.linear import linear, product
from ziggurat.model.roles import Role, Roles

CELL_CLIP = 10.0
"""Cells are clipped to [-10, 10] (lingvo's cell_value_cap)."""
EPSILON = 1e-8
"""EPSILON is the epsilon of the gates' normalisation (lingvo's layer_norm_epsilon)."""


def recur(x: Tensor, weights: Sequence[Tensor], gain: Tensor, bias: Tensor, batch: int) -> Tensor:
    """Return the outputs [T + 1, B, D, C] of D cells (LstmCell) over T steps; those before the first step are 0.

    Args: x: [D, T * B, I], the input of each direction, step by step. weights: D matrices [4 * C, I + C], whose rows
        are those of the gates g, i, f, o. gain: [D, 4, C]. bias: [D, 4, C]. batch: B.
    """
    if torch.is_autocast_enabled(x.device.type):
        narrow = torch.get_autocast_dtype(x.device.type)
        x, weights = x.to(narrow), [weight.to(narrow) for weight in weights]
    return torch.ops.ziggurat.lstm(x, list(weights), gain, bias, batch)[0]


def _forward(
    x: Tensor, weights: Sequence[Tensor], gain: Tensor, bias: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs and cells [T + 1, B, D, C], and gates [T, B, D, 4, C] after and before normalisation."""
    width = gain.shape[-1]
    outputs, cells, gates, sums = _empty(x, gain, batch)
    rows = sums.flatten(0, 1).flatten(2)
    for direction, weight in enumerate(weights):
        rows[:, direction] = product(x[direction], weight[:, :-width])
    recurrent = _recurrent(weights, width).transpose(1, 2)
    m, c, a = outputs.unbind(), cells.unbind(), gates.unbind()
    g, i, f, o = (gate.unbind() for gate in gates.unbind(3))
    sigmoids = gates[:, :, :, 1:].unbind()
    m[0].zero_()
    c[0].zero_()
    for t, total in enumerate(sums.unbind()):
        if t:  # before the first step, the state is 0
            total.flatten(2).transpose(0, 1).baddbmm_(m[t].to(x.dtype).transpose(0, 1), recurrent)
        normed = torch.native_layer_norm(total.to(gain.dtype), (width,), None, None, EPSILON)[0]
        torch.addcmul(bias, normed, gain, out=a[t])
        g[t].tanh_()
        sigmoids[t].sigmoid_()
        torch.mul(i[t], g[t], out=c[t + 1]).addcmul_(f[t], c[t]).clamp_(-CELL_CLIP, CELL_CLIP)
        torch.mul(o[t], c[t + 1], out=m[t + 1])
    return outputs, cells, gates, sums


def _backward(
    into_outputs: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    gain: Tensor,
    outputs: Tensor,
    cells: Tensor,
    gates: Tensor,
    sums: Tensor,
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Return the gradients of `x`, `weights`, `gain` and `bias`, given the gradient of the outputs."""
    width = gain.shape[-1]
    normed, _, scale = torch.native_layer_norm(sums.to(gain.dtype), (width,), None, None, EPSILON)
    slopes = _slopes(gates, cells)
    kept = (cells[1:].abs() < CELL_CLIP).unbind()  # no gradient flows through a clipped cell
    recurrent = _recurrent(weights, width)
    into_gates, into_sums = torch.empty_like(gates), torch.empty_like(sums)
    zero, one = torch.zeros_like(scale[0]), torch.ones_like(scale[0])
    dm, dc = into_outputs.clone().unbind(), torch.zeros_like(cells[0])
    f, o = gates[:, :, :, 2].unbind(), gates[:, :, :, 3].unbind()
    of_cell, of_output = slopes[:, :, :, :3].unbind(), slopes[:, :, :, 3].unbind()
    into_cell, into_output = into_gates[:, :, :, :3].unbind(), into_gates[:, :, :, 3].unbind()
    for t, (da, z, r, ds) in reversed(list(enumerate(zip(into_gates, normed, scale, into_sums, strict=True)))):
        dc.addcmul_(dm[t + 1], o[t]).mul_(kept[t])
        torch.mul(of_cell[t], dc.unsqueeze(2), out=into_cell[t])
        torch.mul(of_output[t], dm[t + 1], out=into_output[t])
        # The kernel receives already normalised values, so mean 0 and scale 1; the true scale is a factor.
        dz = torch.ops.aten.native_layer_norm_backward(
            da * gain, z, (width,), zero, one, None, None, [True, False, False]
        )[0]
        torch.mul(dz, r, out=ds)
        if t:
            _add_product(dm[t].transpose(0, 1), ds.flatten(2).transpose(0, 1), recurrent)
            dc.mul_(f[t])
    into_x, into_weights = _into_products(into_sums, x, weights, outputs)
    return into_x, into_weights, (into_gates * normed).sum((0, 1)), into_gates.sum((0, 1))


def _empty(x: Tensor, gain: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    directions, four, width = gain.shape
    steps = x.shape[1] // batch
    states, gates = (steps + 1, batch, directions, width), (steps, batch, directions, four, width)
    return gain.new_empty(states), gain.new_empty(states), gain.new_empty(gates), x.new_empty(gates)


def _recurrent(weights: Sequence[Tensor], width: int) -> Tensor:
    """Return the parts of the matrices that multiply the outputs, [D, 4 * C, C]."""
    return torch.stack([weight[:, -width:] for weight in weights])


def _slopes(gates: Tensor, cells: Tensor) -> Tensor:
    """Return the derivatives of the new cell by the sums of g, i and f, and of the output by the sum of o."""
    slopes = torch.empty_like(gates)
    into_g, into_i, into_f, into_o = slopes.unbind(3)
    g, i, f, o = gates.unbind(3)
    torch.ops.aten.tanh_backward(i, g, grad_input=into_g)
    torch.ops.aten.sigmoid_backward(g, i, grad_input=into_i)
    torch.ops.aten.sigmoid_backward(cells[:-1], f, grad_input=into_f)
    torch.ops.aten.sigmoid_backward(cells[1:], o, grad_input=into_o)
    return slopes


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to `total` in place."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total.add_(torch.bmm(a, b))


def _into_products(
    into_sums: Tensor, x: Tensor, weights: Sequence[Tensor], outputs: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of `x` and `weights`: products over all steps at once."""
    into_x, into_weights = torch.empty_like(x), [torch.empty_like(weight) for weight in weights]
    width = outputs.shape[-1]
    rows = into_sums.flatten(0, 1).flatten(2)
    before = outputs[:-1].flatten(0, 1).to(x.dtype)
    for direction, weight in enumerate(weights):
        d = rows[:, direction]
        into_x[direction] = product(d, weight[:, :-width].t())
        into_weights[direction][:, :-width] = product(d.t(), x[direction].t())
        into_weights[direction][:, -width:] = product(d.t(), before[:, direction].t())
    return into_x, into_weights


def _forward_shapes(
    x: Tensor, weights: Sequence[Tensor], gain: Tensor, bias: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(x, gain, batch)


def _backward_shapes(
    into_outputs: Tensor, x: Tensor, weights: Sequence[Tensor], gain: Tensor, *kept: Tensor
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    into_weights = [torch.empty_like(weight) for weight in weights]
    return torch.empty_like(x), into_weights, torch.empty_like(gain), torch.empty_like(gain)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, gain, _, _ = inputs
    ctx.set_materialize_grads(False)  # saved tensors need no zero gradients
    ctx.save_for_backward(x, gain, *output, *weights)


def _differentiate(ctx: Any, into_outputs: Tensor | None, *_: None) -> tuple[Any, ...]:
    x, gain, outputs, cells, gates, sums, *weights = ctx.saved_tensors
    if into_outputs is None:
        return None, [None] * len(weights), None, None, None
    return *torch.ops.ziggurat.lstm_backward(into_outputs, x, weights, gain, outputs, cells, gates, sums), None


def decayed_sum(x: Tensor, keep: Tensor) -> Tensor:
    """Return c [batch, length, width] with c_j = keep_j * c_{j-1} + x_j, where c is 0 before the first position.

    `x` and `keep` have that shape and a common dtype, in which sums are computed.
    """
    return torch.ops.ziggurat.decayed_sum(x, keep)


def _decayed_sum(x: Tensor, keep: Tensor) -> Tensor:
    c = torch.empty_like(x)
    steps = c.unbind(1)
    for t, (gained, kept) in enumerate(zip(x.unbind(1), keep.unbind(1), strict=True)):
        if t:
            torch.addcmul(gained, kept, steps[t - 1], out=steps[t])
        else:
            steps[t].copy_(gained)
    return c


def _decayed_sum_backward(into_c: Tensor, keep: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and `keep`.

    The gradient of `x` is itself a decayed sum, run from the last position to the first.
    """
    into_x, into_keep = torch.empty_like(c), torch.empty_like(c)
    steps, kept = into_x.unbind(1), keep.unbind(1)
    for t, gradient in reversed(list(enumerate(into_c.unbind(1)))):
        if t + 1 < len(steps):
            torch.addcmul(gradient, kept[t + 1], steps[t + 1], out=steps[t])
        else:
            steps[t].copy_(gradient)
    into_keep[:, :1] = 0.0
    torch.mul(into_x[:, 1:], c[:, :-1], out=into_keep[:, 1:])
    return into_x, into_keep


def _keep_sums(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], output)


def _differentiate_sums(ctx: Any, into_c: Tensor) -> tuple[Tensor, Tensor]:
    into_x, into_keep = torch.ops.ziggurat.decayed_sum_backward(into_c, *ctx.saved_tensors)
    return into_x, into_keep


_LIBRARY = torch.library.Library("ziggurat", "FRAGMENT")
_LIBRARY.define(
    "lstm(Tensor x, Tensor[] weights, Tensor gain, Tensor bias, SymInt batch) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "lstm_backward(Tensor into_outputs, Tensor x, Tensor[] weights, Tensor gain, Tensor outputs, Tensor cells, "
    "Tensor gates, Tensor sums) -> (Tensor, Tensor[], Tensor, Tensor)"
)
_LIBRARY.define("decayed_sum(Tensor x, Tensor keep) -> Tensor")
_LIBRARY.define("decayed_sum_backward(Tensor into_c, Tensor keep, Tensor c) -> (Tensor, Tensor)")
_LIBRARY.impl("lstm", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("lstm_backward", _backward, "CompositeExplicitAutograd")
_LIBRARY.impl("decayed_sum", _decayed_sum, "CompositeExplicitAutograd")
_LIBRARY.impl("decayed_sum_backward", _decayed_sum_backward, "CompositeExplicitAutograd")
torch.library.register_fake("ziggurat::lstm", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("ziggurat::lstm_backward", _backward_shapes, lib=_LIBRARY)
torch.library.register_fake("ziggurat::decayed_sum", lambda x, keep: torch.empty_like(x), lib=_LIBRARY)
torch.library.register_fake(
    "ziggurat::decayed_sum_backward", lambda into_c, keep, c: (torch.empty_like(c), torch.empty_like(c)), lib=_LIBRARY
)
torch.library.register_autograd("ziggurat::lstm", _differentiate, setup_context=_keep, lib=_LIBRARY)
torch.library.register_autograd("ziggurat::decayed_sum", _differentiate_sums, setup_context=_keep_sums, lib=_LIBRARY)

STEP_BY_STEP: dict[Any, Callable[..., Any]] = {
    torch.ops.ziggurat.lstm.default: _forward,
    torch.ops.ziggurat.lstm_backward.default: _backward,
    torch.ops.ziggurat.decayed_sum.default: _decayed_sum,
    torch.ops.ziggurat.decayed_sum_backward.default: _decayed_sum_backward,
}
"""STEP_BY_STEP maps each operator to its Python implementation, so that its operations can be counted
(ziggurat.inspect.cost)."""


class LstmState(NamedTuple):
    """The state of a cell between steps: m and c, each [..., width]."""

    output: Tensor
    cell: Tensor


class StepOrder(NamedTuple):
    """The order in which each direction of a layer reads the tokens; the same for all layers over a batch.

    Attributes:
        reads: [directions, steps * batch], rows of x.flatten(0, 1).
        states: [batch * length * directions], rows of the states [steps + 1, batch, directions, width] flattened up
            to the last axis; state 0 is the zero state, state n the one after n real tokens.
    """

    reads: Tensor
    states: Tensor


def step_order(mask: Tensor, directions: int) -> StepOrder:
    """Return the order of steps for `mask` [batch, length], True at real tokens.

    The first direction reads the real tokens of each sentence from left to right, the second from right to left;
    padding comes last, where nothing depends on it. The output at a padded position is the state carried over to it, as
    in a recurrence that skips padded steps.
    """
    batch, length = mask.shape
    sentences, positions = (torch.arange(size, device=mask.device) for size in (batch, length))
    reads, states = [], []
    for direction in range(directions):
        seen = mask if direction == 0 else mask.flip(1)
        count = seen.cumsum(1)
        # Real tokens first, in order, then padding. Found by counting, because ONNX has no stable sort.
        rank = torch.where(seen, count, count[:, -1:] + (~seen).cumsum(1)) - 1
        order = torch.empty_like(rank).scatter(1, rank, positions.expand_as(rank))
        if direction:
            order, count = length - 1 - order, count.flip(1)
        reads.append((order + sentences[:, None] * length).t().flatten())
        states.append((count * batch + sentences[:, None]) * directions + direction)
    return StepOrder(torch.stack(reads), torch.stack(states, dim=-1).flatten())


class LstmCell(nn.Module):
    """One direction of a layer: [g; i; f; o] = [x; m] W, each slice normalised by itself: LN(slice) * gain + bias.

    Then c' = clip(sigmoid(f) c + sigmoid(i) tanh(g), -10, 10) and m' = sigmoid(o) c', with no tanh on the output and no
    forget-gate offset (Chen et al. 2018, section 3; Ba et al. 2016).
    """

    roles: ClassVar[Roles] = {"weight": Role.LSTM, "gain": Role.NORM_GAIN, "bias": Role.NORM_BIAS}

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4 * width, inputs + width))
        self.gain = nn.Parameter(torch.ones(4, width))
        self.bias = nn.Parameter(torch.zeros(4, width))

    def start(self, rows: int) -> LstmState:
        """Return the zero state of `rows` sequences."""
        zero = self.gain.new_zeros(rows, self.gain.shape[1])
        return LstmState(zero, zero)

    def step(self, x: Tensor, state: LstmState) -> LstmState:
        """Return the state after one more input `x` [..., inputs], given the previous state, [..., width]."""
        return self.advance(linear(torch.cat([x, state.output], dim=-1), self.weight), state)

    def advance(self, sums: Tensor, state: LstmState) -> LstmState:
        """Return the state after one more input, given [x; m] W, `sums` [..., 4 * width]."""
        gates = sums.to(self.gain.dtype).unflatten(-1, self.gain.shape)
        normed = F.layer_norm(gates, self.gain.shape[1:], eps=EPSILON)
        g, i, f, o = torch.addcmul(self.bias, normed, self.gain).unbind(-2)
        cell = (f.sigmoid() * state.cell + i.sigmoid() * g.tanh()).clamp(-CELL_CLIP, CELL_CLIP)
        return LstmState(o.sigmoid() * cell, cell)


class LstmLayer(nn.Module):
    """Cells that read the same sequence: one from left to right and, in a bidirectional layer, one from right to left.

    `width` is that of each direction's output.
    """

    def __init__(self, inputs: int, width: int, directions: int = 1) -> None:
        super().__init__()
        self.cells = nn.ModuleList(LstmCell(inputs, width) for _ in range(directions))

    def forward(self, x: Tensor, order: StepOrder) -> Tensor:
        """Return [batch, length, directions * width] for `x` [batch, length, inputs]."""
        batch, length, _ = x.shape
        read = x.flatten(0, 1).index_select(0, order.reads.flatten()).unflatten(0, order.reads.shape)
        cells = [cast(LstmCell, cell) for cell in self.cells]
        outputs = recur(
            read,
            [cell.weight for cell in cells],
            torch.stack([cell.gain for cell in cells]),
            torch.stack([cell.bias for cell in cells]),
            batch,
        )
        return outputs.flatten(0, 2).index_select(0, order.states).view(batch, length, -1)

    @property
    def first(self) -> LstmCell:
        """The cell that reads from left to right."""
        return cast(LstmCell, self.cells[0])
