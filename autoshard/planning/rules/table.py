"""The sharding rules of ATen operators, as data; rules/language.py defines their text.

Elementwise operators need no line here (they have torch.Tag.pointwise); those listed are linear
in some operand, so that a partial sum passes through them, or lack the tag.
"""

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


def _aten(names: str, entry: RuleEntry) -> dict[str, RuleEntry]:
    """One entry for several operators of aten."""
    return {f"aten.{name}": entry for name in names.split()}


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
    **_aten("add.Tensor sub.Tensor rsub.Tensor", SUM),
    **_aten("mul.Scalar div.Scalar neg positive clone contiguous alias detach", LINEAR),
    **_aten("lift_fresh_copy _to_copy", LINEAR),
    **_aten("to.dtype to.device to.dtype_layout to.prim_Device to.prim_dtype", LINEAR),
    "aten.mul.Tensor": "* ..., * ... -> ...",
    **_aten("div.Tensor true_divide.Tensor expand_as", "* ..., ... -> ..."),
    "aten.copy": "..., * ... -> ...",
    "aten.where.self": "..., + ..., + ... -> ...",
    "aten.where.ScalarOther": when_zero("other", "..., * ... -> ...", "..., ... -> ..."),
    "aten.where.ScalarSelf": when_zero("self", "..., * ... -> ...", "..., ... -> ..."),
    "aten.masked_fill.Scalar": when_zero("value", "* ..., ... -> ...", "..., ... -> ..."),
    "aten.masked_fill.Tensor": "+ ..., ..., + -> ...",
    # reached only while they draw nothing (evaluation, p = 0); see passes/invariant_random.py
    **_aten("dropout alpha_dropout feature_dropout feature_alpha_dropout", LINEAR),
    "aten.native_dropout": "... -> ..., ...",
    "aten.prelu": ("b c ..., c -> b c ...", "..., -> ..."),
    "aten.fill.Tensor": "..., -> ...",
    **_aten("log_sigmoid hardswish relu6 selu zeros_like ones_like full_like", "... -> ..."),
    **_aten("fill.Scalar where.Scalar", "... -> ..."),
    **_aten("floor_divide max.other min.other", "..., ... -> ..."),
    **_aten("__and__.Tensor __or__.Tensor __xor__.Tensor", "..., ... -> ..."),
}

VIEWS: dict[str, RuleEntry] = {
    **_aten(
        "reshape view _unsafe_view view_copy flatten unflatten unsqueeze",
        (along(views.reshaped), views.unfolded),
    ),
    # of another dtype: bits do not add up as numbers do, and the last dim may change its size
    **_aten("view.dtype view_copy.dtype", along(except_last(1), linear=False)),
    "aten.squeeze": along(views.squeezed),
    "aten.expand": views.expanded,
    "aten.transpose": along(views.permuted(views.swapped("dim0", "dim1"))),
    "aten.t": along(views.permuted(views.swapped(0, -1))),
    "aten.numpy_T": along(views.permuted(lambda call, rank: range(rank - 1, -1, -1))),
    **_aten("mT adjoint", along(views.permuted(views.swapped(-2, -1)))),
    "aten.permute": along(views.permuted(lambda call, rank: call.dims("dims", rank))),
    "aten.movedim": along(views.permuted(views.by_movedim)),
    **_aten("select unbind", along(dropping)),
    **_aten("slice.Tensor narrow", along(views.sliced)),
    **_aten(
        "split split_with_sizes chunk unsafe_split unsafe_split_with_sizes unsafe_chunk "
        "tensor_split.sections tensor_split.indices",
        (along(except_dims()), views.split),
    ),
    "aten.unfold": along(except_dims("dimension")),
    **_aten("roll flip", along(except_dims("dims"))),
    "aten.diagonal": along(views.diagonalised),
    **_aten("tril triu", along(except_last(2))),
    "aten.repeat": views.repeated,
    "aten.tile": along(views.repeated_once),
    "aten.repeat_interleave.self_int": along(views.repeat_interleaved),
    **_aten("constant_pad_nd pad", views.padding),
    **_aten("cat concat", views.joined),
    "aten.stack": views.joined,
}

REDUCTIONS: dict[str, RuleEntry] = {
    "aten.sum": reductions.summed,
    "aten.mean": reductions.averaged,
    **_aten(
        "amax amin max.dim min.dim argmax argmin any.dim any.dims all.dim all.dims prod.dim_int "
        "linalg_vector_norm norm.ScalarOpt_dim var.dim std.dim var.correction std.correction "
        "var_mean.correction median.dim",
        along(reducing(), linear=False),
    ),
    "aten.cumsum": along(except_dims()),
    **_aten(
        "cumprod logcumsumexp sort sort.stable argsort argsort.stable topk _softmax _log_softmax",
        along(except_dims(), linear=False),
    ),
    "aten.glu": (along(except_dims(), linear=False), views.split),
    "aten.logsumexp": reductions.logsumexp,
    "aten.softmax.int": reductions.normalized_over(operators.softmax),
    "aten.log_softmax.int": reductions.normalized_over(operators.log_softmax),
    "aten.one_hot": along(views.classes_known),
}

INDEXING: dict[str, RuleEntry] = {
    "aten.embedding": indexing.looked_up,
    "aten.gather": indexing.gathered,
    **_aten("scatter.src scatter.value scatter_add", indexing.scattered),
    "aten.index_select": indexing.index_selected,
    "aten.index_add": indexing.index_added,
    "aten.index_copy": indexing.index_written,
    **_aten("select_scatter slice_scatter", indexing.part_written),
    "aten.index.Tensor": indexing.advanced_indexed,
    "aten.index_put": indexing.advanced_written,
    **_aten("new_zeros new_ones new_full", indexing.metadata_read),
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
    **_aten(
        "conv_transpose1d conv_transpose2d.input conv_transpose3d.input",
        layers.convolved("* b i X..., * i o K..., + o -> b o Y..."),
    ),
    **_aten("lstm.input gru.input rnn_tanh.input rnn_relu.input", layers.recurrent),
    **{f"aten.max_pool{k}d": along(except_last(k), linear=False) for k in (1, 2, 3)},
    **{
        f"aten.{kind}{k}d": along(except_last(k))
        for kind in ("avg_pool", "adaptive_avg_pool", "upsample_nearest", "_upsample_nearest_exact")
        for k in (1, 2, 3)
    },
    "aten.upsample_linear1d": along(except_last(1)),
    "aten.im2col": along(except_last(3)),
    "aten.col2im": along(except_last(2)),
    **_aten(
        "upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa",
        along(except_last(2)),
    ),
    "aten.upsample_trilinear3d": along(except_last(3)),
    "aten.grid_sampler": ("* b c Y X, b y x D -> b c y x", "* b c Z Y X, b z y x D -> b c z y x"),
}

LOSSES: dict[str, RuleEntry] = {
    "aten.cross_entropy_loss": reductions.classified(vocab_parallel_cross_entropy, I),
    **_aten("nll_loss nll_loss_nd", reductions.classified(vocab_parallel_nll, P)),
    **_aten("mse_loss l1_loss smooth_l1_loss huber_loss", reductions.elementwise_loss),
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
