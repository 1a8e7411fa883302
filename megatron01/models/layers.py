"""Modules that BERT and GPT-2 share: embedding, self-attention, MLP, transformer layer and stack.

Legend: b sequences, s positions, h hidden size, a heads, d = h / a head size, f MLP size, n positions in a cache, t
tokens that are not padding. Heads are counted from the projection's size, so a row-wise shard of the projections runs
through the same code with fewer heads.

With ``recompute_activations`` the backward pass computes activations again instead of storing them. Full recomputation
keeps the inputs of layers and runs the layer a second time (Chen et al. 2016): a third more work. Selective
recomputation (after Korthikanti et al. 2022) leaves out what is large and takes little to compute again: the outputs of
norms and of the GELU, which a linear layer would store as its input although they follow from what the norm and the
GELU store themselves, and the scores of an attention that has no fused kernel. No matrix product of a linear layer and
no communication happens twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from megatron01.config import ModelConfig
from megatron01.contrib.apex import uses_apex
from megatron01.errors import UserError

_CUDNN_SINCE = "2.11"
"""The first version of torch with whose cuDNN attention was compared with plain attention, on an H200."""


class ApexLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` that runs apex's kernels on a GPU."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., h) -> (..., h) in fp32, bf16 or fp16."""
        if not hidden.is_cuda:
            return super().forward(hidden)
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        normalized: torch.Tensor = fused_layer_norm_affine(
            hidden, self.weight, self.bias, self.normalized_shape, self.eps
        )
        return normalized


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """A norm over the hidden size. Raises UserError if ``fused_layernorm`` asks for apex, which does not work here."""
    fused = uses_apex(
        config.fused_layernorm,
        setting="fused_layernorm",
        module="apex.normalization",
        extension="fused_layer_norm_cuda",
    )
    return (ApexLayerNorm if fused else nn.LayerNorm)(config.hidden_size, eps=config.layernorm_epsilon)


class LayerCache:
    """Keys and values of one layer, in buffers of ``max_length`` positions."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = 0

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values of s new positions, each (b, a, s, d); returns all so far, each (b, a, n + s, d)."""
        if self._buffers is None:
            shape = (*key.shape[:2], self._max_length, key.shape[3])
            self._buffers = key.new_empty(shape), value.new_empty(shape)
        start, self._length = self._length, self._length + key.shape[2]
        assert self._length <= self._max_length, f"{self._length} positions in a cache of {self._max_length}"
        keys, values = self._buffers
        keys[:, :, start : self._length] = key
        values[:, :, start : self._length] = value
        return keys[:, :, : self._length], values[:, :, : self._length]


class KeyValueCache:
    """Keys and values of all layers for the n positions that a causal model has seen, for incremental decoding.

    Sequences of different lengths are padded on the left, so that all end at the same position and grow together.
    Padding is masked and has no positions: each sequence computes what it would alone.

    Args:
        max_length: positions, with padding, that the batch can grow to.
        padding: (b,) int64, the positions before each sequence that are padding.
    """

    def __init__(self, num_layers: int, max_length: int, padding: torch.Tensor) -> None:
        self.layers = [LayerCache(max_length) for _ in range(num_layers)]
        self.length = 0
        self._padding = padding

    def position_ids(self, num_new: int, num_positions: int) -> torch.Tensor:
        """(b, s) int64: the places of the next ``num_new`` tokens in their sequences, within a table of positions."""
        places = torch.arange(self.length, self.length + num_new, device=self._padding.device)
        return (places - self._padding[:, None]).clamp(0, num_positions - 1)

    def mask(self, num_new: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask of the next tokens, (b, 1, s, n + s): each sees earlier ones and itself, but no padding."""
        keys = torch.arange(self.length + num_new, device=self._padding.device)
        later = keys > keys[self.length :, None]  # (s, n + s)
        return attention_mask(later | (keys < self._padding[:, None])[:, None], dtype)


@dataclass(frozen=True)
class TokenRows:
    """Positions of the tokens of a padded batch, so that what works on single tokens leaves out the padding."""

    positions: torch.Tensor  # (t,) int64, in the batch laid out as one row of b s positions, in ascending order
    shape: tuple[int, int]  # b and s

    def pick(self, values: torch.Tensor) -> torch.Tensor:
        """(b, s, ...) -> (t, ...)."""
        return values.flatten(0, 1).index_select(0, self.positions)

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """(t, ...) -> (b, s, ...), zero where there is padding."""
        batch, seq_length = self.shape
        values = rows.new_zeros((batch * seq_length, *rows.shape[1:]))
        output: torch.Tensor = values.index_copy(0, self.positions, rows).unflatten(0, (batch, seq_length))
        return output


NormPlacement = Literal["pre", "post"]
GeluForm = Literal["none", "tanh"]  # the exact (erf) form of BERT, or GPT-2's approximation


def _table(num_rows: int, width: int) -> nn.Embedding:
    """An embedding with no values yet: drawing normal numbers on the meta device would load torch's compiler."""
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(num_rows, width), freeze=False)
    return table


