"""Back-translation and distillation: a model and monolingual text in, a synthetic parallel corpus out.

`back_translate` (ziggurat.corpora.synthesis.backtranslation) splits the text into shards. Each stage is a function of
one shard and writes a file with a manifest. The filtered shards in order are the corpus (docs/students.md).
"""
