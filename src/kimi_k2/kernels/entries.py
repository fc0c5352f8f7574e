"""Every kernel's place in the table of operations: `ops.registry` imports this module on the first CUDA tensor.

The order of an operation's entries is the order of preference: that of these imports, but where an entry says what it
comes before.
"""

from kimi_k2.kernels.attention import entries as attention
from kimi_k2.kernels.comm import entries as comm
from kimi_k2.kernels.experts import entries as experts
from kimi_k2.kernels.linear import entries as linear
from kimi_k2.kernels.router import entries as router
from kimi_k2.kernels.rowwise import entries as rowwise
from kimi_k2.kernels.vision import entries as vision

__all__ = ["attention", "comm", "experts", "linear", "router", "rowwise", "vision"]
