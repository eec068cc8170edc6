"""Bulk work: a job is a series of shards, a pure function of each shard, and manifests of the complete ones.

`run_job` (ziggurat.corpora.jobs.job) does the incomplete shards, all of them or every n-th, in processes on this
machine or actors on a Ray cluster (ziggurat.corpora.jobs.launchers). The merged result does not depend on where the
shards were done.
"""
