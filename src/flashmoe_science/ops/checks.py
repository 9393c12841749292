"""Checks that operations share. A refusal is one line: the argument, what it was, what is allowed."""

from __future__ import annotations

import os

import torch

from flashmoe_science.printable import shown

CHECK = os.environ.get("FLASHMOE_CHECK") == "1"  # whether values on a GPU are looked at, which waits for it


def checked_tensor(name: str, tensor: object) -> torch.Tensor:
    """The tensor. Raises TypeError: not a tensor. Raises ValueError: a layout that is not dense."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name} is a {kind} tensor; it must be dense (torch.strided)")
    return tensor


def check_device(name: str, tensor: torch.Tensor, first: str, like: torch.Tensor) -> None:
    """Raise ValueError unless the tensor is on the device of ``like``, the argument ``first``."""
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device} and {first} on {like.device}; they must be on the same device")


def check_count(value: object, name: str, least: int) -> None:
    """Raise unless ``value`` is an integer of at least ``least``. Raises TypeError: not an integer. Raises ValueError: below
    ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name} is {shown(value)}; it must be an integer")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def check_kernel(name: object) -> None:
    """Raise TypeError unless ``name`` is a string."""
    if not isinstance(name, str):
        raise TypeError(f"kernel is {shown(name)}; it must be a string or None")


def check_flag(value: object, name: str) -> None:
    """Raise TypeError unless ``value`` is True or False: a word such as "no" would be taken for true."""
    if value is not True and value is not False:
        raise TypeError(f"{name} is {shown(value)}; it must be True or False")
