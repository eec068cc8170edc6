"""Word alignment of parallel text: words, IBM Model 1, a hidden Markov model, symmetrisation, and the error rate."""
