"""All layers of a CPU step in one call of the C++ kernels (ops/cpp/stack.cpp), without the interpreter lock.

It calls the same kernels in the same order as `Decoder.run_layers`, so results are bit-equal. A model with a part that
has no C++ version (experts, another kind of linear, no compiler) has no native stack. If embedding and LM head are one
native matrix, a step can run from the request table (ops/cpp/step.cpp): `forward` computes hidden states, `draw` draws
tokens from them, and `step` does both.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from millrace.models.adapters.slots import AdapterSlots
from millrace.models.angles import Angles
from millrace.models.batch import ForwardBatch
from millrace.models.layers import DecoderLayer, DenseMlp
from millrace.models.mixers.attention import AttentionMixer
from millrace.models.spec.model_spec import LayerSpec, ModelSpec
from millrace.ops.attention.qkv import NativePrepareQkv
from millrace.ops.attention.rows import plain_rows
from millrace.ops.base.version import Choice
from millrace.ops.cpp.native import DTYPES, KV_DTYPES, native
from millrace.ops.elementwise.activation import ACTIVATION_CODES
from millrace.ops.linear.dense import Linear, NativeParts
from millrace.ops.linear.gated import ComposedGatedLinear

NEEDED = (
    *("rms_norm", "add_rms_norm", "gated", "attention", "qkv"),
    *("qkv_linear", "out_linear", "gate_up_linear", "down_linear"),
)
"""The ops of a layer. All of them must be in C++."""
IN_CPP = ("native", "native_float32", "int8")
"""Names of the versions in C++."""
KINDS = (
    *("qkv", "prepare_qkv", "attention", "out", "gate_up", "gated", "down", "norm"),
    *("head", "draw", "other"),
)
"""Kinds of work that are timed separately, in the order of `Kind` in stack.h. The last three are outside the layers."""
MAX_ROPES = 8


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm", "key_shift")),
        *((name, c_void_p) for name in ("attention_out_norm", "mlp_out_norm")),
        *((name, c_int64) for name in ("rope", "window", "group")),
    )


class _Shape(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("dtype", "layers", "hidden", "inner")),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "activation", "ropes")),
        ("rotary_dims", POINTER(c_int64)),
        ("head", c_void_p),
        ("use_decode_kernels", c_int64),
        *((name, c_float) for name in ("eps", "scale", "softcap", "embedding_scale")),
    )


class _Inputs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("block_ids", "offsets", "query_starts", "seq_lens", "tables", "positions")),
        ("angles", POINTER(c_void_p)),
        ("kv", POINTER(c_void_p)),
        *((name, c_void_p) for name in ("residual", "out", "nanoseconds")),
        *((name, c_int64) for name in ("tokens", "rows", "table_width", "num_blocks", "block_size", "kv_dtype")),
        ("groups", c_int64),
        *((name, c_void_p) for name in ("last_tokens", "last_starts", "last_lens", "last_tables")),
        *((name, c_int64) for name in ("lasts", "last_rows")),
        *((name, c_void_p) for name in ("decodes", "tap_layers", "taps")),
        ("num_taps", c_int64),
        ("first_x", c_void_p),
        *((name, c_void_p) for name in ("adapters", "slots")),
    )


class _Adapters(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("a", "b", "ranks", "scales", "sizes")),
        ("slots", c_int64),
    )


class _Draft(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "fc", "embedding_norm", "hidden_norm")),
        *((name, c_int64) for name in ("has_input_norm", "normed_residual")),
        ("embedding_scale", c_float),
    )


class ForwardStep(Structure):
    """The body of a step, as in step.cpp. `NativeStack.bind` sets what depends on the KV tensors."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "starts", "counts", "draws", "tokens")),
        *((name, c_void_p) for name in ("prompts", "last_tokens", "tables")),
        ("angles", POINTER(c_void_p)),
        ("kv", POINTER(c_void_p)),
        *((name, c_void_p) for name in ("out", "state_rows", "state_positions", "nanoseconds")),
        *((name, c_int64) for name in ("num_rows", "groups", "table_rows", "table_width")),
        *((name, c_int64) for name in ("num_blocks", "block_size", "kv_dtype")),
        *((name, c_void_p) for name in ("tap_layers", "taps")),
        ("num_taps", c_int64),
        *((name, c_void_p) for name in ("states", "residuals", "adapters", "slots")),
    )


