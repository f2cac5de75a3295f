"""What is said where `loss_tokens="global"` finds no mean to weigh."""

from __future__ import annotations

import warnings

from torch import fx

from autoshard.runtime.graph_meta import DIFF


def warn_of_no_mean(serial: fx.GraphModule) -> None:
    """Warn of a training graph without a mean loss; one that does not train has none to weigh."""
    if any(node.meta.get(DIFF) for node in serial.graph.output_node().all_input_nodes):
        warnings.warn(
            'loss_tokens="global" found no mean loss in the graph: compute it in the '
            "compiled model, or weigh its tokens there (docs/losses.md)",
            stacklevel=2,
        )
