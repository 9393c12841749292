"""Kernels that a user brought, put on trial: each in a process of its own, its answers and its times held to what is right."""
