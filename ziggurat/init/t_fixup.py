"""T-Fixup: a Transformer without layer normalisation and warm-up (Huang et al. 2020, section 3.2)."""

from __future__ import annotations

from ziggurat.config.wiring import InitConfig
from ziggurat.init.depth import Depth
from ziggurat.init.draw import Draw, Uniform
from ziggurat.init.roles import Role, Slot
from ziggurat.init.xavier import xavier, xavier_bound
from ziggurat.nn.roles import WRITTEN

__all__ = ["t_fixup"]


def t_fixup(slot: Slot, config: InitConfig, depth: Depth) -> Draw:
    """Glorot, with value, output and feed-forward maps smaller by depth, and so the token embeddings.

    Factor of the decoder's maps and of target embeddings of its own: (9M)^-1/4; of the encoder's maps: 0.67 N^-1/4; of
    source embeddings, and of a table that both sides share: (9N)^-1/4. The paper has equal depths and writes N in all;
    for others this is the rule of its code. Values have the Glorot bound of their own matrix whatever
    `init.qkv` says, as the paper's code makes up for its fused bound. Positions, a softmax matrix of its own,
    gates and relative positions stay as in `xavier`.
    """
    decoder_factor = (9.0 * depth.decoder_layers) ** -0.25
    if slot.role is Role.EMBEDDING:
        factor = decoder_factor if slot.decoder else (9.0 * depth.encoder_layers) ** -0.25
        return xavier(slot, config, depth).scaled(factor)
    if slot.role in WRITTEN and slot.layer:
        factor = decoder_factor if slot.decoder else 0.67 * depth.encoder_layers**-0.25
        return Uniform(factor * xavier_bound(slot, fused=False))
    return xavier(slot, config, depth)
