"""`flashmla` in CUDA C++."""

IMPLEMENTATIONS = ()