class DrawStep(Structure):
    """The head of a step, as in step.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("hidden", "rows", "positions", "is_last", "masked", "mask_bits")),
        *((name, c_void_p) for name in ("temperature", "top_p", "min_p", "top_k", "seeds")),
        *((name, c_void_p) for name in ("last_tokens", "drawn", "nanoseconds")),
        *((name, c_int64) for name in ("num_states", "num_masks")),
    )


def native_stack_missing(spec: ModelSpec, choices: Mapping[str, Choice], layers: Sequence[DecoderLayer] = ()) -> str:
    """Why the model has no native stack, as a clause; empty if it has one."""
    if spec.moe is not None:
        return "it is a mixture of experts"
    if len(spec.ropes) > MAX_ROPES:
        return f"it has more than {MAX_ROPES} ropes"
    if reason := _unknown(spec, _HONOURED) or next(filter(None, map(_unknown_of_layer, spec.layers)), ""):
        return reason
    other = [f"{key} is {choices[key].version.name}" for key in NEEDED if choices[key].version.name not in IN_CPP]
    # Layers may have weights of different formats; `choices` has those of the last one.
    if not other and not all(isinstance(linear, NativeParts) for layer in layers for linear in _linears(layer)):
        return "some of its matrices have a format without C++ kernels"
    return ", ".join(other)


_HONOURED = frozenset(
    "family vocab_size hidden_size inner_size num_heads num_kv_heads head_dim max_context layers ropes norm_eps"
    " attention_scale norm_offset activation attention_softcap logit_softcap embedding_scale hidden_scale"
    " qkv_bias out_bias mlp_bias qk_norm sandwich_norms tied_head has_kv_groups".split()
)
"""Fields of a ModelSpec that the C++ layers honour, or that do not concern them. With any other set, a model runs op by
op, so a new field is never ignored."""
_HONOURED_OF_LAYERS = frozenset(("window", "rope"))


def _unknown_of_layer(layer: LayerSpec) -> str:
    return _unknown(layer, _HONOURED_OF_LAYERS)


def _unknown(spec: ModelSpec | LayerSpec, honoured: frozenset[str]) -> str:
    """A field with another value than its default that is not honoured, as a clause."""
    for own in fields(spec):
        value: object = getattr(spec, own.name)
        if own.name not in honoured and value != own.default:
            return f"its {own.name} is {value!r}"
    return ""


def _linears(layer: DecoderLayer) -> tuple[Linear, ...]:
    mixer, mlp = _attention(layer), layer.mlp
    assert isinstance(mlp, DenseMlp)
    return mixer.qkv, mixer.out, mlp.gate_up.linear, mlp.down


def _attention(layer: DecoderLayer) -> AttentionMixer:
    assert isinstance(layer.mixer, AttentionMixer)
    return layer.mixer


@dataclass(frozen=True, slots=True)
class PairedInput:
    """How a feature drafter makes its first layer's input of tokens and the target's states; see stack.h."""

    embedding: Linear
    fc: Linear | None
    embedding_norm: Tensor | None
    hidden_norm: Tensor | None
    has_input_norm: bool
    normed_residual: bool
    embedding_scale: float


def describe_adapters(slots: AdapterSlots) -> Structure:
    """`Adapters` in stack.h. The slots must stay alive as long as it is used."""
    columns = slots.columns
    parts = (columns.a, columns.b, columns.ranks, columns.scales, slots.out_sizes)
    return _Adapters(*(part.data_ptr() for part in parts), columns.a.shape[1])


class NativeStack:
    """The layers and the final norm of a decoder. Not thread-safe: one step at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor | None,
        head: Linear | None,
        angles: Angles,
        dtype: torch.dtype,
        *,
        embedding_scale: float = 1.0,
        use_decode_kernels: bool = False,
        paired: PairedInput | None = None,
    ) -> None:
        """`head`: the LM head, if it is a native linear over the embedding matrix, or that of a feature drafter, whose
        input is `paired`. `use_decode_kernels`: as in Decoder."""
        # Keeps them alive: C++ holds their addresses.
        self._spec, self._layers, self._final_norm, self._paired = spec, layers, final_norm, paired
        self.head = head
        self.can_run_whole_steps = head is not None and spec.logit_softcap is None
        library = native()
        self._rotary_dims = (c_int64 * len(spec.ropes))(*(rope.rotary_dim for rope in spec.ropes))
        shape = _Shape(
            DTYPES[dtype],
            spec.num_layers,
            spec.hidden_size,
            spec.inner_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            ACTIVATION_CODES[spec.activation],
            len(spec.ropes),
            self._rotary_dims,
            None if head is None else _linear(head),
            use_decode_kernels,
            spec.norm_eps,
            spec.attention_scale,
            spec.attention_softcap or 0.0,
            embedding_scale,
        )
        described = (_Layer * spec.num_layers)(*(_layer(layer) for layer in layers))
        self._stack = library.with_gil.stack_new(ctypes.byref(shape), described, _address(final_norm))
        if paired is not None:
            library.with_gil.stack_set_draft(self._stack, ctypes.byref(_draft(paired)))
        self.hidden_size, self.vocab_size, self.dtype = spec.hidden_size, spec.vocab_size, dtype
        self.num_groups = spec.kv_groups.num_groups
        self._native = library.without_gil
        self._angles = angles
        self._angle_tables: list[Tensor] = []
        self._angle_addresses: Any = None
        self._kv: Sequence[Tensor] = ()
        self._kv_addresses: Any = None
        weakref.finalize(self, library.with_gil.stack_free, self._stack)

    def __call__(
        self, residual: Tensor, batch: ForwardBatch, kv: Sequence[Tensor], nanoseconds: Tensor | None = None
    ) -> Tensor:
        """Decoder.forward for embedded tokens, which are overwritten. The time of each of KINDS is added to
        `nanoseconds`, int64."""
        rows = plain_rows(batch.rows)
        lens, tables = rows.seq_lens, rows.block_tables
        if tables.shape[0] != self.num_groups:
            raise ValueError(f"the batch has block tables of {tables.shape[0]} KV groups, the model {self.num_groups}")
        columns = (batch.block_ids, batch.offsets, rows.query_starts, lens, tables, batch.positions)
        parts = [part.contiguous() for part in columns]
        residual = residual.contiguous()
        last, taps = batch.last, batch.taps
        last_columns = []
        if last is not None:
            last_parts = (last.rows.query_starts, last.rows.seq_lens, last.rows.block_tables)
            last_columns = [last.index.long(), *(part.contiguous() for part in last_parts)]
        own = batch.adapters
        adapters = None if own is None else describe_adapters(own.home)
        out = torch.empty_like(residual if last is None else residual[: len(last.index)])
        inputs = _Inputs(
            *(part.data_ptr() for part in parts),
            self._angles_upto(max(rows.seq_lens_host)),
            self._addresses_of(kv),
            residual.data_ptr(),
            out.data_ptr(),
            None if nanoseconds is None else nanoseconds.data_ptr(),
            residual.shape[0],
            lens.shape[0],
            tables.shape[2],
            kv[0].shape[1],
            kv[0].shape[3],
            KV_DTYPES[kv[0].dtype],
            tables.shape[0],
            *(part.data_ptr() for part in last_columns),
            *(None for _ in range(4 - len(last_columns))),
            -1 if last is None else len(last.index),
            0 if last is None else len(last.rows.seq_lens),
            None if batch.decodes is None else batch.decodes.ctypes.data,
            *((None, None, 0) if taps is None else (taps.layers.ctypes.data, taps.out.data_ptr(), len(taps.layers))),
            None,
            None if adapters is None else ctypes.addressof(adapters),
            None if own is None else own.slots.data_ptr(),
        )
        self._check(self._native.stack_run(self._stack, ctypes.byref(inputs)))
        return out

    def bind(self, step: ForwardStep, kv: Sequence[Tensor]) -> None:
        """Set the fields that depend on the KV tensors."""
        step.kv, step.kv_dtype = self._addresses_of(kv), KV_DTYPES[kv[0].dtype]
        step.num_blocks, step.block_size = kv[0].shape[1], kv[0].shape[3]

    def forward(self, step: ForwardStep, max_seq_len: int) -> None:
        """Decoder.forward, for the tokens whose hidden states are needed."""
        step.angles = self._angles_upto(max_seq_len)
        self._check(self._native.stack_forward(self._stack, ctypes.byref(step)))

    def draw(self, step: DrawStep) -> None:
        """Decoder.logits and the draw."""
        self._check(self._native.stack_draw(self._stack, ctypes.byref(step)))

    def step(self, body: ForwardStep, head: DrawStep, max_seq_len: int) -> None:
        """`forward` and `draw` in one call."""
        body.angles = self._angles_upto(max_seq_len)
        self._check(self._native.stack_step(self._stack, ctypes.byref(body), ctypes.byref(head)))

    def _check(self, code: int) -> None:
        if code == 1:
            raise MemoryError("not enough memory for the buffers of a step")
        if code == 2:
            raise IndexError(f"a token id is outside the vocabulary of {self._spec.vocab_size}")

    def _angles_upto(self, num_positions: int) -> Any:
        """Addresses of the rotary tables, one per rope; rebuilt only when the tables have grown."""
        tables = self._angles.upto(num_positions)
        if self._angle_tables is not tables:
            self._angle_tables = tables
            self._angle_addresses = (c_void_p * len(tables))(*(table.data_ptr() for table in tables))
        return self._angle_addresses

    def _addresses_of(self, kv: Sequence[Tensor]) -> Any:
        """Address of each layer's KV tensor; rebuilt only when other tensors are passed."""
        if self._kv is not kv:
            layers = self._layers
            addresses = (c_void_p * len(layers))(*(kv[_attention(layer).kv_index].data_ptr() for layer in layers))
            self._kv, self._kv_addresses = kv, addresses
        return self._kv_addresses


