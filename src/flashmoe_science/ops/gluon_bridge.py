"""The Gluon calls that changed between Triton 3.6 and 3.9, under one name each."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import tma

# Renamed in 3.8; in 3.9 the old names still exist and raise, so the new ones are looked for first.
if hasattr(tma, "async_load"):
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
