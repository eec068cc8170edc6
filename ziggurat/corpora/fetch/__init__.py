"""Public corpora and test sets by name: found in a registry, fetched with resume and checksums, written as text.

`pairs` decides what to fetch and writes it, with a record of origin and licence next to it (docs/data.md).
"""