class Embedding(nn.Module):
    """Sum of word, learned position and (for BERT) token-type embeddings, a norm where one is asked for, dropout."""

    def __init__(self, config: ModelConfig, *, num_rows: int, num_tokentypes: int = 0, with_norm: bool = False) -> None:
        super().__init__()
        self.word_embeddings = _table(num_rows, config.hidden_size)
        self.position_embeddings = _table(config.max_position_embeddings, config.hidden_size)
        self.tokentype_embeddings = _table(num_tokentypes, config.hidden_size) if num_tokentypes else None
        self.norm = layer_norm(config) if with_norm else None
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Embeddings (b, s, h) in the parameters' type. Raises UserError if s is above ``max_position_embeddings``.

        Args:
            tokens, types: (b, s) int32 or int64.
            position_ids: (b, s) int32 or int64; 0 .. s - 1 if None.
        """
        seq_length, num_positions = tokens.shape[1], self.position_embeddings.num_embeddings
        if seq_length > num_positions:
            raise UserError(
                f"a sequence of {seq_length} tokens is longer than max_position_embeddings {num_positions};"
                " lower --seq-length or raise --max-position-embeddings"
            )
        hidden = self.word_embeddings(tokens)  # (b, s, h)
        if position_ids is None:
            hidden = hidden + self.position_embeddings.weight[:seq_length]  # (s, h), broadcast: no look-up
        else:
            hidden = hidden + self.position_embeddings(position_ids)
        if self.tokentype_embeddings is not None:
            hidden = hidden + self.tokentype_embeddings(types)
        if self.norm is not None:
            hidden = self.norm(hidden)
        output: torch.Tensor = self.dropout(hidden)
        return output


def _allowed_kernels(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> AbstractContextManager[None]:
    """Context for attention of ``query`` to ``key``, (b, a, s, d) each, in which torch chooses among kernels.

    cuDNN's is the fastest on Hopper (``docs/models.md``), with a mask by far. It is left out where it is not
    deterministic, and with masks but for those it was tried with: it has given wrong numbers with 64 positions modulo
    128.
    """
    was_tried = mask is None or (mask.shape[2] == 1 and query.shape[2] == key.shape[2] and key.shape[2] % 128 == 0)
    is_left_out = not was_tried or torch.are_deterministic_algorithms_enabled()
    # the compiler cannot ask whether it is enabled
    if is_left_out and (torch.compiler.is_compiling() or torch.backends.cuda.cudnn_sdp_enabled()):
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return nullcontext()


class SelfAttention(nn.Module):
    """Multi-head self-attention over one fused projection, whose rows are ordered [heads, 3 (q k v), head size].

    That is Megatron's order (checkpoint version 2 and later): consecutive rows belong to one head, so a row-wise shard
    is a set of whole heads, and q, k and v are views of one tensor.
    """

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        self.causal = causal
        self.dropout_probability = config.attention_dropout
        self.is_selective = config.recompute_activations == "selective"
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: LayerCache | None = None,
        rows: TokenRows | None = None,
    ) -> torch.Tensor:
        """(b, s, h), or with ``rows`` (t, h), to the same shape. Arguments as of ``Transformer.forward``."""
        heads = self.query_key_value(hidden)  # (b, s, 3 h)
        if rows is not None:
            heads = rows.spread(heads)
        heads = heads.unflatten(-1, (-1, 3, self.head_size))  # (b, s, a, 3, d)
        # each (b, a, s, d), a view; in this order gradients are put together in the layout of the projection's output
        query, key, value = heads.unbind(3)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.append(key, value)  # of all positions so far
        attend = partial(
            F.scaled_dot_product_attention,
            attn_mask=attention_mask,
            is_causal=self.causal and attention_mask is None,
            dropout_p=self.dropout_probability if self.training else 0.0,
        )
        with _allowed_kernels(query, key, attention_mask):
            # CPUs have no fused kernel with dropout: all scores would be stored, several times
            if self.is_selective and query.is_cpu and attend.keywords["dropout_p"] > 0 and torch.is_grad_enabled():
                context = checkpoint(attend, query, key, value, use_reentrant=False)
            else:
                context = attend(query, key, value)  # (b, a, s, d)
        context = context.transpose(1, 2).flatten(2)  # (b, s, h)
        output: torch.Tensor = self.dense(context if rows is None else rows.pick(context))
        return output

    def kernel(self, batch_size: int, seq_length: int, *, masked: bool) -> str:
        """The kernel that torch takes in training: cudnn_attention, flash_attention, efficient_attention or math.

        ``masked``: with a mask of keys, (b, 1, 1, s).
        """
        weight = self.query_key_value.weight
        heads = weight.shape[0] // (3 * self.head_size)
        query = weight.new_empty((batch_size, heads, seq_length, self.head_size)).requires_grad_()
        mask = weight.new_zeros((batch_size, 1, 1, seq_length)) if masked else None
        causal = self.causal and mask is None
        with _allowed_kernels(query, query, mask):
            choice = torch._fused_sdp_choice(query, query, query, mask, self.dropout_probability, causal)
        return SDPBackend(choice).name.lower()


def computed_again(
    value: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, *, enabled: bool
) -> AbstractContextManager[Any]:
    """Context whose operations do not save ``value`` for the backward pass, which uses ``function(values)`` instead.

    No effect under torch.compile, which decides itself what it saves.

    Args:
        value: what ``function(values)`` has returned, and returns again to the bit; contiguous, and held by the caller
            until the end.
        function: without random numbers.
        values: stored for the backward pass by ``function`` itself, so that keeping it costs nothing.
        enabled: otherwise the context has no effect.
    """
    if not enabled or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    # hooks live as long as what they pack, so they must not reference the value itself
    storage, num_elements, values = value.untyped_storage()._cdata, value.numel(), values.detach()

    def pack(saved: torch.Tensor) -> torch.Tensor | Callable[[], torch.Tensor]:
        # the caller holds the value meanwhile, so that no other storage has its address
        if saved.untyped_storage()._cdata != storage or saved.numel() != num_elements or not saved.is_contiguous():
            return saved
        shape = saved.shape
        return lambda: function(values).view(shape)

    def unpack(kept: torch.Tensor | Callable[[], torch.Tensor]) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if torch.is_grad_enabled():  # by create_graph; what is computed again has no graph
            raise UserError(
                "with selective recomputation a gradient cannot be differentiated again; set recompute_activations to"
                " none or full"
            )
        return kept()

    return saved_tensors_hooks(pack, unpack)


def fusible_exact_gelu(values: torch.Tensor) -> torch.Tensor:
    """``F.gelu`` in its exact form, x P(x) with the normal distribution P, to 1e-6: half the instructions of a compiled
    erf, and one exponential for P (formula 7.1.26 of Abramowitz and Stegun) and its derivative.
    """
    wide = values.float()
    fixed = wide.detach()
    bell = torch.exp2(fixed * fixed * -0.7213475204444817)  # exp(-x^2 / 2)
    t = 1.0 / (1.0 + 0.23164190 * fixed.abs())
    series = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    tail = 0.5 * t * series * bell  # P(-|x|)
    below = torch.where(fixed < 0.0, tail, 1.0 - tail)
    # P(x) has a derivative only here, in a term that is 0
    return (wide * (below + 0.3989422804014327 * bell * (wide - fixed))).to(values.dtype)


def fusible_gelu(values: torch.Tensor) -> torch.Tensor:
    """``F.gelu`` in its tanh form, as x sigmoid(2 y) = x (1 + tanh y) / 2: half the instructions of a compiled tanh."""
    wide = values.float()
    doubled = wide * (1.5957691216057308 + 0.07135481627260025 * (wide * wide))  # 2 sqrt(2 / pi) (x + 0.044715 x^3)
    return (wide * torch.sigmoid(doubled)).to(values.dtype)


class MLP(nn.Module):
    """Two projections with a GELU between them."""

    def __init__(self, config: ModelConfig, *, gelu: GeluForm) -> None:
        super().__init__()
        self.gelu_form = gelu
        self.gelu: Callable[[torch.Tensor], torch.Tensor] = partial(F.gelu, approximate=gelu)
        self.is_selective = config.recompute_activations == "selective"
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.feed_forward_size)
        self.dense_4h_to_h = nn.Linear(config.feed_forward_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., h) -> (..., h)."""
        before = self.dense_h_to_4h(hidden)  # (..., f)
        inner = self.gelu(before)
        with computed_again(inner, self.gelu, before, enabled=self.is_selective):
            output: torch.Tensor = self.dense_4h_to_h(inner)
            return output


