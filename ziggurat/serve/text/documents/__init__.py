"""Documents: files of known kinds whose text is translated and whose other bytes are preserved."""
