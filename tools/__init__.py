"""Tools for developers: counts over the code, checks of outputs and documents, and a pretend accelerator."""