def _layer(layer: DecoderLayer) -> _Layer:
    mixer = _attention(layer)
    assert isinstance(mixer.prepare_qkv, NativePrepareQkv)
    assert isinstance(layer.mlp, DenseMlp)
    assert isinstance(layer.mlp.gate_up, ComposedGatedLinear)
    q_norm, k_norm, key_shift = mixer.prepare_qkv.vectors_at
    return _Layer(
        _linear(mixer.qkv),
        _linear(mixer.out),
        _linear(layer.mlp.gate_up.linear),
        _linear(layer.mlp.down),
        _address(layer.input_norm),
        _address(layer.mlp_norm),
        q_norm,
        k_norm,
        key_shift,
        _address(layer.mixer_out_norm),
        _address(layer.mlp_out_norm),
        -1 if mixer.rope is None else mixer.rope,
        mixer.window or 0,
        mixer.kv_group,
    )


def _draft(paired: PairedInput) -> _Draft:
    return _Draft(
        _linear(paired.embedding),
        None if paired.fc is None else _linear(paired.fc),
        _address(paired.embedding_norm),
        _address(paired.hidden_norm),
        paired.has_input_norm,
        paired.normed_residual,
        paired.embedding_scale,
    )


def _linear(linear: Linear) -> int:
    assert isinstance(linear, NativeParts)
    return ctypes.addressof(linear.native)


def _address(weight: Tensor | None) -> int | None:
    return None if weight is None else weight.data_ptr()
