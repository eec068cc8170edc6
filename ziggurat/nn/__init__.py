"""Building blocks of models. Modules take numbers and makers, never configuration objects."""
