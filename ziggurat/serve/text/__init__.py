"""Text as people have it, around a translator of sentences: plain text, markup and documents."""
