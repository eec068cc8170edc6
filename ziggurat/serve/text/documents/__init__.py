"""Documents: files of known kinds, whose text is translated and whose other bytes stay as they are."""
