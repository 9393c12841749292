"""Baselines: the libraries that a user would pick instead, wrapped as Kernels."""
