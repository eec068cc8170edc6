"""Rules of section `model`: choices that cannot be combined. Keys are relative to the section."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from ziggurat.config.kinds import ATTENTIONS, INITIALISATIONS, RESIDUALS
from ziggurat.system.errors import Problem

if TYPE_CHECKING:
    from ziggurat.config.model import ModelConfig


def contradictions(model: ModelConfig) -> list[Problem]:
    """Return why `model` cannot be built; empty if it can."""
    of_transformer = (_attention, _residuals, _initialisation, _values, _stacks, _solver, _transfer)
    checks = (_sizes, _rnmt) if model.family == "rnmt" else (_sizes, *of_transformer)
    return [problem for check in checks for problem in check(model)]


def _sizes(model: ModelConfig) -> Iterator[Problem]:
    sides = [("", model.d_model, model.heads)]
    if model.encoder.d_model or model.encoder.heads:
        sides.append(("encoder.", model.encoder_width, model.encoder_heads))
    for prefix, width, heads in sides:
        if width % heads:
            yield Problem.of(f"{prefix}d_model", f"({width}) is not a multiple of `{prefix}heads` ({heads})")
        elif model.embedding.positions == "rotary" and width // heads % 2:
            why = f"rotary positions rotate pairs of channels: {width} / {heads} heads is odd"
            yield Problem("embedding.positions", why)
        if width % 2 and model.embedding.positions == "sinusoidal":
            why = f"sinusoidal positions need an even `{prefix}d_model`, not {width}"
            yield Problem("embedding.positions", why)
    if model.encoder_width != model.d_model:
        if model.embedding.sharing == "all":
            yield Problem.of(
                "embedding.sharing: all", "needs equal widths of encoder and decoder", "use `decoder` or `none`"
            )
        if model.embedding.shared_bias:
            yield Problem.of("embedding.shared_bias", "needs equal widths of encoder and decoder")


def _attention(model: ModelConfig) -> Iterator[Problem]:
    if model.embedding.positions == "rotary":
        if "relative" in (model.encoder.attention, model.decoder.attention):
            yield Problem.of(
                "embedding.positions: rotary", "and `attention: relative` both put positions into the same logits"
            )
        if not ATTENTIONS[model.decoder.attention].rotary:
            yield Problem.of(
                f"decoder.attention: {model.decoder.attention}",
                "has no queries and keys to rotate, so with "
                "`embedding.positions: rotary` the decoder would have no positions at all",
            )
    if model.decoder.attention == "merged" and model.attention.share_value and model.encoder_width != model.d_model:
        yield Problem.of(
            "attention.share_value",
            "projects the states of encoder and decoder with one matrix, so both must be equally wide",
            "set it to false",
        )


def _residuals(model: ModelConfig) -> Iterator[Problem]:
    below, above = model.residuals(decoder=False), model.residuals(decoder=True)
    residuals = tuple(dict.fromkeys((*below, *above)))
    split = any(model.combination.splits(stack.history) for stack in (model.encoder, model.decoder))
    for residual in residuals:
        if RESIDUALS[residual].layer_input and split:
            yield Problem.of(
                f"residual: {residual}",
                "adds the layer's input to its last sub-layer; with `combination.unit: "
                "sublayer` a layer has no input of its own",
            )
    if "hybrid" in above and not ATTENTIONS[model.decoder.attention].rotary:
        yield Problem.of(
            "residual: hybrid",
            "has its norms on queries, keys and values, which `decoder.attention: "
            f"{model.decoder.attention}` lacks: nothing would be normalised",
        )
    if model.memory == "transparent" and "siamese" in below:
        yield Problem.of(
            "memory: transparent", "mixes the states of all layers, but `residual: siamese` has only one at the end"
        )
    if model.memory == "hierarchical":
        yield from _modules(model, below)
    if "manifold_hyper" in residuals and model.wiring.mixing == "permutations" and model.wiring.streams > 6:
        yield Problem.of(
            "wiring.mixing: permutations", f"with {model.wiring.streams} streams: 6 already have 720", "use `sinkhorn`"
        )


def _modules(model: ModelConfig, below: tuple[str, ...]) -> Iterator[Problem]:
    lower = model.combination.module
    if "siamese" in below:
        yield Problem.of(
            "memory: hierarchical", "reads a layer's output, but `residual: siamese` has one stream only at the end"
        )
    history = model.encoder.history
    if history not in ("latest", "cross_module") or model.combination.splits(history):
        yield Problem.of(
            "memory: hierarchical",
            f"treats encoder layer {lower} as the end of an encoder:",
            "`encoder.history: latest`, or `cross_module` between layers",
        )
    if model.encoder.layers > lower >= model.decoder.layers:
        yield Problem.of(
            "memory: hierarchical",
            f": no decoder layer above {lower} (`combination.period`) would read the encoder layers above {lower}",
        )


def _initialisation(model: ModelConfig) -> Iterator[Problem]:
    residuals = {"encoder": model.residuals(decoder=False), "decoder": model.residuals(decoder=True)}
    for key, init in model.inits.items():
        side = key.partition(".")[0]
        here = [side] if side in residuals else [stack for stack in residuals if f"{stack}.init" not in model.inits]
        if init.kind == "admin" and not any("admin" in residuals[stack] for stack in here):
            where = f" in the {side}" if side in residuals else ""
            yield Problem.of(
                f"{key}.kind: admin",
                "sets the skip vectors of `residual: admin`",
                f"choose that residual{where} or another init",
            )
        if side in residuals and (outside := INITIALISATIONS[init.kind].outside):
            other = "encoder" if side == "decoder" else "decoder"
            yield Problem.of(
                f"{key}.kind: {init.kind}",
                f"also {outside}, outside the {side}:",
                f"set `init.kind: {init.kind}`, and `{other}.init.kind` to the kind for the {other}",
            )
    profiled = [init for init in model.inits.values() if init.kind == "admin" and init.omega == "profiled"]
    if len({init.profile_tokens for init in profiled}) > 1:
        yield Problem(
            "init.profile_tokens",
            "`profile_tokens` differ: the omegas of both stacks are profiled on one batch",
            "set `init.profile_tokens`",
        )


def _values(model: ModelConfig) -> Iterator[Problem]:
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for key in model.value_residuals(decoder=side == "decoder") if stack.layer_drop else ():
            yield Problem.of(
                f"{side}.layer_drop", f": `{key}` needs the values of the first layer, which may be dropped"
            )
    if model.decoder.attention == "merged" and model.attention.cross_value_residual == "single":
        yield Problem.of(
            "attention.cross_value_residual: single",
            "leaves no value map above the first layer, but "
            "`decoder.attention: merged` needs one for encoder and decoder states",
        )


def _stacks(model: ModelConfig) -> Iterator[Problem]:
    stacks = (("encoder", model.encoder, model.encoder_width), ("decoder", model.decoder, model.d_model))
    for side, stack, width in stacks:
        if stack.layer_drop and "attention_residuals" in stack.history:
            yield Problem.of(f"{side}.layer_drop", f": a dropped layer gives `{stack.history}` nothing to attend to")
        if stack.history == "mudd":
            for residual in dict.fromkeys(model.residuals(decoder=side == "decoder")):
                if residual != "pre":
                    yield Problem.of(
                        f"{side}.history: mudd",
                        "gives queries, keys and values one input each:",
                        "`residual: pre` alone",
                    )
            if stack.attention not in ("full", "relative"):
                yield Problem.of(
                    f"{side}.history: mudd",
                    "feeds queries, keys and values of self-attention:",
                    f"`attention: full` or `relative`, not `{stack.attention}`",
                )
        if stack.ffn_depth > 2 and model.activation == "swiglu":
            yield Problem.of(
                f"{side}.ffn_depth", f"({stack.ffn_depth}) is for activations without a gate, not `swiglu`"
            )
        yield from _ties(model, side)
        if (lower := sum(part.layers for part in stack.ranges)) >= stack.layers:
            yield Problem.of(f"{side}.ranges", f"has {lower} layers, leaving none of the {stack.layers} above them")
        for residual in dict.fromkeys(model.residuals(decoder=side == "decoder")) if stack.ranges else ():
            if RESIDUALS[residual].alone:
                yield Problem.of(
                    f"{side}.ranges", f": `{residual}` cannot be mixed with other kinds: {RESIDUALS[residual].alone}"
                )
        if width % model.combination.groups:
            yield Problem.of(
                "combination.groups", f"({model.combination.groups}) does not divide the {side}'s width {width}"
            )


def _solver(model: ModelConfig) -> Iterator[Problem]:
    """Yield choices that cannot be combined with a solver, which computes each layer several times."""
    if model.encoder.solver == "euler":
        return
    chosen = f"encoder.solver: {model.encoder.solver}"
    if model.combination.splits(model.encoder.history):
        yield Problem.of(chosen, "computes whole layers; with `combination.unit: sublayer` none is computed as a whole")
    if model.encoder.history == "mudd":
        yield Problem.of(chosen, "gives a layer one input, but `encoder.history: mudd` gives it several")
    for key in model.value_residuals(decoder=False):
        yield Problem.of(chosen, f"computes the first layer's values several times, but `{key}` needs them once")
    if model.stack_init(decoder=False).kind == "admin":
        yield Problem.of(
            chosen, "calls each sub-layer several times, but `init.kind: admin` adds up the variances of one pass"
        )


def _ties(model: ModelConfig, side: str) -> Iterator[Problem]:
    stack, residuals = getattr(model, side), model.residuals(decoder=side == "decoder")
    ties = [(layer, owner) for layer, owner in enumerate(stack.owners()) if layer != owner]
    if not ties or sum(part.layers for part in stack.ranges) >= stack.layers:  # refused elsewhere
        return
    for layer, owner in ties:
        if residuals[layer] != residuals[owner]:
            yield Problem.of(
                f"{side}.tied_layers",
                f": layers {owner + 1} and {layer + 1} have different kinds in `{side}.ranges` and cannot be one",
            )
            break
    if any(owner == 0 for _, owner in ties) and (unlike := model.first_unlike(decoder=side == "decoder")):
        yield Problem.of(
            f"{side}.tied_layers", f": `{unlike}` makes the first layer different:", "tie only layers above it"
        )


def _transfer(model: ModelConfig) -> Iterator[Problem]:
    if model.transfer is None:
        return
    residuals = dict.fromkeys((*model.residuals(decoder=False), *model.residuals(decoder=True)))
    needed: list[tuple[str, object, object]] = [
        *(("residual", residual, "pre") for residual in residuals),
        *((f"{key}.kind", init.kind, "xavier") for key, init in model.inits.items()),
        ("embedding.scale", model.embedding.scale, True),
        ("embedding.unit_length", model.embedding.unit_length, False),
        ("wiring.gpas", model.wiring.gpas, False),
        ("attention.value_residual", model.attention.value_residual, "none"),
        ("attention.cross_value_residual", model.attention.cross_value_residual, "none"),
        ("encoder.d_model", model.encoder_width, model.d_model),
        ("encoder.solver", model.encoder.solver, "euler"),
        ("encoder.tied_layers", model.encoder.tied_layers, []),
        ("decoder.tied_layers", model.decoder.tied_layers, []),
    ]
    for key, value, allowed in needed:
        if value != allowed:
            yield _not_worked_out(f"{key}: {value}", f"it needs `{allowed}`")
    if model.norm == "scale":
        yield _not_worked_out("norm: scale", "it needs `layer` or `rms`")
    if model.embedding.positions == "learned":
        yield _not_worked_out("embedding.positions: learned", "it needs `sinusoidal`, `rotary` or `none`")
    head = model.d_model // model.heads
    if head and model.transfer.width % head:  # more heads than channels are refused already
        yield Problem.of(
            "transfer.width", f"({model.transfer.width}): no base with {head} channels per head, as here, is that wide"
        )
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack.history not in ("latest", "top_only"):
            yield _not_worked_out(
                f"{side}.history: {stack.history}",
                "it needs `latest` or `top_only`",
                ", whose combinations between layers it does not scale",
            )


def _not_worked_out(choice: str, needs: str, why: str = "") -> Problem:
    return Problem.of("transfer", f"is not worked out for `{choice}`{why}", needs)


_OF_TRANSFORMERS = (
    *("decoder.residual", "encoder.residual", "residual", "encoder.history", "decoder.history"),
    *("encoder.attention", "decoder.attention", "encoder.d_model", "encoder.d_ff", "encoder.heads", "activation"),
    *("encoder.ffn_depth", "decoder.ffn_depth"),
    *("attention.qk_norm", "attention.value_norm", "attention.value_residual", "attention.cross_value_residual"),
    *("attention.query_scale", "norm", "encoder.layer_drop", "decoder.layer_drop", "encoder.layer_norm_epsilon"),
    *("decoder.layer_norm_epsilon", "dropout.activation", "dropout.sublayer", "embedding.shared_bias"),
    *("embedding.zero_start", "encoder.ranges", "decoder.ranges", "encoder.init", "decoder.init", "transfer"),
    *("encoder.solver", "encoder.tied_layers", "decoder.tied_layers"),
)
"""_OF_TRANSFORMERS are keys that RNMT+ does not use; they must have their defaults."""


def _rnmt(model: ModelConfig) -> Iterator[Problem]:
    plain = type(model).model_construct()
    for key in _OF_TRANSFORMERS:
        value = attrgetter(key)(model)
        if value == attrgetter(key)(plain) or (key, value) == ("encoder.residual", "none"):
            continue
        said = key if key.endswith(("ranges", "init", "transfer", "tied_layers")) else f"{key}: {value}"
        why = f"`{said}` is for `family: transformer`; RNMT+ joins its LSTM layers as in its paper"
        yield Problem(key, why)
    if model.embedding.positions != "none":
        why = "RNMT+ gets positions from its recurrence:"
        yield Problem("embedding.positions", why, "set `embedding.positions: none`")
    if model.embedding.sharing in ("decoder", "all"):
        why = "RNMT+ projects states of 2 d_model, so no embedding fits its output:"
        yield Problem("embedding.sharing", why, "set `embedding.sharing: none`")
    if model.memory == "hierarchical":
        yield Problem.of("memory: hierarchical", "is for `family: transformer`; RNMT+ reads one state in all layers")
    if not INITIALISATIONS[model.init.kind].rnmt:
        others = " and ".join(sorted(f"`{kind}`" for kind, facts in INITIALISATIONS.items() if facts.rnmt))
        yield Problem.of(f"init.kind: {model.init.kind}", f"is for `family: transformer`; RNMT+ has {others}")
