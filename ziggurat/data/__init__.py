"""From text to ids on disk to batches. Only collate.py and loader.py import torch.

Order of reading:

- text: folder_kinds, origins, lines, parquet, readers, score_files, sides, vocabulary, segmentation, subword,
  subword_training;
- cleaning: the package `cleaning`, and sampling;
- word alignments: the package `alignment`, units, word_links;
- the store: inputs, tags, passes, encoded, encoding, prepare, prepare_report; arrow_shard, rare_pieces, table, corpus,
  store_checks;
- modified pairs: edits, typos, modifiers, foretold_lengths, modified;
- batches: stages, batching, collate, loader.

Beside these, shortlist estimates which target pieces translate a source piece, and babel, with babel_lexicon, generates
the embedded language pair.
"""
