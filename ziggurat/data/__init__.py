"""From text to ids on disk to batches. Only loader.py imports torch.

Order of reading:

- text: lines, parquet, readers, vocabulary, subword, subword_training;
- cleaning: the folder `cleaning`;
- word alignments: hmm, aligner, word_links;
- the store: damage, signs, line_pairing, inputs, encoding, prepare, table, corpus, store_checks;
- modified pairs: modifiers, modified;
- batches: batching, loader.

In addition, shortlist estimates which target pieces translate a source piece, and babel generates the embedded language
pair.
"""
