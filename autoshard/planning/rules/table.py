"""The sharding rules of ATen operators, as data; rules/language.py defines their text.

Elementwise operators need no line here (they have torch.Tag.pointwise); those listed are linear
in some operand, so that a partial sum passes through them, or lack the tag.
"""

from __future__ import annotations

from autoshard.planning.rules import (
    indexing,
    layers,
    products,
    reductions,
    views,
)
from autoshard.planning.rules.call import Rule
from autoshard.planning.rules.language import when_zero
from autoshard.planning.rules.views import along, dropping, except_dims, except_last, reducing
from autoshard.runtime import operators
from autoshard.runtime.collectives import I, P
from autoshard.runtime.operators import vocab_parallel_cross_entropy, vocab_parallel_nll

RuleEntry = str | Rule | tuple[str | Rule, ...]

LINEAR = "* ... -> ..."
SUM = "+ ..., + ... -> ..."

MATRICES: dict[str, RuleEntry] = {
    "aten.linear": "* ... k, * n k, + n -> ... n",
    "aten.mm": "* m k, * k n -> m n",
    "aten.bmm": "* b m k, * b k n -> b m n",
    "aten.mv": "* m k, * k -> m",
    "aten.dot": "* k, * k -> ",
    "aten.outer": "* m, * n -> m n",
    "aten.addmm": (
        "+ m n, * m k, * k n -> m n",
        "+ n, * m k, * k n -> m n",
        "+ , * m k, * k n -> m n",
    ),
    "aten.addmv": "+ m, * m k, * k -> m",
    "aten.baddbmm": (
        "+ b m n, * b m k, * b k n -> b m n",
        "+ m n, * b m k, * b k n -> b m n",
        "+ n, * b m k, * b k n -> b m n",
        "+ , * b m k, * b k n -> b m n",
    ),
    "aten.matmul": (
        "* ... m k, * ... k n -> ... m n",
        "* k, * ... k n -> ... n",
        "* ... m k, * k -> ... m",
        "* k, * k -> ",
    ),
    "aten.einsum": products.einsum,
    "aten.linalg_solve_triangular": "... N M, * ... P Q -> ... P Q",
    "aten.bilinear": "* ... i, * ... j, * o i j, + o -> ... o",
    # rows of the first operand belong to experts by their position: they stay whole
    "aten._grouped_mm": "* T k, * E k n, E, + n -> T n",
    "transformers.grouped_mm_fallback": "* T k, * E k n, E -> T n",
}

ELEMENTWISE: dict[str, RuleEntry] = {
    "aten.add.Tensor": SUM,
    "aten.sub.Tensor": SUM,
    "aten.rsub.Tensor": SUM,
    "aten.mul.Tensor": "* ..., * ... -> ...",
    "aten.mul.Scalar": LINEAR,
    "aten.div.Tensor": "* ..., ... -> ...",
    "aten.div.Scalar": LINEAR,
    "aten.true_divide.Tensor": "* ..., ... -> ...",
    "aten.neg": LINEAR,
    "aten.positive": LINEAR,
    "aten.clone": LINEAR,
    "aten.contiguous": LINEAR,
    "aten.alias": LINEAR,
    "aten.detach": LINEAR,
    "aten.lift_fresh_copy": LINEAR,
    "aten.expand_as": "* ..., ... -> ...",
    "aten._to_copy": LINEAR,
    "aten.to.dtype": LINEAR,
    "aten.to.device": LINEAR,
    "aten.to.dtype_layout": LINEAR,
    "aten.to.prim_Device": LINEAR,
    "aten.to.prim_dtype": LINEAR,
    "aten.type_as": "* ..., _ -> ...",
    "aten.to.other": "* ..., _ -> ...",
    "aten.copy": "..., * ... -> ...",
    "aten.where.self": "..., + ..., + ... -> ...",
    "aten.where.ScalarOther": when_zero("other", "..., * ... -> ...", "..., ... -> ..."),
    "aten.where.ScalarSelf": when_zero("self", "..., * ... -> ...", "..., ... -> ..."),
    "aten.where.Scalar": "... -> ...",
    "aten.masked_fill.Scalar": when_zero("value", "* ..., ... -> ...", "..., ... -> ..."),
    "aten.masked_fill.Tensor": "+ ..., ..., + -> ...",
    # reached only while they draw nothing (evaluation, p = 0); see passes/invariant_random.py
    "aten.dropout": LINEAR,
    "aten.native_dropout": "... -> ..., ...",
    "aten.alpha_dropout": LINEAR,
    "aten.feature_dropout": LINEAR,
    "aten.feature_alpha_dropout": LINEAR,
    "aten.log_sigmoid": "... -> ...",
    "aten.hardswish": "... -> ...",
    "aten.relu6": "... -> ...",
    "aten.selu": "... -> ...",
    "aten.floor_divide": "..., ... -> ...",
    "aten.prelu": ("b c ..., c -> b c ...", "..., -> ..."),
    "aten.zeros_like": "... -> ...",
    "aten.ones_like": "... -> ...",
    "aten.full_like": "... -> ...",
    "aten.fill.Scalar": "... -> ...",
    "aten.fill.Tensor": "..., -> ...",
    **{f"aten.__{name}__.Tensor": "..., ... -> ..." for name in ("and", "or", "xor")},
    "aten.max.other": "..., ... -> ...",
    "aten.min.other": "..., ... -> ...",
}

