"""What must be the same on every rank is compared: all ranks raise alike, and none waits for one that has raised."""

from __future__ import annotations

import torch.distributed as dist


def agree(group: dist.ProcessGroup, facts: dict[str, object], refused: Exception | None) -> None:
    """Raise what this rank refuses, or ValueError where another rank refuses or has other facts. Every rank calls it.

    Args:
        facts: by name.
        refused: what this rank would raise.
    """
    everyone: list[tuple[dict[str, object], str]] = [(facts, "")] * group.size()
    dist.all_gather_object(everyone, (facts, str(refused or "")), group=group)
    if refused is not None:
        raise refused
    for rank, (theirs, refusal) in enumerate(everyone):
        if refusal:
            raise ValueError(f"rank {rank} of the group refuses the call: {refusal}")
        for name, value in theirs.items():
            if value != everyone[0][0].get(name):
                given = f"{name} is {value} on rank {rank} of the group and {everyone[0][0].get(name)} on rank 0"
                raise ValueError(f"{given}; it must be the same on every rank")
