"""From corpora to a small student: steps with manifests, run in order, each only where it must be.

`ziggurat.corpora.pipeline.engine` runs steps of any kind; `ziggurat.corpora.pipeline.steps` makes those of a
configuration.
"""
