"""Residual kinds: how a sub-layer joins the stream."""

from ziggurat.nn.residual.admin import admin
from ziggurat.nn.residual.b2t import b2t
from ziggurat.nn.residual.base import Material, Place, Residual
from ziggurat.nn.residual.deepnorm import deepnorm
from ziggurat.nn.residual.fixup import ShiftedLinear, ShiftScale, fixup
from ziggurat.nn.residual.hyper import HyperConnection, hyper
from ziggurat.nn.residual.layer_scale import layer_scale
from ziggurat.nn.residual.lingvo import lingvo
from ziggurat.nn.residual.ln_scaling import ln_scaling
from ziggurat.nn.residual.no_skip import no_skip
from ziggurat.nn.residual.peri import peri
from ziggurat.nn.residual.plain import no_norm, post_norm, pre_norm
from ziggurat.nn.residual.res_post import res_post
from ziggurat.nn.residual.rezero import rezero

__all__ = [
    "HyperConnection",
    "Material",
    "Place",
    "Residual",
    "ShiftScale",
    "ShiftedLinear",
    "admin",
    "b2t",
    "deepnorm",
    "fixup",
    "hyper",
    "layer_scale",
    "lingvo",
    "ln_scaling",
    "no_norm",
    "no_skip",
    "peri",
    "post_norm",
    "pre_norm",
    "res_post",
    "rezero",
]
