"""Models handed to other toolkits, checked against the original, and theirs taken in."""
