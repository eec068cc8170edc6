"""Run of a back-translation: the shards that are not complete are translated and filtered, then merged to a corpus."""

from __future__ import annotations

from functools import partial

from ziggurat.corpora.jobs.run import JobOutcome, Work, run_job
from ziggurat.corpora.synthesis.lines import readable_lines
from ziggurat.corpora.synthesis.merge import Report, merge, merged
from ziggurat.corpora.synthesis.plan import BackTranslationJob, make_plan
from ziggurat.corpora.synthesis.stages import filtered_files, make_shard


def back_translate(job: BackTranslationJob, work: Work) -> JobOutcome[Report]:
    """Do what `work` says of `job`; the corpus does not depend on interruptions or on the number of workers.

    Raises:
        DataError: inputs that cannot be used, a folder that is in the way or in use, shards missing for the merge.
        ConfigError, CheckpointError: settings or models that cannot be used.
    """
    plan, choice = make_plan(job)
    return run_job(
        plan,
        filtered_files(job.out, plan.fingerprint),
        partial(make_shard, job, choice, plan.fingerprint),
        partial(readable_lines, job.files, job.reference_files),
        partial(merge, job.out, plan),
        work,
        merged=partial(merged, job.out, plan),
    )
