"""Residual connections: how a sub-layer joins the stream. The kinds are in ziggurat.model.residual.kinds."""