VIEWS: dict[str, RuleEntry] = {
    **dict.fromkeys(
        [
            "aten.reshape",
            "aten.view",
            "aten._unsafe_view",
            "aten.view_copy",
            "aten.flatten",
            "aten.unflatten",
            "aten.unsqueeze",
        ],
        (along(views.reshaped), views.unfolded),
    ),
    # of another dtype: bits do not add up as numbers do, and the last dim may change its size
    "aten.view.dtype": along(except_last(1), linear=False),
    "aten.view_copy.dtype": along(except_last(1), linear=False),
    "aten.squeeze": along(views.squeezed),
    "aten.expand": views.expanded,
    "aten.transpose": along(views.permuted(views.swapped("dim0", "dim1"))),
    "aten.t": along(views.permuted(views.swapped(0, -1))),
    "aten.numpy_T": along(views.permuted(lambda call, rank: range(rank - 1, -1, -1))),
    "aten.mT": along(views.permuted(views.swapped(-2, -1))),
    "aten.adjoint": along(views.permuted(views.swapped(-2, -1))),
    "aten.permute": along(views.permuted(views.by_dims)),
    "aten.movedim": along(views.permuted(views.by_movedim)),
    "aten.select": along(dropping),
    "aten.unbind": along(dropping),
    "aten.slice.Tensor": along(views.sliced),
    "aten.narrow": along(views.sliced),
    **dict.fromkeys(
        [
            "aten.split",
            "aten.split_with_sizes",
            "aten.chunk",
            "aten.unsafe_split",
            "aten.unsafe_split_with_sizes",
            "aten.unsafe_chunk",
            "aten.tensor_split.sections",
            "aten.tensor_split.indices",
        ],
        (along(except_dims()), views.split),
    ),
    "aten.unfold": along(except_dims("dimension")),
    "aten.roll": along(except_dims("dims")),
    "aten.flip": along(except_dims("dims")),
    "aten.diagonal": along(views.diagonalised),
    "aten.tril": along(except_last(2)),
    "aten.triu": along(except_last(2)),
    "aten.repeat": along(views.repeated),
    "aten.tile": along(views.repeated),
    "aten.repeat_interleave.self_int": along(views.repeat_interleaved),
    "aten.constant_pad_nd": views.padding,
    "aten.pad": views.padding,
    "aten.cat": views.concatenated,
    "aten.concat": views.concatenated,
    "aten.stack": views.stacked,
}

REDUCTIONS: dict[str, RuleEntry] = {
    "aten.sum": reductions.summed,
    "aten.mean": reductions.averaged,
    **dict.fromkeys(
        [
            "aten.amax",
            "aten.amin",
            "aten.max.dim",
            "aten.min.dim",
            "aten.argmax",
            "aten.argmin",
            "aten.any.dim",
            "aten.any.dims",
            "aten.all.dim",
            "aten.all.dims",
            "aten.prod.dim_int",
            "aten.linalg_vector_norm",
            "aten.norm.ScalarOpt_dim",
            "aten.var.dim",
            "aten.std.dim",
            "aten.var.correction",
            "aten.std.correction",
            "aten.var_mean.correction",
            "aten.median.dim",
        ],
        along(reducing(), linear=False),
    ),
    "aten.cumsum": along(except_dims()),
    **dict.fromkeys(
        [
            "aten.cumprod",
            "aten.logcumsumexp",
            "aten.sort",
            "aten.sort.stable",
            "aten.argsort",
            "aten.argsort.stable",
            "aten.topk",
            "aten._softmax",
            "aten._log_softmax",
        ],
        along(except_dims(), linear=False),
    ),
    "aten.glu": (along(except_dims(), linear=False), views.gated),
    "aten.logsumexp": reductions.logsumexp,
    "aten.softmax.int": reductions.normalized_over(operators.softmax),
    "aten.log_softmax.int": reductions.normalized_over(operators.log_softmax),
    "aten.one_hot": along(views.classes_known),
}

