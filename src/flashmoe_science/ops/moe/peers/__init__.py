"""What a user would pick instead, wrapped as Kernels."""
