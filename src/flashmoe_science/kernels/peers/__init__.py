"""What a user would pick instead, wrapped as Kernels. Importing this imports no peer: each is imported when it first runs."""

from flashmoe_science.kernels.kernel import Kernel
from flashmoe_science.kernels.peers import fa3, fa4, flex, sdpa

PEERS: tuple[Kernel, ...] = (*sdpa.KERNELS, fa3.KERNEL, fa4.KERNEL, flex.KERNEL)
