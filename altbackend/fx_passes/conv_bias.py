"""A convolution's bias as an addition of its own: on a GPU the library adds it in a pass over memory, a kernel of ours
does it together with the activation that follows.
"""

from __future__ import annotations

from torch.fx import GraphModule

from .graph import aten, insert, is_call, val


def run(gm: GraphModule) -> int:
    """Split the biases off; gives their number."""
    count = 0
    for n in list(gm.graph.nodes):
        if not is_call(n, aten.convolution.default) or n.args[2] is None:
            continue
        bias = n.args[2]
        n.update_arg(2, None)
        following = n.next
        shape = [1, -1] + [1] * (val(n).dim() - 2)
        wide = insert(gm.graph, following, aten.view.default, (bias, shape))
        total = insert(gm.graph, following, aten.add.Tensor, (n, wide))
        n.replace_all_uses_with(total, delete_user_cb=lambda u, t=total: u is not t)
        count += 1
    return count
