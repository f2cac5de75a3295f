"""Autocast as explicit casts: a functionalisation mode that casts operands by a policy table.

A pre-dispatch trace sees an operator before torch's autocast does, so the casts would stay
implicit and what follows them would have the wrong dtype. `AutocastMode` sits at the same place
and casts itself. The table is torch's documented behaviour ("Autocast Op Reference" of torch.amp),
checked in tests against the operators that this build of torch registers, and against the dtypes
that eager autocast gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.compat import FunctionalTensor, FunctionalTensorMode

aten = torch.ops.aten


class Policy(NamedTuple):
    """The casts of autocast on one kind of device, by operator name ("softmax" or "softmax.int").

    lower: run in the lower precision. fp32: run in float32. fp32_dtype: the same through the
    operator's own `dtype` argument, unless the caller gave one. promote: run in the widest type
    among the operands. banned: an error. inside: composites that autocast knows nothing of, whose
    parts it casts.
    """

    lower: frozenset[str]
    fp32: frozenset[str]
    fp32_dtype: frozenset[str]
    promote: frozenset[str]
    banned: frozenset[str]
    inside: frozenset[str]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# An LSTM is one oneDNN kernel here, all of whose operands are cast. Its parts, traced below
# autograd, would be that kernel for inference, whose gradients are wrong.
_CPU = Policy(
    lower=_names(
        """
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
        _convolution.deprecated bmm mm baddbmm addmm addbmm linear matmul linalg_vecdot prelu
        scaled_dot_product_attention _native_multi_head_attention _addmm_activation
        mkldnn_rnn_layer
        lstm
        """
    ),
    fp32=_names(
        """
        avg_pool3d binary_cross_entropy grid_sampler grid_sampler_2d grid_sampler_3d
        _grid_sampler_2d_cpu_fallback polar prod quantile nanquantile stft cdist trace
        view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr
        pinverse max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d adaptive_max_pool3d
        fractional_max_pool2d fractional_max_pool3d reflection_pad1d reflection_pad2d
        replication_pad1d replication_pad2d replication_pad3d mse_loss cosine_embedding_loss
        nll_loss nll_loss2d hinge_embedding_loss poisson_nll_loss smooth_l1_loss
        cross_entropy_loss nll_loss_nd l1_loss huber_loss margin_ranking_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss ctc_loss kl_div multilabel_margin_loss
        multilabel_margin_loss_forward binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2
        fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn
        fft_hfft fft_ihfft linalg_cond linalg_matrix_rank linalg_solve linalg_cholesky
        linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv linalg_householder_product
        linalg_tensorinv linalg_tensorsolve linalg_qr linalg_cholesky_ex linalg_svd linalg_eig
        linalg_eigh linalg_lstsq linalg_inv_ex linalg_matrix_sqrth geqrf _lu_with_info qr svd
        triangular_solve fake_quantize_per_tensor_affine
        """
    ),
    fp32_dtype=frozenset(),
    promote=_names("stack cat index_copy"),
    banned=frozenset(),
    inside=_names(
        """
        einsum tensordot inner bilinear chain_matmul linalg_multi_dot gru rnn_tanh rnn_relu
        lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        """
    ),
)

_CUDA = Policy(
    lower=_names(
        """
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
        _convolution convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv
        addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul
        linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
        rnn_tanh_cell rnn_relu_cell _cudnn_rnn _scaled_dot_product_flash_attention
        scaled_dot_product_attention
        """
    ),
    # cross_entropy_loss and nll_loss_nd are not in torch's list; all of their parts are.
    fp32=_names(
        """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow
        softplus layer_norm native_layer_norm group_norm rms_norm frobenius_norm nuclear_norm
        cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
        margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp norm
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
        cross_entropy_loss nll_loss_nd linalg_matrix_sqrth
        """
    ),
    fp32_dtype=_names(
        "prod softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
    ),
    promote=_names(
        """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
        """
    ),
    banned=_names("binary_cross_entropy"),
    inside=_names("lstm gru rnn_tanh rnn_relu inner conv1d conv2d conv3d linalg_norm"),
)

# The one operator that torch versions treat differently: on CUDA, 2.11 leaves rms_norm alone.
if not compat.autocast_knows("rms_norm", "cuda"):
    _CUDA = _CUDA._replace(fp32=_CUDA.fp32 - {"rms_norm"})

POLICIES: dict[str, Policy] = {"cpu": _CPU, "cuda": _CUDA}
"""By device type."""


class Setting(NamedTuple):
    """A `torch.autocast` region: on or off, and in which lower precision."""

    enabled: bool
    dtype: torch.dtype


def ambient() -> dict[str, Setting]:
    """Autocast around the caller, for the kinds of device that have it on."""
    return {
        device: Setting(True, torch.get_autocast_dtype(device))
        for device in POLICIES
        if torch.is_autocast_enabled(device)
    }


PARTS = _names(
    """
    absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh divide fix greater greater_equal
    less less_equal multiply negative not_equal subtract true_divide
    column_stack concatenate dstack hstack row_stack vstack
    atleast_1d atleast_2d atleast_3d cartesian_prod fliplr flipud isclose meshgrid moveaxis
    ravel reshape_as sum_to_size swapaxes swapdims take_along_dim
    to.other type_as view_as
    chain_matmul cross ger inner kron tensordot trapezoid trapz
    frobenius_norm std std_mean var var_mean
    kl_div margin_ranking_loss poisson_nll_loss
    gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell
    """
)
"""Composites without a sharding rule, of parts that have one: other names, sums, joins, losses.
One of them that stayed whole would gather its operands, and could not be cut into micro-batches."""


class AutocastMode(FunctionalTensorMode):
    """Pre-dispatch functionalisation that also applies autocast, as a stack of settings.

    An operator of `PARTS` is recorded as what it is made of.

    settings: what is on at the start, by device type. `parameters` are the ids of inputs whose
    lower-precision copy is made once a region, as eager's cache does (the gradient of every use is
    then summed in the lower precision, before the cast's backward).
    """

    def __init__(self, settings: dict[str, Setting]) -> None:
        super().__init__(pre_dispatch=True, export=True)
        self.parameters: frozenset[int] = frozenset()
        self._settings = dict(settings)
        self._stack: list[dict[str, Setting]] = []
        self._cache: dict[tuple[int, torch.dtype], Any] = {}

    def enter_region(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        """Enter `torch.autocast(device_type, dtype, enabled)`."""
        self._stack.append(self._settings)
        lower = dtype or torch.get_autocast_dtype(device_type)
        self._settings = {**self._settings, device_type: Setting(enabled, lower)}

    def leave_region(self) -> None:
        """Leave the region entered last; the copies of parameters end with the outermost."""
        self._settings = self._stack.pop()
        if not self._stack and not self.settings:
            self._cache.clear()

    @property
    def settings(self) -> dict[str, Setting]:
        """The autocast that is on, by device type."""
        return {device: s for device, s in self._settings.items() if s.enabled}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and func.namespace == "aten":
            for device, setting in self._settings.items():
                policy = POLICIES.get(device)
                if setting.enabled and policy is not None:
                    names = (func.overloadpacket.__name__, _short_name(func))
                    if any(name in group for group in policy[:5] for name in names):
                        args, kwargs = self._cast(func, names, device, args, kwargs)
                        with self._off():
                            return self._recorded(func, types, args, kwargs)
                    if names[0] in policy.inside and _on(device, args, kwargs):
                        with self:
                            return func.decompose(*args, **kwargs)
        return self._recorded(func, types, args, kwargs)

    def _recorded(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if getattr(func, "namespace", "") == "aten" and (
            func.overloadpacket.__name__ in PARTS or _short_name(func) in PARTS
        ):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:  # some overloads are operators of their own
                return found
        if func is aten.dropout.default:
            x, p, training = args
            if p == 0 or not training:  # its operand itself, which a write in place would reach
                return x
            # a trace for export freezes what dropout gives: the copy may be written in place
            given = super().__torch_dispatch__(func, types, args, kwargs)
            return super().__torch_dispatch__(aten.clone.default, types, (given,), {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _cast(
        self, func: OpOverload, names: tuple[str, str], device: str, args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        policy, lower = POLICIES[device], self._settings[device].dtype

        def among(group: frozenset[str]) -> bool:
            return any(name in group for name in names)

        eligible = [
            leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if _eligible(leaf, device)
        ]
        if not eligible:
            return args, kwargs
        if among(policy.banned):
            raise RuntimeError(
                f"{func} is unsafe to autocast; use the variant with logits "
                "(binary_cross_entropy_with_logits), or leave autocast for it"
            )
        if among(policy.fp32_dtype):
            return _with_dtype(func, args, kwargs)
        target = torch.float32
        if among(policy.lower):
            target = lower
        elif among(policy.promote) and all(leaf.dtype is lower for leaf in eligible):
            target = lower

        def cast(leaf: Any) -> Any:
            if not _eligible(leaf, device) or leaf.dtype is target:
                return leaf
            if id(leaf) not in self.parameters or target is torch.float32:
                return self._to(leaf, target)
            key = (id(leaf), target)
            if key not in self._cache:
                self._cache[key] = self._to(leaf, target)
            return self._cache[key]

        args, kwargs = pytree.tree_map(cast, (args, kwargs))
        return args, kwargs

    def _to(self, x: Any, dtype: torch.dtype) -> Any:
        # `x.to(dtype)` looks for this mode on the stack, from which it is absent while it runs.
        return super().__torch_dispatch__(
            aten._to_copy.default, (FunctionalTensor,), (x,), {"dtype": dtype}
        )

    @contextmanager
    def _off(self) -> Iterator[None]:
        saved, self._settings = self._settings, {}
        try:
            yield
        finally:
            self._settings = saved

    def wrap_subgraph(self, body: fx.GraphModule) -> fx.GraphModule:
        """`body` entering by itself the autocast that is on, for a subgraph run elsewhere."""
        if not self.settings:
            return body
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        entered: list[fx.Node] = []
        for node in body.graph.nodes:
            if node.op != "placeholder" and not entered:
                for device, setting in self.settings.items():
                    entry = (device, setting.dtype, True, None)
                    entered.append(graph.call_function(compat.ENTER_AUTOCAST, entry))
            if node.op == "output":
                for region in reversed(entered):
                    graph.call_function(compat.EXIT_AUTOCAST, (region,))
            env[node] = graph.node_copy(node, env.__getitem__)
        wrapped = fx.GraphModule(body, graph)
        wrapped.meta.update(body.meta)
        return wrapped


def _short_name(func: OpOverload) -> str:
    name = func._schema.name.removeprefix("aten::")
    overload = func._schema.overload_name
    return f"{name}.{overload}" if overload else name


def _eligible(leaf: Any, device: str) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.is_floating_point()
        and leaf.dtype is not torch.float64
        and leaf.device.type == device
    )


def _on(device: str, args: Any, kwargs: Any) -> bool:
    return any(_eligible(leaf, device) for leaf in pytree.arg_tree_leaves(*args, **kwargs))


def _with_dtype(func: OpOverload, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The call with `dtype=float32`, unless it has a dtype."""
    names = [argument.name for argument in func._schema.arguments]
    position = names.index("dtype")
    if {**dict(zip(names, args)), **kwargs}.get("dtype") is not None:
        return args, kwargs
    if position < len(args):
        return (*args[:position], torch.float32, *args[position + 1 :]), kwargs
    return args, {**kwargs, "dtype": torch.float32}