def _mix(words: torch.Tensor) -> torch.Tensor:
    """The permutation of 32-bit words known as lowbias32 (C. Wellons, "Prospecting for Hash Functions"), for int32."""
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B - 2**32, 15)):
        words = (words ^ ((words >> shift) & (2 ** (32 - shift) - 1))) * factor  # a logical shift; modulo 2^32
    return words ^ ((words >> 16) & 0xFFFF)


def hashed_dropout(values: torch.Tensor, probability: float, key: torch.Tensor) -> torch.Tensor:
    """``F.dropout`` whose mask is a hash of the key and each element's number.

    For compiled layers, where it is fused with the operations around it: a hash takes 23 instructions an element on a
    GPU, and torch's generator 61, more than such a kernel has time for.

    Args:
        values: any shape of fewer than 2^31 elements.
        key: int32[2], random.
    """
    numbers = torch.arange(values.numel(), dtype=torch.int32, device=values.device).view(values.shape)
    words = _mix(_mix(numbers ^ key[0]) ^ key[1])  # uniform in [-2^31, 2^31)
    is_kept = words >= int((probability - 0.5) * 2**32)
    return torch.where(is_kept, values * (1.0 / (1.0 - probability)), 0.0)


class TransformerLayer(nn.Module):
    """Attention and MLP around a residual stream, each with its norm before it (pre) or after the sum (post)."""

    def __init__(self, config: ModelConfig, *, causal: bool, gelu: GeluForm, norm_placement: NormPlacement) -> None:
        super().__init__()
        self.norm_placement = norm_placement
        self.is_selective = config.recompute_activations == "selective"
        self.attention = SelfAttention(config, causal=causal)
        self.attention_norm = layer_norm(config)
        self.mlp = MLP(config, gelu=gelu)
        self.mlp_norm = layer_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: LayerCache | None = None,
        rows: TokenRows | None = None,
        keys: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(b, s, h), or with ``rows`` (t, h), to the same shape. Arguments as of ``Transformer.forward``.

        Also returns the sum after the attention, without a gradient. An output of a compiled layer is stored; else its
        backward pass would compute that sum again, and write it in fp32 for the norm.

        ``keys``: int32[2, 2], of both dropouts if they are hashed; see ``hashed_dropout``.
        """
        drops: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (self.dropout, self.dropout)
        if keys is not None and self.dropout.training and self.dropout.p > 0:
            drops = [partial(hashed_dropout, probability=self.dropout.p, key=key) for key in keys.unbind()]
        drop_attended, drop_mlp = drops
        if self.norm_placement == "pre":
            normed = self.attention_norm(hidden)
            with computed_again(normed, self.attention_norm, hidden, enabled=self.is_selective):
                attended = self.attention(normed, attention_mask, cache, rows)
            middle = hidden + drop_attended(attended)
            normed = self.mlp_norm(middle)
            with computed_again(normed, self.mlp_norm, middle, enabled=self.is_selective):
                return middle + drop_mlp(self.mlp(normed)), middle.detach()
        middle = hidden + drop_attended(self.attention(hidden, attention_mask, cache, rows))
        hidden = self.attention_norm(middle)
        with computed_again(hidden, self.attention_norm, middle, enabled=self.is_selective):
            return self.mlp_norm(hidden + drop_mlp(self.mlp(hidden))), middle.detach()


class Transformer(nn.Module):
    """The stack of layers; the pre-norm form ends with one more norm.

    With ``recompute_activations`` full only each layer's input is kept for the backward pass, which runs the layer
    again with the same random numbers for dropout.

    Attributes:
        hashes_dropout: draw keys for the dropout of layers in training; see ``hashed_dropout``.
    """

    def __init__(self, config: ModelConfig, *, causal: bool, gelu: GeluForm, norm_placement: NormPlacement) -> None:
        super().__init__()
        if TorchVersion(torch.__version__) < _CUDNN_SINCE:
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.recomputes_layers = config.recompute_activations == "full"
        self.hashes_dropout = False
        self.layers = nn.ModuleList(
            TransformerLayer(config, causal=causal, gelu=gelu, norm_placement=norm_placement)
            for _ in range(config.num_layers)
        )
        self.final_norm = layer_norm(config) if norm_placement == "pre" else None

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: KeyValueCache | None = None,
        rows: TokenRows | None = None,
    ) -> torch.Tensor:
        """Hidden states after the last layer, in fp32, bf16 or fp16 as given.

        Args:
            hidden: (b, s, h), or with ``rows`` (t, h), as is the result.
            attention_mask: (b, 1, 1, s) or (b, 1, s, s) in the type of ``hidden``, added to the attention scores: 0
                where a query (third axis) may see a key (last axis). A causal model that is given one relies on it
                alone. None where every token, or in a causal model every earlier one, may be seen.
            cache: keys and values of the n positions before ``hidden``, which are appended. The mask's last
                axis is then n + s.
            rows: positions of ``hidden`` in the batch, if padding is left out.
        """
        keys: Sequence[torch.Tensor | None] = [None] * len(self.layers)
        if self.hashes_dropout and self.training:
            # 16 bytes a layer, the alignment that the compiler expects
            keys = torch.randint(
                -(2**31), 2**31, (len(self.layers), 2, 2), dtype=torch.int32, device=hidden.device
            ).unbind()
        for index, layer in enumerate(self.layers):
            if self.recomputes_layers and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, attention_mask, None, rows, keys[index], use_reentrant=False)[0]
            else:
                layer_cache = None if cache is None else cache.layers[index]
                hidden = layer(hidden, attention_mask, layer_cache, rows, keys[index])[0]
        return hidden if self.final_norm is None else self.final_norm(hidden)


class _LinearOfSequences(torch.autograd.Function):
    """``F.linear``, (b, s, i) to (b, s, o), for the compiler: the kernel that makes the output's gradient can add up
    the bias's, as both have the same loops over b, s and parts of ``part_size`` columns.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, part_size: int
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.part_size = part_size
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        hidden, weight = ctx.saved_tensors
        rows = gradient.flatten(0, 1)  # (b s, o)
        parts = gradient.unflatten(-1, (-1, ctx.part_size))
        of_bias = parts.sum(1, dtype=torch.promote_types(gradient.dtype, torch.float32)).sum(0).flatten()
        of_weight = rows.t() @ hidden.flatten(0, 1)
        return (rows @ weight).view_as(hidden), of_weight, of_bias.to(gradient.dtype), None


