"""Public corpora and test sets by name: found in a registry, fetched with resume and checksums, written as text.

`pairs` says what is to be fetched and writes it; a record of origin and licence lies beside it (docs/fetch.md).
"""
