"""What an attention call is, apart from its arrays: operands by name, their dims, its spec.

A `Setup` is static and hashable: it is what the primitives carry. Sizes are read off the operands,
so the rules that reshape or split operands (vmap, partitioning) never touch it, and the spec that
is judged is always that of the arrays that run.

Dims have one letter each:
    b sequences      s, t rows of q and of k      h, g heads of q and of k     d, e depth of q and
    of v m, n tokens of a ragged q and of ragged k and v       c offsets, one more than b p pages
    y, z tokens of a page of k and of v  x, w entries of their tables a appended tokens
    u the two words of a 64-bit number
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from lawson._errors import InvalidArgumentError

DENSE = ("bshd", "sbhd", "bhsd")
MASKS = (
    "none",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
)
# Packed layouts: the word of each tensor, where the packed axis is, how many tensors it holds.
PACKED = {
    "bs3hd": ("bshd", 2, 3),
    "sb3hd": ("sbhd", 2, 3),
    "t3hd": ("thd", 1, 3),
    "bsh3d": ("bshd", 3, 3),
    "sbh3d": ("sbhd", 3, 3),
    "th3d": ("thd", 2, 3),
    "bshd_bs2hd": ("bshd", 2, 2),
    "sbhd_sb2hd": ("sbhd", 2, 2),
    "thd_t2hd": ("thd", 1, 2),
    "bshd_bsh2d": ("bshd", 3, 2),
    "sbhd_sbh2d": ("sbhd", 3, 2),
    "thd_th2d": ("thd", 2, 2),
}
FLOATS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
# Of each sequence of a batch.
OF_SEQUENCES = (
    "seqlen_q",
    "seqlen_kv",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "page_table_k",
    "page_table_v",
)
# In the order in which calls pass them, after q, k and v.
OPTIONAL = (
    "bias",
    "mask",
    "slopes",
    "sink",
    *OF_SEQUENCES,
    "seed",
    "offset",
    "dropout_mask",
    "k_new",
    "v_new",
)
# What the user calls an operand, where that is another name.
ARGUMENTS = {
    "seqlen_q": "seqlens_q",
    "seqlen_kv": "seqlens_kv",
    "mask": "attn_mask",
    "slopes": "alibi_slopes",
}
# Dims in messages.
LETTERS = {
    "b": "sequences",
    "s": "rows of q",
    "t": "rows of k and v",
    "h": "heads of q",
    "g": "heads of k and v",
    "d": "depth of q and k",
    "e": "depth of v",
    "m": "tokens of q",
    "n": "tokens of k and v",
    "c": "offsets",
    "p": "pages",
    "y": "tokens of a page of k",
    "z": "tokens of a page of v",
    "x": "pages of a sequence of k",
    "w": "pages of a sequence of v",
    "a": "new tokens",
    "u": "words",
}
_NO_LABELS: Mapping[str, str] = {}
_FIXED = {
    "bias": "bhst",
    "mask": "bhst",
    "dropout_mask": "bhst",
    "dropped": "bhst",
    "dbias": "bhst",
    "slopes": "h",
    "sink": "h",
    "dsink": "h",
    "seqlen_q": "b",
    "seqlen_kv": "b",
    "cu_seqlens_q": "c",
    "cu_seqlens_kv": "c",
    "cu_seqlens_q_padded": "c",
    "cu_seqlens_kv_padded": "c",
    "page_table_k": "bx",
    "page_table_v": "bw",
    "seed": "u",
    "offset": "u",
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """How a plan is chosen, for both passes; the options of the same names everywhere in Lawson."""

    engine: str | None = None
    target: str | None = None  # a device that need not be here
    workspace_limit: int = -1
    tuning: str = "off"


@dataclasses.dataclass(frozen=True)
class Setup:
    """The static part of an attention call."""

    names: tuple[str, ...]  # of the operands, in order
    words: tuple[str, str, str] = ("bshd", "bshd", "bshd")
    mask: str = "none"
    window: tuple[int, int] = (-1, -1)
    bias: str = "none"
    softmax: str = "vanilla"
    softcap: float = 0.0
    dropout: float = 0.0
    scale: float | None = None
    max_q: int = 0  # the longest sequence of a ragged q
    max_kv: int = 0  # the longest sequence of ragged or paged k and v
    output_dtype: str | None = None
    deterministic: bool = False
    training: bool = False  # judged with its backward, which runs later
    bias_grad: bool = False
    stats: bool = False
    max_logit: bool = False
    dropped: bool = False
    choice: Choice = Choice()

    @property
    def ragged_q(self) -> bool:
        return self.words[0] == "thd"

    @property
    def ragged_kv(self) -> bool:
        return self.words[1] == "thd"

    @property
    def paged(self) -> bool:
        return "page_table_k" in self.names

    @property
    def appends(self) -> bool:
        return "k_new" in self.names

    def dims(self, name: str) -> str:
        """The dims of an operand or result, one letter for each axis."""
        if name in _FIXED:
            return _FIXED[name]
        if name in ("stats", "max_logit"):
            return "mh" if self.ragged_q else "bhs"
        like = {"dq": "q", "do": "o", "dk": "k", "dv": "v", "k_new": "k", "v_new": "v"}
        tensor = like.get(name, name)
        depth = "d" if tensor in ("q", "k") else "e"
        if tensor in ("q", "o"):
            letters = {"b": "b", "s": "s", "h": "h", "d": depth, "t": "m"}
            return "".join(letters[word] for word in self.words[0])
        tokens = "t"
        batch = "b"
        if name.endswith("_new"):
            tokens = "a"
        elif self.paged:
            batch, tokens = "p", "y" if tensor == "k" else "z"
        letters = {"b": batch, "s": tokens, "h": "g", "d": depth, "t": "n"}
        return "".join(letters[word] for word in self.words[1 if tensor == "k" else 2])

    def sizes(
        self, shapes: Mapping[str, Sequence[int]], labels: Mapping[str, str] = _NO_LABELS
    ) -> dict[str, int]:
        """The size of each letter.

        Raises InvalidArgumentError where two differ, naming the operand as `labels` say, which is
        from the names of `lawson.jax.attention`'s arguments to those of another function.
        """

        def label(operand: str) -> str:
            argument = ARGUMENTS.get(operand, operand)
            return labels.get(argument, argument)

        def fail(name: str, what: str) -> NoReturn:
            raise InvalidArgumentError(f"{label(name)}: shape {tuple(shapes[name])}{what}")

        sizes: dict[str, int] = {}
        where: dict[str, str] = {}
        for name in self.names:
            dims = self.dims(name)
            if len(shapes[name]) != len(dims):
                words = ", ".join(LETTERS[letter] for letter in dims)
                fail(name, f" has {len(shapes[name])} dims; expected {len(dims)}: [{words}]")
        if self.ragged_q:
            sizes["s"], where["s"] = self.max_q, "max_seqlen_q"
        if self.ragged_kv or self.paged:
            sizes["t"], where["t"] = self.max_kv, "max_seqlen_kv"
        for name in self.names:
            if name.startswith("cu_"):
                if shapes[name][0] < 1:
                    fail(name, "; expected one element more than there are sequences")
                sizes["b"], where["b"] = int(shapes[name][0]) - 1, name
        broadcasts = ("bias", "mask")
        for name in sorted(self.names, key=lambda name: name in broadcasts):
            for axis, (letter, size) in enumerate(zip(self.dims(name), shapes[name], strict=True)):
                known = sizes.setdefault(letter, int(size))
                where.setdefault(letter, name)
                if size != known and not (name in broadcasts and size == 1):
                    allowed = f"{known} or 1" if name in broadcasts else str(known)
                    fail(
                        name,
                        f" has {size} at axis {axis} ({LETTERS[letter]}); expected {allowed}, as "
                        f"{label(where[letter])} says",
                    )
        if sizes["h"] % sizes["g"] if sizes["g"] else sizes["h"]:
            raise InvalidArgumentError(
                f"{label('q')} has {sizes['h']} heads and {label('k')} has {sizes['g']}; those of "
                f"{label('q')} must be a multiple"
            )
        if sizes["d"] == 0:
            fail("q", f": the {LETTERS['d']} is 0; expected 1 or more")
        if self.appends and sizes["a"] > sizes["t"]:
            fail(
                "k_new",
                f" has {sizes['a']} new tokens; expected at most {sizes['t']}, which a sequence of "
                "the cache holds",
            )
        return sizes

    @property
    def layout(self) -> str:
        return "_".join(self.words)

    def text(self) -> str:
        """As JSON, of which `Setup.of_text` is the inverse; fields at their default are left out."""
        plain = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name == "names" or getattr(self, field.name) != field.default
        }
        if "choice" in plain:
            plain["choice"] = dataclasses.asdict(self.choice)
        return json.dumps(plain)

    @staticmethod
    def of_text(text: str) -> Setup:
        """Of a `text()`."""
        read = json.loads(text)
        for name in ("names", "words", "window"):
            if name in read:
                read[name] = tuple(read[name])
        if "choice" in read:
            read["choice"] = Choice(**read["choice"])
        return Setup(**read)

    def forward_results(self) -> tuple[str, ...]:
        names = ["o"]
        if self.stats or self.training:
            names.append("stats")
        if self.max_logit:
            names.append("max_logit")
        if self.dropped:
            names.append("dropped")
        if self.appends:
            names += ["k", "v"]
        return tuple(names)

    def backward_results(self) -> tuple[str, ...]:
        names = ["dq", "dk", "dv"]
        if self.bias_grad:
            names.append("dbias")
        if self.softmax == "learnable":
            names.append("dsink")
        return tuple(names)

    def backward_operands(self) -> tuple[str, ...]:
        return (*self.names, "o", "stats", "do")

    def operand_names(self, which: str) -> tuple[str, ...]:
        """Those of a pass, "forward" or "backward", in order."""
        return self.names if which == "forward" else self.backward_operands()

    def result_names(self, which: str) -> tuple[str, ...]:
        """Those of a pass, in order."""
        return self.forward_results() if which == "forward" else self.backward_results()

    def axis(self, name: str, place: str) -> int | None:
        """Where a tensor has its sequences (place "b") or its heads ("h"); None: nowhere."""
        dims = self.dims(name)
        for letter in "b" if place == "b" else "hg":
            if letter in dims:
                return dims.index(letter)
        return None

    def place_of_mapped(self, which: str, mapped: Collection[str]) -> str:
        """Where an axis over which the tensors of these names are mapped goes: "b", "h", or "" for
        one after another."""
        if "seed" in self.names or self.appends:
            return ""
        per_head = any(name in mapped for name in ("slopes", "sink"))
        per_head = per_head or (which == "backward" and "sink" in self.names)
        if not per_head and not self.ragged_q and not self.ragged_kv:
            return "b"
        slopes_by_count = self.bias == "alibi" and "slopes" not in self.names
        if slopes_by_count or any(name in mapped for name in OF_SEQUENCES):
            return ""
        return "h"

    def result(
        self,
        name: str,
        sizes: Mapping[str, int],
        types: Mapping[str, str],
        shapes: Mapping[str, Sequence[int]],
    ) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a result, from those of the operands."""
        given = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsink": "sink"}.get(name, name)
        if given in self.names:
            return tuple(shapes[given]), types[given]
        shape = tuple(sizes[letter] for letter in self.dims(name))
        if name == "dropped":
            return shape, "uint8"
        if name == "o":
            return shape, types["q"] if self.output_dtype is None else self.output_dtype
        return shape, "float64" if types["q"] == "float64" else "float32"

    def spec(
        self,
        shapes: Mapping[str, Sequence[int]],
        types: Mapping[str, str],
        strides: Mapping[str, Sequence[int]] | None = None,
    ) -> str:
        """The attention spec (docs/spec.md) of this call, as JSON text.

        Args:
          shapes, types: of each operand, by name; types by NumPy's names ("bfloat16").
          strides: in `[b, h, s, d]` order, in elements, of those of q, k, v, o, do, dq, dk, dv
            that do not lie as the layout says.
        """
        sizes = self.sizes(shapes)
        spec: dict[str, Any] = {
            "lawson": 1,
            "kind": "attention",
            "pass": "training" if self.training else "forward",
            "dtype": FLOATS[types["q"]],
            "batch": sizes["b"],
            "heads": sizes["h"],
            "kv_heads": sizes["g"],
            "seqlen_q": sizes["s"],
            "seqlen_kv": sizes["t"],
            "head_dim_qk": sizes["d"],
            "head_dim_v": sizes["e"],
            "layout": self.layout,
            "mask": self.mask,
            "window": list(self.window),
            "bias": self.bias,
            "softmax": self.softmax,
            "softcap": self.softcap,
            "dropout": self.dropout,
            "scale": 1 / math.sqrt(sizes["d"]) if self.scale is None else self.scale,
            "deterministic": self.deterministic,
            "return_stats": self.stats or self.training,
            "return_max_logit": self.max_logit,
            "return_dropout_mask": self.dropped,
            "dropout_mask": "dropout_mask" in self.names,
        }
        if self.output_dtype is not None:
            spec["output_dtype"] = FLOATS[self.output_dtype]
        if "bias" in self.names:
            spec["bias_shape"] = list(shapes["bias"])
            spec["bias_dtype"] = FLOATS[types["bias"]]
            spec["bias_grad"] = self.bias_grad
        if "mask" in self.names:
            kind = types["mask"]
            spec["attn_mask"] = {"dtype": FLOATS.get(kind, kind), "shape": list(shapes["mask"])}
        if "slopes" in self.names:
            spec["alibi_slopes"] = True
        if self.ragged_q:
            spec["total_q"] = sizes["m"]
        if self.ragged_kv:
            spec["total_kv"] = sizes["n"]
        if "cu_seqlens_q_padded" in self.names or "cu_seqlens_kv_padded" in self.names:
            spec["padded_offsets"] = True
        if self.paged:
            spec["paged"] = {
                "page_size_k": sizes["y"],
                "page_size_v": sizes["z"],
                "pages": sizes["p"],
            }
        if self.appends:
            spec["append"] = sizes["a"]
        if strides:
            spec["strides"] = {name: list(given) for name, given in strides.items()}
        return json.dumps(spec)
