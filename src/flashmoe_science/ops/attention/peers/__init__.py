"""What a user would pick instead, wrapped as Kernels. Importing this imports no peer: each is imported when it first runs."""
