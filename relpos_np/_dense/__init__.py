"""The reference backend, and the dense evaluator of terms: both hold matrices of all pairs."""
