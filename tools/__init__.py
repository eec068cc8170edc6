"""Tools for developers: counts over the code, and checks that a change altered no number."""
