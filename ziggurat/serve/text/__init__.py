"""Text in the forms that users have (plain text, markup, documents), translated by a translator of sentences."""
