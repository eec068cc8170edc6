"""Inspection: whether a depth trains, its cost, the worth of each layer, the best rate; reports and figures."""
