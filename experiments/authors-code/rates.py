"""CompleteP: our rules and the authors' for initial values, rates, decay and epsilon, and updates that follow them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from checkouts import Checkouts, as_precise_as
from comparing import BATCH, LENGTH, differences, drawn, model_of, prepare
from gpt import PATH, completep_config, gpt, transfer_case
from torch import Tensor, nn

from ziggurat.config import ModelConfig
from ziggurat.config.train import OptimiserConfig
from ziggurat.model.build import model_slots, parameter_roles, parameter_scales
from ziggurat.model.init import ModelDepth, xavier
from ziggurat.model.roles import place_of
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.optim import Optimiser

EPSILON, DECAY, BETAS = 1e-8, 0.1, (0.9, 0.95)

# What is compared -> the names of their parameter and our parameter.
PARAMETERS = {
    "query, key and value maps": ("transformer.h.0.attn.c_attn.weight", "layers.0.self_attn.qkv_proj.weight"),
    "attention's output maps": ("transformer.h.0.attn.c_proj.weight", "layers.0.self_attn.out_proj.weight"),
    "feed-forward, first map": ("transformer.h.0.mlp.c_fc.weight", "layers.0.ffn.in_proj.weight"),
    "feed-forward, second map": ("transformer.h.0.mlp.c_proj.weight", "layers.0.ffn.out_proj.weight"),
    "biases in layers": ("transformer.h.0.mlp.c_fc.bias", "layers.0.ffn.in_proj.bias"),
    "norms in layers": ("transformer.h.0.ln_2.weight", "layers.0.ffn_residual.in_norm.weight"),
    "final norm": ("transformer.ln_f.weight", "final_norm.weight"),
    "embeddings": ("transformer.wte.weight", "source_embedding.tokens.weight"),
}


def rules(checkouts: Checkouts) -> list[dict[str, Any]]:
    """Return every factor relative to the base, theirs and ours, for some ratios of width and depth."""
    code = checkouts.file(PATH)
    found = []
    for width, depth, exponent in ((4, 1, 1.0), (1, 8, 1.0), (4, 8, 1.0), (4, 8, 0.5)):
        theirs = _relative(_theirs(code, width, depth, exponent), _theirs(code, 1, 1, exponent))
        ours = _relative(_ours(width, depth, exponent), _ours(1, 1, exponent))
        for (group, quantity), value in theirs.items():
            mine = ours[group, quantity]
            equal = math.isclose(value, mine, rel_tol=1e-12)
            at = {"m_N": width, "m_L": depth, "exponent": exponent, "group": group, "quantity": quantity}
            found.append({**at, "theirs": value, "ours": mine, "equal": equal})
    return found


Factors = Mapping[tuple[str, str], float]


def _relative(factors: Factors, base: Factors) -> Factors:
    return {key: value / base[key] if base[key] else value for key, value in factors.items()}


def _theirs(code: Any, width: int, depth: int, exponent: float) -> Factors:
    deviations: dict[int, float] = {}

    def noted(values: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
        deviations[values.data_ptr()] = std
        return values

    with mock.patch.object(nn.init, "normal_", noted), as_precise_as(torch.float64):
        model = gpt(code, width, depth, exponent)
        optimiser = model.configure_optimizers(DECAY, 1.0, BETAS, EPSILON, "cpu")
    groups = {id(p): group for group in optimiser.param_groups for p in group["params"]}
    parameters = dict(model.named_parameters())
    found: dict[tuple[str, str], float] = {}
    for name, (its, _) in PARAMETERS.items():
        parameter = parameters[its]
        group = groups[id(parameter)]
        std = deviations.get(parameter.data_ptr())
        found |= _factors(name, std, group["lr_scale"], group["eps"], group["weight_decay"])
    found["branches", "factor"] = model.transformer.h[0].residual_scaling
    found["logits", "factor"] = _logits_factor(model)
    return found


def _factors(group: str, std: float | None, rate: float, epsilon: float, decay: float) -> Factors:
    drawn = {} if std is None else {(group, "initial deviation"): std}
    return drawn | {(group, "rate"): rate, (group, "epsilon"): epsilon, (group, "decay"): decay}


def _logits_factor(model: Any) -> float:
    """Return the factor between their final norm and the output map, measured at the latter's input."""
    seen: list[Tensor] = []
    hooks = [
        model.transformer.ln_f.register_forward_hook(lambda module, inputs, y: seen.append(y.clone())),
        model.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])),
    ]
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model.transformer.wpe.weight.data.copy_(torch.eye(*model.transformer.wpe.weight.shape))
    ids = torch.zeros(1, 4, dtype=torch.long)
    with as_precise_as(torch.float64):
        model(ids, targets=ids)
    for hook in hooks:
        hook.remove()
    return float(seen[1].abs().max() / seen[0].abs().max())


