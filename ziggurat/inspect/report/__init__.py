"""Reports of runs: figures, and an HTML page that contains them."""
