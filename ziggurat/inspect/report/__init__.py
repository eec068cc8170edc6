"""Reports of runs: figures, and one HTML page that holds them."""