def _ours(width: int, depth: int, exponent: float) -> Factors:
    config = completep_config(width, depth, exponent)
    model = model_of(config, torch.float64)
    optimiser = _optimiser(model, config, epsilon=EPSILON, weight_decay=DECAY)
    groups = {
        optimiser.names[parameter]: group
        for part in optimiser.parts
        for group in part.param_groups
        for parameter in group["params"]
    }
    d = config.d_model
    slots = {slot.place: slot for slot in model_slots(model)}
    parameters = dict(model.named_parameters())
    found: dict[tuple[str, str], float] = {}
    for name, (_, its) in PARAMETERS.items():
        full = its if name == "embeddings" else f"encoder.{its}"
        distribution = xavier(slots[place_of(parameters[full])], config.init, ModelDepth(1, 1))
        group = groups[full]
        std, rate, epsilon = distribution.size, group["rate_scale"], group["eps"]
        if name == "embeddings":  # the rule is for E; our parameter is E / sqrt(d_model)
            std, rate, epsilon = std * d**0.5, rate * d**0.5, epsilon / d**0.5
        found |= _factors(name, std, rate, epsilon, group["weight_decay"])
    found["branches", "factor"] = model.encoder.layers[0].ffn_residual.branch
    assert model.decoder.final_norm is not None
    found["logits", "factor"] = float(model.decoder.final_norm.factor) / d**0.5  # likewise
    return found


def _optimiser(model: Seq2Seq, config: ModelConfig, **options: Any) -> Optimiser:
    chosen = OptimiserConfig.model_validate({"kind": "adamw", "betas": BETAS, **options})
    return Optimiser(model, parameter_roles(model), chosen, scales=parameter_scales(model, config))


def updates(checkouts: Checkouts, seed: int, number: int = 5) -> dict[str, dict[str, float]]:
    """Return the largest differences after some updates of the layers, each side with its own optimiser.

    Embeddings and the final norm are left unchanged, because their rules differ (see `rules`).
    """
    code = checkouts.file(PATH)
    found = {}
    for exponent in (1.0, 0.5):
        for scaled in (True, False):
            name = f"exponent {exponent:g}" + ", ours without its factors" * (not scaled)
            found[name] = _updated(code, exponent, scaled, seed, number)
    return found


def _updated(code: Any, exponent: float, scaled: bool, seed: int, number: int) -> dict[str, float]:
    dtype = torch.float64
    config = completep_config(2, 3, exponent)
    model = model_of(config, dtype)
    case = transfer_case(code, model, exponent, dtype)
    generator = torch.Generator().manual_seed(seed)
    prepare(case, generator)
    left = [pair for pair in case.pairs if pair.factor != 1 or pair.ours in set(model.encoder.final_norm.parameters())]
    for pair in left:
        pair.ours.requires_grad_(False)
        pair.theirs.requires_grad_(False)
    # Large enough to matter within a few updates.
    rate, options = 0.01, {"epsilon": 0.1, "weight_decay": 1.0}
    ours = _optimiser(model, config if scaled else config.model_copy(update={"transfer": None}), **options)
    ours.set_rate(rate)
    with as_precise_as(dtype):
        theirs = case.theirs.configure_optimizers(options["weight_decay"], rate, BETAS, options["epsilon"], "cpu")
    for group in theirs.param_groups:
        group["lr"] = rate * group["lr_scale"]  # their train.py does this before each update
    x = drawn((BATCH, LENGTH, case.d_model), generator, dtype)
    direction = drawn(case.run_ours(x).shape, generator, dtype)
    trained = [pair for pair in case.pairs if pair not in left]
    before = [pair.theirs.detach().clone() for pair in trained]
    for _ in range(number):
        for optimiser, run in ((ours, case.run_ours), (theirs, case.run_theirs)):
            optimiser.zero_grad()
            with as_precise_as(dtype):
                logits = run(x)
            (logits * direction).sum().backward()
            optimiser.step()
    changes = [
        (pair.ours.detach() - old, pair.theirs.detach() - old) for pair, old in zip(trained, before, strict=True)
    ]
    with torch.no_grad(), as_precise_as(dtype):
        outputs = case.run_ours(x), case.run_theirs(x)
    return {
        "updates": number,
        "changes_relative": differences(changes)[1],
        "output_relative": differences([outputs])[1],
    }
