"""From text to ids on disk to batches. Only collate.py and loader.py import torch.

Order of reading: files and folders (compressed, temporary, files, staging, workspace, checksums, folder_kinds); text
(lines, readers, clean, sides, vocabulary, segmentation, subword, subword_training); the store (inputs, passes, prepare,
arrow_shard, table, corpus, store_checks); batches (batching, collate, loader). shortlist estimates which target pieces
translate a source piece, babel generates the embedded language pair.
"""
