"""Building models: ModelConfig -> Seq2Seq, and operations on the whole model: roles, compilation, recomputation."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ziggurat.config.kinds import Family
from ziggurat.config.model import ModelConfig
from ziggurat.config.train import RecomputeConfig
from ziggurat.model.accelerator import can_compile
from ziggurat.model.embedding import Embeddings
from ziggurat.model.init import ModelDepth, constant_omega, initialise
from ziggurat.model.kinds import ENCODER_ATTENTION, StackParts, decoder_layer, memory_mixtures
from ziggurat.model.layers import EncoderLayer
from ziggurat.model.rate_transfer import RateScale, scales
from ziggurat.model.residual.base import Residual
from ziggurat.model.rnmt import build_rnmt
from ziggurat.model.roles import Role, Slot, assign_roles, place_of
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.transformer import Decoder, Encoder
from ziggurat.system.errors import ConfigError


def build_model(
    config: ModelConfig,
    source_vocabulary: int,
    target_vocabulary: int,
    *,
    seed: int = 1,
) -> Seq2Seq:
    """Build and initialise a model on the CPU in fp32; the vocabularies are numbers of tokens.

    The initial weights depend on `seed` alone, and the global random state is unchanged. Where `init.omega` is
    `profiled`, the skips of `residual: admin` are 1 until training profiles them (ziggurat.train.profiling). Raises
    ConfigError when `model.embedding.sharing: all` meets vocabularies of different size.
    """
    model = assemble(config, source_vocabulary, target_vocabulary)
    depth = ModelDepth(
        config.planned_encoder_layers,
        config.planned_decoder_layers,
        merged=config.decoder.attention == "merged",
    )
    below, above = config.stack_init(decoder=False), config.stack_init(decoder=True)
    initialise(model_slots(model), config.init, depth, torch.Generator().manual_seed(seed), (below, above))
    if below.kind == "admin" and below.omega != "profiled":
        constant_omega(stack_residuals(model.encoder), below.omega, 2 * config.planned_encoder_layers)
    if above.kind == "admin" and above.omega != "profiled":
        per_layer = len(stack_residuals(model.decoder)) // config.decoder.layers
        constant_omega(stack_residuals(model.decoder), above.omega, per_layer * config.planned_decoder_layers)
    return model


def assemble(config: ModelConfig, source_vocabulary: int, target_vocabulary: int) -> Seq2Seq:
    """Return the modules of a model on the CPU, or on the device of the context; "meta" takes no memory.

    Parameters stay uninitialised, except those that modules fill themselves (Role.WIRING); buffers are filled. The
    arguments and errors are those of build_model.
    """
    with _Undrawn():
        return _FAMILY[config.family](config, source_vocabulary, target_vocabulary)


class _Undrawn(TorchFunctionMode):
    """Context in which modules of torch.nn draw no initial values.

    Initialisation or a model file replaces every one of them, and for a deep model drawing them takes longer than
    everything else. It would also advance the global random state.
    """

    _DRAWS = frozenset({nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, Tensor.uniform_, Tensor.normal_})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _build_transformer(config: ModelConfig, source_vocabulary: int, target_vocabulary: int) -> Seq2Seq:
    outside = Embeddings(config)
    source_tokens, target_tokens, output = outside.tokens(source_vocabulary, target_vocabulary, config.d_model)
    below, above = StackParts(config, decoder=False), StackParts(config, decoder=True)
    encoder_layers = [
        EncoderLayer(
            ENCODER_ATTENTION[config.encoder.attention](below, number),
            below.feed_forward(),
            below.residuals(number, (True, False)),
        )
        for number in range(1, config.encoder.layers + 1)
    ]
    decoder_layers = [decoder_layer(above, number) for number in range(1, config.decoder.layers + 1)]
    transparent = memory_mixtures(config, sources=config.encoder.layers + 1, readers=config.decoder.layers)
    encoder_wiring = below.wiring(sublayers=2)
    if transparent is not None:  # a final norm would not act on any state that is mixed
        encoder_wiring = dataclasses.replace(encoder_wiring, final_norm=None)
    hierarchy = (config.combination.module, config.decoder.layers) if config.memory == "hierarchical" else None
    return Seq2Seq(
        outside.input(source_tokens),
        outside.input(target_tokens, zero_start=config.embedding.zero_start),
        Encoder(encoder_layers, encoder_wiring, transparent, hierarchy),
        Decoder(decoder_layers, above.wiring(len(decoder_layers[0].sublayers()))),
        output,
    )


_FAMILY: dict[Family, Callable[[ModelConfig, int, int], Seq2Seq]] = {
    "transformer": _build_transformer,
    "rnmt": build_rnmt,
}


def stack_residuals(stack: nn.Module) -> list[Residual]:
    """Return the Residuals of a stack in the order in which a forward pass meets them."""
    return [module for module in stack.modules() if isinstance(module, Residual)]


def compile_layers(model: Seq2Seq) -> None:
    """Have torch.compile run every layer of both stacks, in place; parameters keep their names.

    The layers of a stack share a graph for all lengths and batch sizes, so deeper models compile nothing more. Sizes of
    1 need separate graphs, as do training and evaluation, which bounds their number: 2 * 2^2 for an encoder (batch,
    source), 2 * 2^3 for a decoder (batch, source, target). Decoding step by step is not compiled. Raises ConfigError: a
    device that torch.compile does not know, or a CPU without the C++ compiler that it calls.
    """
    if not can_compile(model.device):
        raise ConfigError(
            f"`training.compile: layers` is not for the device `{model.device.type}`, which torch.compile does not "
            "know; set it to `none`",
            key="training.compile",
            named=["training.device"],
        )
    compiler = os.environ.get("CXX", "g++")
    if model.device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"`training.compile: layers` needs a C++ compiler on a CPU, and there is no `{compiler}`",
            key="training.compile",
        )
    # torch counts the graphs of both stacks together, and beyond its limit (8) it runs layers uncompiled. Twice the
    # bound, because in some models the first layer reads a different kind of tensor, which needs other graphs.
    torch._dynamo.config.recompile_limit = max(48, torch._dynamo.config.recompile_limit)
    # With duck shapes, two sizes that happen to be equal while a graph is built (batch and length, say) are treated as
    # one, and the first batch in which they differ rebuilds the graph.
    torch.fx.experimental._config.use_duck_shape = False
    for stack in (model.encoder, model.decoder):
        for layer in stack.layers:
            layer.compile(dynamic=True)


def set_recompute(model: Seq2Seq, config: RecomputeConfig) -> None:
    """Set which layers of each stack are computed again in the backward pass; names and gradients stay the same."""
    for stack, recompute in ((model.encoder, config.encoder), (model.decoder, config.decoder)):
        stack.recompute = recompute


def model_slots(model: Seq2Seq) -> list[Slot]:
    """Return every parameter of the model once, with its role, its stack and the number of its layer (0 outside)."""
    layer_of = {
        slot.place: (number, decoder)
        for decoder, stack in enumerate((model.encoder, model.decoder))
        for number, layer in reversed(list(enumerate(stack.layers, start=1)))  # tied layers count as the lowest of them
        for slot in assign_roles(layer)
    }
    # A target embedding that is not shared with the source belongs to the decoder, although it is in no layer
    # (T-Fixup).
    source, target = (place_of(e.tokens.weight) for e in (model.source_embedding, model.target_embedding))
    if source != target:
        layer_of[target] = (0, 1)
    placed = []
    for slot in assign_roles(model):
        number, decoder = layer_of.get(slot.place, (0, 0))
        placed.append(dataclasses.replace(slot, layer=number, decoder=bool(decoder)))
    return placed


def parameter_roles(model: Seq2Seq) -> dict[str, Role]:
    """Return the role of every parameter by name; a matrix made of several parts has the role of the first."""
    role_of = {slot.place: slot.role for slot in reversed(model_slots(model))}
    return {name: role_of[place_of(parameter)] for name, parameter in model.named_parameters()}


def parameter_scales(model: Seq2Seq, config: ModelConfig) -> dict[str, RateScale] | None:
    """Return the factors of rate, epsilon and decay of every parameter by its name; None: `config` has no base."""
    if config.transfer is None:
        return None
    found = scales(config, model_slots(model))
    return {name: found[place_of(parameter)] for name, parameter in model.named_parameters()}


def count_parameters(model: nn.Module) -> int:
    """Return the number of values that belong to the model; a shared matrix counts once."""
    return sum(p.numel() for p in model.parameters())
