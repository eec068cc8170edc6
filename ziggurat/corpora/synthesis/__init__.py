"""Back-translation and distillation: a model and monolingual text in, a synthetic parallel corpus out.

`back_translate` (ziggurat.corpora.synthesis.backtranslation) cuts the text into shards; each stage is a function of one
shard and leaves a file with a manifest; the filtered shards in order are the corpus (docs/back-translation.md).
"""
