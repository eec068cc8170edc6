"""Bulk work: a job is a row of shards, a pure function of each, and manifests that say which of them are complete.

`run_job` (ziggurat.corpora.jobs.job) does the shards that are not, by processes of this machine or by actors of a Ray
cluster (ziggurat.corpora.jobs.launchers), all of them or every n-th; what is merged from them does not depend on who
did them.
"""
