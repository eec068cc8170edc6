"""Rules of section `model`: choices that cannot work together. Keys are relative to the section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ziggurat.config.kinds import ATTENTIONS, INITIALISATIONS, RESIDUALS
from ziggurat.system.errors import Problem

if TYPE_CHECKING:
    from ziggurat.config.model import ModelConfig


def contradictions(model: ModelConfig) -> list[Problem]:
    """Return why `model` cannot be built; nothing when it can."""
    return [*_sizes(model), *(_rnmt(model) if model.family == "rnmt" else _transformer(model))]


def _sizes(model: ModelConfig) -> Iterator[Problem]:
    sides = [("", model.d_model, model.heads)]
    if model.encoder.d_model or model.encoder.heads:
        sides.append(("encoder.", model.encoder_width, model.encoder_heads))
    for prefix, width, heads in sides:
        if width % heads:
            why = f"`{prefix}d_model` ({width}) is not a multiple of `{prefix}heads` ({heads})"
            yield Problem(f"{prefix}d_model", why)
        elif model.embedding.positions == "rotary" and width // heads % 2:
            why = f"rotary positions turn pairs of channels: {width} / {heads} heads is odd"
            yield Problem("embedding.positions", why)
        if width % 2 and model.embedding.positions == "sinusoidal":
            why = f"sinusoidal positions need an even `{prefix}d_model`, not {width}"
            yield Problem("embedding.positions", why)
    if model.encoder_width != model.d_model:
        if model.embedding.sharing == "all":
            why = "`embedding.sharing: all` needs equal widths of encoder and decoder"
            yield Problem("embedding.sharing", why, "use `decoder` or `none`")
        if model.embedding.shared_bias:
            why = "`embedding.shared_bias` needs equal widths of encoder and decoder"
            yield Problem("embedding.shared_bias", why)


def _transformer(model: ModelConfig) -> Iterator[Problem]:
    for check in (_attention, _residuals, _initialisation, _values, _stacks, _transfer):
        yield from check(model)


def _attention(model: ModelConfig) -> Iterator[Problem]:
    if model.embedding.positions == "rotary":
        if "relative" in (model.encoder.attention, model.decoder.attention):
            why = "`embedding.positions: rotary` and `attention: relative` both put positions into the same logits"
            yield Problem("embedding.positions", why)
        if not ATTENTIONS[model.decoder.attention].rotary:
            yield Problem(
                "decoder.attention",
                f"`decoder.attention: {model.decoder.attention}` has no queries and keys to rotate, so with "
                "`embedding.positions: rotary` the decoder would not know positions at all",
            )
    if model.decoder.attention == "merged" and model.attention.share_value and model.encoder_width != model.d_model:
        yield Problem(
            "attention.share_value",
            "`attention.share_value` has one matrix project the states of encoder and decoder, so both must be equally "
            "wide",
            "set it to false",
        )


def _residuals(model: ModelConfig) -> Iterator[Problem]:
    below, above = model.residuals(decoder=False), model.residuals(decoder=True)
    residuals = tuple(dict.fromkeys((*below, *above)))
    split = any(model.combination.splits(stack.history) for stack in (model.encoder, model.decoder))
    for residual in residuals:
        if RESIDUALS[residual].layer_input and split:
            yield Problem(
                "residual",
                f"`residual: {residual}` adds the layer's input to its last sub-layer; with `combination.unit: "
                "sublayer` a layer has no input of its own",
            )
    if "hybrid" in above and not ATTENTIONS[model.decoder.attention].rotary:
        yield Problem(
            "residual",
            f"`residual: hybrid` has its norms on queries, keys and values, which `decoder.attention: "
            f"{model.decoder.attention}` lacks: nothing would be normalised",
        )
    if model.memory == "transparent" and "siamese" in below:
        why = "`memory: transparent` mixes the states of all layers; `residual: siamese` has one only at the end"
        yield Problem("memory", why)
    if "manifold_hyper" in residuals and model.wiring.mixing == "permutations" and model.wiring.streams > 6:
        why = f"`wiring.mixing: permutations` of {model.wiring.streams} streams: 6 have 720 already"
        yield Problem("wiring.mixing", why, "use `sinkhorn`")


def _initialisation(model: ModelConfig) -> Iterator[Problem]:
    residuals = {"encoder": model.residuals(decoder=False), "decoder": model.residuals(decoder=True)}
    for key, init in model.inits.items():
        side = key.partition(".")[0]
        here = [side] if side in residuals else [stack for stack in residuals if f"{stack}.init" not in model.inits]
        if init.kind == "admin" and not any("admin" in residuals[stack] for stack in here):
            where = f" in the {side}" if side in residuals else ""
            yield Problem(
                f"{key}.kind",
                f"`{key}.kind: admin` sets the skip vectors of `residual: admin`",
                f"choose that residual{where} or another init",
            )
        if side in residuals and (outside := INITIALISATIONS[init.kind].outside):
            other = "encoder" if side == "decoder" else "decoder"
            yield Problem(
                f"{key}.kind",
                f"`{key}.kind: {init.kind}` also {outside}, outside of the {side}:",
                f"set `init.kind: {init.kind}`, and `{other}.init.kind` to what the {other} is to have",
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
            why = f"`{side}.layer_drop`: `{key}` needs the values of the first layer, which may be left out"
            yield Problem(f"{side}.layer_drop", why)
    if model.decoder.attention == "merged" and model.attention.cross_value_residual == "single":
        yield Problem(
            "attention.cross_value_residual",
            "`attention.cross_value_residual: single` leaves no value map above the first layer, and "
            "`decoder.attention: merged` has one for encoder and decoder states",
        )


def _stacks(model: ModelConfig) -> Iterator[Problem]:
    """Yield what one stack cannot have together."""
    stacks = (("encoder", model.encoder, model.encoder_width), ("decoder", model.decoder, model.d_model))
    for side, stack, width in stacks:
        if stack.layer_drop and "attention_residuals" in stack.history:
            why = f"`{side}.layer_drop`: a layer that is left out gives nothing for `{stack.history}` to attend to"
            yield Problem(f"{side}.layer_drop", why)
        if stack.history == "mudd":
            for residual in dict.fromkeys(model.residuals(decoder=side == "decoder")):
                if residual != "pre":
                    why = f"`{side}.history: mudd` gives queries, keys and values an input each:"
                    yield Problem(f"{side}.history", why, "`residual: pre` alone")
            if stack.attention not in ("full", "relative"):
                yield Problem(
                    f"{side}.history",
                    f"`{side}.history: mudd` feeds queries, keys and values of self-attention:",
                    f"`attention: full` or `relative`, not `{stack.attention}`",
                )
        if (lower := sum(part.layers for part in stack.ranges)) >= stack.layers:
            why = f"`{side}.ranges` has {lower} layers, which leaves none of {stack.layers} above them"
            yield Problem(f"{side}.ranges", why)
        for residual in dict.fromkeys(model.residuals(decoder=side == "decoder")) if stack.ranges else ():
            if RESIDUALS[residual].alone:
                why = f"`{side}.ranges`: `{residual}` mixes with no other kind: {RESIDUALS[residual].alone}"
                yield Problem(f"{side}.ranges", why)
        if width % model.combination.groups:
            why = f"`combination.groups` ({model.combination.groups}) does not divide the {side}'s width {width}"
            yield Problem("combination.groups", why)


def _transfer(model: ModelConfig) -> Iterator[Problem]:
    if model.transfer is None:
        return
    residuals = dict.fromkeys((*model.residuals(decoder=False), *model.residuals(decoder=True)))
    needed: list[tuple[str, object, object]] = [
        *(("residual", residual, "pre") for residual in residuals),
        *((f"{key}.kind", init.kind, "xavier") for key, init in model.inits.items()),
        ("embedding.scale", model.embedding.scale, True),
        ("wiring.gpas", model.wiring.gpas, False),
        ("attention.value_residual", model.attention.value_residual, "none"),
        ("attention.cross_value_residual", model.attention.cross_value_residual, "none"),
        ("encoder.d_model", model.encoder_width, model.d_model),
    ]
    for key, value, allowed in needed:
        if value != allowed:
            yield _not_worked_out(f"{key}: {value}", f"it needs `{allowed}`")
    if model.embedding.positions == "learned":
        yield _not_worked_out("embedding.positions: learned", "it needs `sinusoidal`, `rotary` or `none`")
    head = model.d_model // model.heads
    if head and model.transfer.width % head:  # more heads than channels are refused already
        why = f"`transfer.width` ({model.transfer.width}): no base of {head} channels a head, as here, is as wide"
        yield Problem("transfer.width", why)
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack.history not in ("latest", "top_only"):
            yield _not_worked_out(
                f"{side}.history: {stack.history}",
                "it needs `latest` or `top_only`",
                ", whose combinations between layers it does not scale",
            )


def _not_worked_out(choice: str, needs: str, why: str = "") -> Problem:
    return Problem("transfer", f"`transfer` is not worked out for `{choice}`{why}", needs)


def _rnmt(model: ModelConfig) -> Iterator[Problem]:
    transformer_only: list[tuple[str, object, set[object]]] = [
        ("decoder.residual", model.decoder.residual, {None}),
        ("encoder.residual", model.encoder.residual, {None, "none"}),
        ("residual", model.residual, {"pre"}),
        ("encoder.history", model.encoder.history, {"latest"}),
        ("decoder.history", model.decoder.history, {"latest"}),
        ("encoder.attention", model.encoder.attention, {"full"}),
        ("decoder.attention", model.decoder.attention, {"full"}),
        ("encoder.d_model", model.encoder.d_model, {None}),
        ("encoder.d_ff", model.encoder.d_ff, {None}),
        ("encoder.heads", model.encoder.heads, {None}),
        ("activation", model.activation, {"relu"}),
        ("attention.qk_norm", model.attention.qk_norm, {"none"}),
        ("attention.value_norm", model.attention.value_norm, {"none"}),
        ("attention.value_residual", model.attention.value_residual, {"none"}),
        ("attention.cross_value_residual", model.attention.cross_value_residual, {"none"}),
        ("attention.query_scale", model.attention.query_scale, {False}),
        ("norm", model.norm, {"layer"}),
        ("encoder.layer_drop", model.encoder.layer_drop, {0.0}),
        ("decoder.layer_drop", model.decoder.layer_drop, {0.0}),
        ("encoder.layer_norm_epsilon", model.encoder.layer_norm_epsilon, {None}),
        ("decoder.layer_norm_epsilon", model.decoder.layer_norm_epsilon, {None}),
        ("dropout.activation", model.dropout.activation, {0.0}),
        ("dropout.sublayer", model.dropout.sublayer, {0.0}),
        ("embedding.shared_bias", model.embedding.shared_bias, {False}),
        ("embedding.zero_start", model.embedding.zero_start, {False}),
    ]
    found = {key: f"{key}: {value}" for key, value, allowed in transformer_only if value not in allowed}
    ranges = {"encoder.ranges": model.encoder.ranges, "decoder.ranges": model.decoder.ranges}
    own = {key: init for key, init in model.inits.items() if key != "init"}
    found |= {key: key for key, section in {**ranges, **own, "transfer": model.transfer}.items() if section}
    for key, said in found.items():
        why = f"`{said}` is for `family: transformer`; RNMT+ has LSTM layers joined as its paper says"
        yield Problem(key, why)
    if model.embedding.positions != "none":
        why = "RNMT+ reads positions from its recurrence:"
        yield Problem("embedding.positions", why, "set `embedding.positions: none`")
    if model.embedding.sharing in ("decoder", "all"):
        why = "RNMT+ projects states of 2 d_model, so no embedding fits its output:"
        yield Problem("embedding.sharing", why, "set `embedding.sharing: none`")
    if not INITIALISATIONS[model.init.kind].rnmt:
        others = " and ".join(sorted(f"`{kind}`" for kind, facts in INITIALISATIONS.items() if facts.rnmt))
        why = f"`init.kind: {model.init.kind}` is for `family: transformer`; RNMT+ has {others}"
        yield Problem("init.kind", why)