class FusibleLinear(nn.Linear):
    """``nn.Linear`` for the compiler: see ``_LinearOfSequences``.

    Attributes:
        part_size: columns of the output whose gradients are made together.
    """

    part_size: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., i) -> (..., o)."""
        if hidden.dim() != 3 or torch.is_autocast_enabled(hidden.device.type):
            return super().forward(hidden)
        output: torch.Tensor = _LinearOfSequences.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, self.bias, self.part_size
        )
        return output


def fuse_bias_gradients(layer: TransformerLayer) -> None:
    """Make a layer's linear modules ``FusibleLinear``; row-parallel ones keep the class that they have been given."""
    attention, mlp = layer.attention, layer.mlp
    for linear in (attention.query_key_value, attention.dense, mlp.dense_h_to_4h, mlp.dense_4h_to_h):
        if type(linear) is nn.Linear:
            # attention makes the gradients of each head's q, k and v
            size = 3 * attention.head_size if linear is attention.query_key_value else linear.weight.shape[0]
            fusible: Any = linear
            fusible.__class__, fusible.part_size = FusibleLinear, size


def compile_layers(
    model: nn.Module, *, backend: str | Callable[..., Any] = "inductor", hashes_dropout: bool = True
) -> bool:
    """Compile each ``TransformerLayer`` of a model in place; False if it has no layer.

    ``hashes_dropout``: see ``hashed_dropout``; not for tensor-parallel models, whose ranks draw numbers of their own.

    All layers share one compilation. A layer is the unit so that its gradients are ready after its own backward pass:
    those of a model compiled as a whole are ready only at the end, and no exchange overlaps. Parameters keep
    their names. Padding is computed too, as the number of tokens would be another shape in each batch.
    """
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    if not layers:
        return False
    if getattr(model, "leaves_out_padding", False):
        model.leaves_out_padding = False  # type: ignore[assignment]  # of Bert, a bool
    for layer in layers:
        layer.compile(backend=backend)
    for module in model.modules() if backend == "inductor" else ():  # others fuse nothing
        if isinstance(module, Transformer):
            module.hashes_dropout = hashes_dropout
        elif isinstance(module, MLP):
            module.gelu = fusible_gelu if module.gelu_form == "tanh" else fusible_exact_gelu
        elif isinstance(module, TransformerLayer):
            fuse_bias_gradients(module)
    # else DistributedDataParallel splits each layer's graph at the ends of its buckets
    torch._dynamo.config.optimize_ddp = False
    return True


def attention_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Added to attention scores, (b, 1, ...): 0, and where ``hidden``, bool (b, ...), the most negative finite number.

    Minus infinity would give NaN for a sequence of nothing but padding, which attends evenly so.
    """
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def key_mask_from_padding(padding_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask of keys, (b, 1, 1, s), from (b, s) that is nonzero where there is a token.

    Queries are not masked; what padding positions compute is never read.
    """
    return attention_mask((padding_mask == 0)[:, None], dtype)


def causal_mask_within_documents(document_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask, (b, 1, s, s), by which each position sees those up to itself in its own document.

    One per batch, shared by all layers: s^2 elements a sequence, on the device of ``document_ids``, (b, s) integers.
    """
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)
    other_document = document_ids[:, :, None] != document_ids[:, None, :]  # (b, s, s)
    return attention_mask(other_document | (positions[:, None] < positions[None, :]), dtype)
