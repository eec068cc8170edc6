"""From text to ids on disk to batches. Only collate.py and loader.py import torch.

Order of reading:

- files and folders: compressed, temporary, files, staging, workspace, checksums, folder_kinds, origins;
- text: lines, parquet, readers, score_files, sides, vocabulary, segmentation, subword, subword_training;
- cleaning: clean (predicates of a pair alone), cleaner (which applies them), comparisons, sampling;
- word alignments: units, word_links;
- the store: inputs, tags, passes, encoded, encoding, prepare, prepare_report; arrow_shard, rare_pieces, table, corpus,
  store_checks;
- modified pairs: edits, typos, modifiers, foretold_lengths, modified;
- batches: stages, batching, collate, loader.

Beside these, shortlist estimates which target pieces translate a source piece, perturbations disturbs test sets, and
babel, with babel_lexicon, generates the embedded language pair.
"""
