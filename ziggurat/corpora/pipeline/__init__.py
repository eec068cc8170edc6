"""From corpora to a small student: steps with manifests, run in order, each only if needed.

`ziggurat.corpora.pipeline.engine` runs steps of any kind; `ziggurat.corpora.pipeline.steps` makes the steps of a
configuration.
"""
