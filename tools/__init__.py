"""Tools for whoever works on the code: what it counts, and whether a change altered a number."""
