"""Making of corpora: fetching, bulk translation, synthesis, and the pipeline from corpora to a student."""
