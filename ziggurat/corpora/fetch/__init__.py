"""Public corpora and test sets by name: found in a registry, fetched with resume and checksums, written as text.

`plan` says what is to be fetched, `corpus` writes it; a record of origin and licence lies beside it (docs/fetch.md).
"""
