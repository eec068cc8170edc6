"""Text in the forms that users have it, around a translator of sentences: plain text, markup and documents."""
