"""What goes on inside a model: measures of its states."""
