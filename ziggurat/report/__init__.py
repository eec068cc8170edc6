"""What runs look like to people: figures, and one page that holds them."""
