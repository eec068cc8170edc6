"""What training will cost, before it is begun: arithmetic, memory and time of an update."""