INDEXING: dict[str, RuleEntry] = {
    "aten.embedding": indexing.looked_up,
    "aten.gather": indexing.gathered,
    "aten.scatter.src": indexing.scattered,
    "aten.scatter.value": indexing.scattered,
    "aten.scatter_add": indexing.scattered,
    "aten.index_select": indexing.index_selected,
    "aten.index_add": indexing.index_added,
    "aten.index_copy": indexing.index_written,
    "aten.select_scatter": indexing.part_written,
    "aten.slice_scatter": indexing.part_written,
    "aten.index.Tensor": indexing.advanced_indexed,
    "aten.index_put": indexing.advanced_written,
    "aten.new_zeros": indexing.metadata_read,
    "aten.new_ones": indexing.metadata_read,
    "aten.new_full": indexing.metadata_read,
}

LAYERS: dict[str, RuleEntry] = {
    "aten.scaled_dot_product_attention": layers.attention,
    "autoshard.masked_attention": layers.masked_attention,
    "autoshard.experts": products.mixture,
    "autoshard.float8_linear": products.float8_linear,
    "aten.layer_norm": layers.layer_normalized("... {D}, {D}, {D} -> ... {D}"),
    "aten.native_layer_norm": layers.layer_normalized(
        "... {D}, {D}, {D} -> ... {D}, ... {A}, ... {A}"
    ),
    "aten.rms_norm": layers.layer_normalized("... {D}, {D} -> ... {D}"),
    "aten._fused_rms_norm": layers.layer_normalized("... {D}, {D} -> ... {D}, ... {A}"),
    "aten.group_norm": layers.group_normalized,
    "aten.batch_norm": layers.batch_normalized,
    "aten._native_batch_norm_legit_functional": layers.batch_normalized_functional,
    "aten.instance_norm": layers.instance_normalized,
    "aten.conv1d": layers.convolved("* b i X, * o i K, + o -> b o Y", "* i X, * o i K, + o -> o Y"),
    "aten.conv2d": layers.convolved(
        "* b i X Y, * o i K L, + o -> b o P Q", "* i X Y, * o i K L, + o -> o P Q"
    ),
    "aten.conv3d": layers.convolved(
        "* b i X Y Z, * o i K L M, + o -> b o P Q R", "* i X Y Z, * o i K L M, + o -> o P Q R"
    ),
    **dict.fromkeys(
        ["aten.conv_transpose1d", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"],
        layers.convolved("* b i X..., * i o K..., + o -> b o Y..."),
    ),
    "aten.lstm.input": layers.recurrent,
    "aten.gru.input": layers.recurrent,
    "aten.rnn_tanh.input": layers.recurrent,
    "aten.rnn_relu.input": layers.recurrent,
    **{f"aten.max_pool{k}d": along(except_last(k), linear=False) for k in (1, 2, 3)},
    **{f"aten.avg_pool{k}d": along(except_last(k)) for k in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{k}d": along(except_last(k)) for k in (1, 2, 3)},
    **{
        f"aten.{kind}{k}d": along(except_last(k))
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
        for k in (1, 2, 3)
    },
    "aten.upsample_linear1d": along(except_last(1)),
    **dict.fromkeys(
        [
            *("aten.upsample_bilinear2d", "aten._upsample_bilinear2d_aa"),
            *("aten.upsample_bicubic2d", "aten._upsample_bicubic2d_aa"),
        ],
        along(except_last(2)),
    ),
    "aten.upsample_trilinear3d": along(except_last(3)),
    "aten.grid_sampler": ("* b c Y X, b y x D -> b c y x", "* b c Z Y X, b z y x D -> b c z y x"),
}

LOSSES: dict[str, RuleEntry] = {
    "aten.cross_entropy_loss": reductions.classified(vocab_parallel_cross_entropy, I),
    "aten.nll_loss": reductions.classified(vocab_parallel_nll, P),
    "aten.nll_loss_nd": reductions.classified(vocab_parallel_nll, P),
    "aten.mse_loss": reductions.elementwise_loss,
    "aten.l1_loss": reductions.elementwise_loss,
    "aten.smooth_l1_loss": reductions.elementwise_loss,
    "aten.huber_loss": reductions.elementwise_loss,
}

RULES: dict[str, RuleEntry] = {
    **MATRICES,
    **ELEMENTWISE,
    **VIEWS,
    **REDUCTIONS,
    **INDEXING,
    **LAYERS,
    **LOSSES,
    **layers.RANDOM_RULES,
}
