"""A bad argument of attention is an error that names it, what was given and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lawson
import lawson.jax
from lawson.jax import attention, dot_product_attention

F32 = np.float32
Q = np.ones((2, 4, 2, 8), F32)
OFFSETS = np.array([0, 2, 8], np.int32)
TOKENS = np.ones((8, 2, 8), F32)
TABLE = np.zeros((2, 2), np.int32)
LENGTHS = np.array([3, 4], np.int32)
RAGGED = {"layout": "thd", "cu_seqlens_q": OFFSETS, "cu_seqlens_kv": OFFSETS}
SEGMENTS = {"segment_ids": np.ones((2, 4), np.int32), "max_segments": 1}
PAGED = {"page_table_k": TABLE, "seqlens_kv": LENGTHS}
NEW = np.ones((2, 1, 2, 8), F32)
BIAS = np.ones((1, 1, 4, 4), F32)
FLOATS = "float16, bfloat16, float32, float64"
FLAG = "expected True or False"
PAIR = "expected (left, right): two whole numbers from -1 (all) to 2^31 - 1"
LAYOUTS = "expected one of bshd, sbhd, bhsd, thd, three of these joined by '_', or bs3hd"
MASKS = "expected one of none, padding, causal"
CAP = "expected 0 (none), or a number up to 1e30"
RATE = "expected a number from 0 to below 1"
SCALE = "expected None, or a finite number"
TOKEN_COUNT = "expected None, or a number of tokens from 1 to 2^40"
SEGMENT_COUNT = "expected the largest number of segments in a row, from 1 to 2^31 - 1"
ENGINES = "expected None, or one of cudnn, cpu, reference"
BYTES = "expected None (no limit), or a number of bytes from 0 to 2^63 - 1"
KEY = "expected None, or one key: jax.random.key(seed)"
LOCAL = "expected None, or a number of columns or (left, right), 0 or more"
NAN, INF = float("nan"), float("inf")


def case(name: str, value: str, allowed: str, /, **arguments: Any) -> Any:
    """The argument that is named, how its value is shown, what is allowed; and the call."""
    return pytest.param(name, value, allowed, arguments, id=f"{name}-{value[:40]}")


SETTINGS = [
    case("layout", "'bsdh'", LAYOUTS, layout="bsdh"),
    case("layout", "3", LAYOUTS, layout=3),
    case("layout", "['bshd']", LAYOUTS, layout=["bshd"]),
    case("layout", "'bshd_bshd'", LAYOUTS, layout="bshd_bshd"),
    case("mask", "'diagonal'", MASKS, mask="diagonal"),
    case("mask", "True", MASKS, mask=True),
    case("window", "3", PAIR, window=3),
    case("window", "(1,)", PAIR, window=(1,)),
    case("window", "(1, 2, 3)", PAIR, window=(1, 2, 3)),
    case("window", "None", PAIR, window=None),
    case("window", "('a', 1)", PAIR, window=("a", 1)),
    case("window", "(1.5, 2)", PAIR, window=(1.5, 2)),
    case("window", "(True, 2)", PAIR, window=(True, 2)),
    case("window", "(-2, 0)", PAIR, window=(-2, 0)),
    case("window", "'ab'", PAIR, window="ab"),
    case("softcap", "'x'", CAP, softcap="x"),
    case("softcap", "nan", CAP, softcap=NAN),
    case("softcap", "inf", CAP, softcap=INF),
    case("softcap", "-1.0", CAP, softcap=-1.0),
    case("softcap", "1.1e+30", CAP, softcap=1.1e30),
    case("softcap", "None", CAP, softcap=None),
    case("softcap", "True", CAP, softcap=True),
    case("scale", "'x'", SCALE, scale="x"),
    case("scale", "nan", SCALE, scale=NAN),
    case("scale", "-inf", SCALE, scale=-INF),
    case("scale", "1j", SCALE, scale=1j),
    case("scale", "shape (3,)", SCALE, scale=np.ones(3)),
    case("scale", "1000000", SCALE, scale=10**400),
    case("dropout_rate", "'x'", RATE, dropout_rate="x"),
    case("dropout_rate", "1.0", RATE, dropout_rate=1.0),
    case("dropout_rate", "-0.1", RATE, dropout_rate=-0.1),
    case("dropout_rate", "nan", RATE, dropout_rate=NAN),
    case("output_dtype", "'x'", f"one of {FLOATS}", output_dtype="x"),
    case("output_dtype", "3", f"one of {FLOATS}", output_dtype=3),
    case("output_dtype", "int32", f"one of {FLOATS}", output_dtype=jnp.int32),
    case("output_dtype", "float64", "needs jax_enable_x64", output_dtype="float64"),
    case("softmax", "'wide'", "expected one of vanilla, off_by_one", softmax="wide"),
    case("softmax", "1", "expected one of vanilla, off_by_one", softmax=1),
    case("bias_kind", "'mid'", "one of pre_scale, post_scale", bias=BIAS, bias_kind="mid"),
    case("alibi", "'yes'", FLAG, alibi="yes"),
    case("deterministic", "'no'", FLAG, deterministic="no"),
    case("return_lse", "1", FLAG, return_lse=1),
    case("return_max_logit", "'x'", FLAG, return_max_logit="x"),
    case("return_dropout_mask", "None", FLAG, return_dropout_mask=None),
    case("engine", "3", ENGINES, engine=3),
    case("engine", "['cpu']", ENGINES, engine=["cpu"]),
    case("engine", "'gpu'", ENGINES, engine="gpu"),
    case("target", "3", "the name of a GPU", target=3),
    case("target", "'h9000'", "known: cpu", target="h9000"),
    case("workspace_limit", "'x'", BYTES, workspace_limit="x"),
    case("workspace_limit", "1.5", BYTES, workspace_limit=1.5),
    case("workspace_limit", "-7", BYTES, workspace_limit=-7),
    case("workspace_limit", "True", BYTES, workspace_limit=True),
    case("tuning", "3", "expected one of off, quick, exhaustive", tuning=3),
    case("tuning", "'fast'", "expected one of off, quick, exhaustive", tuning="fast"),
    case("max_segments", "'a'", SEGMENT_COUNT, **{**SEGMENTS, "max_segments": "a"}),
    case("max_segments", "None", SEGMENT_COUNT, **{**SEGMENTS, "max_segments": None}),
    case("max_segments", "0", SEGMENT_COUNT, **{**SEGMENTS, "max_segments": 0}),
]
ARRAYS = [
    case("q", "None", "expected an array", q=None),
    case("q", "'x'", "expected an array", q="x"),
    case("k", "None", "expected an array", k=None),
    case("v", "object", "expected an array", v=object()),
    case("q", "bool", f"expected one of {FLOATS}", q=Q > 0),
    case("k", "dtype bfloat16", "that of q, float32", k=jnp.ones(Q.shape, jnp.bfloat16)),
    case("k", "shape (2, 4, 8)", "expected 4, [b, s, h, d]", k=np.ones((2, 4, 8), F32)),
    case("q", "shape ()", "expected 4, [b, s, h, d]", q=1.0),
    case("v", "shape (2, 3, 2, 8)", "expected 4, as k says", v=Q[:, :3]),
    case("q", "3 heads", "k has 2; those of q must be a multiple", q=np.ones((2, 4, 3, 8), F32)),
    case("q", "depth of q and k is 0", "expected 1 or more", q=Q[..., :0], k=Q[..., :0]),
    case("v", "depth of v is 0", "1 or more where return_lse is", v=Q[..., :0], return_lse=True),
    case("seqlens_q", "'x'", "expected an array", seqlens_q="x"),
    case("seqlens_kv", "dtype float32", "expected integers", seqlens_kv=np.array([1.5, 2])),
    case("seqlens_q", "dtype bool", "expected integers", seqlens_q=np.array([True, True])),
    case("seqlens_q", "shape (3,)", "expected 2, as q says", seqlens_q=np.array([1, 2, 3])),
    case("seqlens_kv", "shape ()", "expected 1: [sequences]", seqlens_kv=3),
    case("bias", "'x'", "expected an array", bias="x"),
    case("bias", "dtype int32", f"expected one of {FLOATS}", bias=np.ones((4, 4), np.int32)),
    case("bias", "(1, 1, 1, 4, 4)", "at most [b, h, sq, skv]", bias=np.ones((1,) * 3 + (4, 4), F32)),
    case("bias", "has 3 at axis 2", "expected 4 or 1", bias=np.ones((3, 4), F32)),
    case("attn_mask", "'x'", "expected an array", attn_mask="x"),
    case("attn_mask", "dtype int32", "expected one of bool, float16", attn_mask=np.ones((4, 4), int)),
    case("attn_mask", "has 3 at axis 2", "expected 4 or 1", attn_mask=np.ones((3, 4), bool)),
    case("alibi_slopes", "'x'", "expected an array", alibi_slopes="x"),
    case("alibi_slopes", "shape (3,)", "expected 2, as q says", alibi_slopes=np.ones(3, F32)),
    case("sink", "'x'", "expected an array", sink="x"),
    case("sink", "shape (3,)", "expected 2, as q says", sink=np.zeros(3, F32)),
    case("sink", "dtype complex64", "expected float32", sink=np.zeros(2, np.complex64)),
    case("dropout_key", "3", KEY, dropout_key=3, dropout_rate=0.5),
    case("dropout_key", "3", KEY, dropout_key=3),
    case("dropout_key", "'x'", "expected an array", dropout_key="x", dropout_rate=0.5),
    case("dropout_key", "(2,) keys", KEY, dropout_key=jax.random.split(jax.random.key(0))),
    case("dropout_mask", "dtype float32", "uint8 or bool", dropout_mask=BIAS, dropout_rate=0.5),
    case("dropout_mask", "(1, 1, 4, 4)", "expected 2", dropout_mask=BIAS > 0, dropout_rate=0.5),
    case("segment_ids", "'x'", "expected an array", **{**SEGMENTS, "segment_ids": "x"}),
    case("segment_ids", "shape (2, 3)", "[b, s] = (2, 4)", segment_ids=np.ones((2, 3), int), max_segments=1),
    case("page_table_k", "'x'", "expected an array", page_table_k="x", seqlens_kv=LENGTHS),
    case("page_table_v", "shape (2,)", "[b, pages of a sequence]", **PAGED, page_table_v=LENGTHS),
    case("page_table_k", "(2, 2)", "max_seqlen_kv = 9", **PAGED, max_seqlen_kv=9),
    case("k_new", "dtype bfloat16", "that of q, float32", seqlens_kv=LENGTHS, v_new=NEW, k_new=jnp.ones(NEW.shape, jnp.bfloat16)),
    case("k_new", "has 5 new tokens", "expected at most 4", seqlens_kv=LENGTHS, v_new=np.ones((2, 5, 2, 8), F32), k_new=np.ones((2, 5, 2, 8), F32)),
]  # fmt: skip
TOGETHER = [
    case("kv_segment_ids", "segment_ids", "which is None", kv_segment_ids=np.ones((2, 4), int)),
    case("max_segments", "segment_ids", "which is None", max_segments=2),
    case("cu_seqlens_q", "segment_ids", "expected None", **SEGMENTS, cu_seqlens_q=OFFSETS),
    case("cu_seqlens_kv", "segment_ids", "expected None", **SEGMENTS, cu_seqlens_kv=OFFSETS),
    case("cu_seqlens_q_padded", "segment_ids", "None", **SEGMENTS, cu_seqlens_q_padded=OFFSETS),
    case("page_table_v", "segment_ids", "expected None", **SEGMENTS, page_table_v=TABLE),
    case("k_new", "segment_ids", "expected None", **SEGMENTS, k_new=NEW),
    case("bias", "segment_ids", "expected None", **SEGMENTS, bias=BIAS),
    case("page_table_v", "page_table_k", "which is None", page_table_v=TABLE),
    case("page_table_k", "seqlens_kv", "the lengths", page_table_k=TABLE),
    case("k_new", "seqlens_kv", "the lengths", k_new=NEW, v_new=NEW),
    case("v_new", "missing", "together with k_new", k_new=NEW, seqlens_kv=LENGTHS),
    case("max_seqlen_q", "4", "not ragged ('bshd')", max_seqlen_q=4),
    case("max_seqlen_kv", "4", "not ragged ('bshd')", max_seqlen_kv=4),
    case("max_seqlen_q", "4", "not ragged ('bshd')", **PAGED, max_seqlen_q=4),
    case("max_seqlen_q", "'a'", TOKEN_COUNT, max_seqlen_q="a"),
    case("max_seqlen_kv", "0", TOKEN_COUNT, **PAGED, max_seqlen_kv=0),
    case("bias_kind", "'pre_scale'", "bias is None", bias_kind="pre_scale"),
    case("alibi", "bias", "add its terms to the bias", alibi=True, bias=BIAS),
    case("alibi_slopes", "bias", "add its terms", alibi_slopes=np.ones(2, F32), bias=BIAS),
    case("softmax", "'off_by_one'", "sink", softmax="off_by_one", sink=np.ones(2, F32)),
    case("dropout_rate", "0.5", "needs dropout_key", dropout_rate=0.5),
    case("dropout_rate", "0.5", "one of them", dropout_rate=0.5, dropout_key=jax.random.key(0), dropout_mask=BIAS > 0),
    case("dropout_mask", "dropout_rate", "above 0", dropout_mask=np.ones((2, 2, 4, 4), bool)),
    case("return_dropout_mask", "dropout_rate", "above 0", return_dropout_mask=True),
    case("cu_seqlens_q", "'bshd_bshd_bshd'", "a thd layout", cu_seqlens_q=OFFSETS),
    case("cu_seqlens_kv_padded", "'bshd", "a thd layout", cu_seqlens_kv_padded=OFFSETS),
    case("k", "an array", "expected None", layout="bs3hd", q=np.ones((2, 4, 3, 2, 8), F32)),
    case("q", "(2, 4, 2, 8)", "5 dims, with 3 at axis 2", layout="bs3hd", k=None, v=None),
]  # fmt: skip
OF_TOKENS = [
    case("cu_seqlens_q", "missing", "offsets, i32[b+1]", cu_seqlens_q=None),
    case("cu_seqlens_kv", "missing", "offsets, i32[b+1]", cu_seqlens_kv=None),
    case("cu_seqlens_q", "shape ()", "expected 1: [offsets]", cu_seqlens_q=3),
    case("cu_seqlens_q", "shape (0,)", "one element more", cu_seqlens_q=np.zeros(0, np.int32)),
    case("cu_seqlens_q", "dtype float32", "expected integers", cu_seqlens_q=np.zeros(3, F32)),
    case("cu_seqlens_kv", "shape (2,)", "expected 3", cu_seqlens_kv=OFFSETS[:2]),
    case("seqlens_q", "a ragged side", "cu_seqlens_q instead", seqlens_q=LENGTHS),
    case("max_seqlen_q", "1.5", TOKEN_COUNT, max_seqlen_q=1.5),
    case("page_table_k", "the layout", "bshd, sbhd or bhsd, not thd", page_table_k=TABLE, seqlens_kv=LENGTHS),
]  # fmt: skip
DOT_PRODUCT = [
    case("query", "None", "expected an array", query=None),
    case("query", "'x'", "expected an array", query="x"),
    case("query", "(2, 8)", "expected 4, [B,T,N,H], or 3", query=Q[0, 0]),
    case("key", "shape (2, 8)", "expected 4", key=Q[0, 0]),
    case("value", "None", "expected an array", value=None),
    case("key", "dtype bfloat16", "that of query, float32", key=jnp.ones(Q.shape, jnp.bfloat16)),
    case("value", "has 3 at axis 1", "expected 4, as key says", value=Q[:, :3]),
    case("query", "3 heads", "key has 2; those of query", query=np.ones((2, 4, 3, 8), F32)),
    case("bias", "has 3 at axis 2", "expected 4 or 1, as query says", bias=np.ones((3, 4), F32)),
    case("mask", "dtype float32", "expected bool", mask=BIAS),
    case("mask", "'x'", "expected an array", mask="x"),
    case("mask", "has 3 at axis 2", "expected 4 or 1, as query says", mask=np.ones((3, 4), bool)),
    case("is_causal", "'yes'", FLAG, is_causal="yes"),
    case("return_residual", "1", FLAG, return_residual=1),
    case("query_seq_lengths", "shape (3,)", "as query says", query_seq_lengths=np.ones(3, int)),
    case("key_value_seq_lengths", "dtype float32", "integers", key_value_seq_lengths=np.ones(2)),
    case("local_window_size", "(1, 2, 3)", LOCAL, local_window_size=(1, 2, 3)),
    case("local_window_size", "True", LOCAL, local_window_size=True),
    case("local_window_size", "-1", LOCAL, local_window_size=-1),
    case("local_window_size", "(1, -1)", LOCAL, local_window_size=(1, -1)),
    case("local_window_size", "1.5", LOCAL, local_window_size=1.5),
    case("implementation", "'flash'", "one of xla, cudnn", implementation="flash"),
    case("page_table_k", "key_value_seq_lengths", "the lengths", page_table_k=TABLE),
    case("query_seq_lengths", "segment_ids", "None", **SEGMENTS, query_seq_lengths=LENGTHS),
    case("engine", "['cpu']", ENGINES, engine=["cpu"]),
]


def check(function: Any, name: str, value: str, allowed: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(lawson.InvalidArgumentError) as caught:
        function(**arguments)
    told = str(caught.value)
    assert re.match(rf"{name}\b", told), told
    assert value in told and allowed in told, told


@pytest.mark.parametrize(("name", "value", "allowed", "more"), [*SETTINGS, *ARRAYS, *TOGETHER])
def test_bad_arguments(name: str, value: str, allowed: str, more: dict[str, Any]) -> None:
    check(attention, name, value, allowed, {"q": Q, "k": Q, "v": Q, **more})


@pytest.mark.parametrize(("name", "value", "allowed", "more"), OF_TOKENS)
def test_bad_arguments_of_ragged(name: str, value: str, allowed: str, more: dict[str, Any]) -> None:
    arrays = {"q": TOKENS, "k": TOKENS, "v": TOKENS}
    check(attention, name, value, allowed, {**arrays, **RAGGED, **more})


@pytest.mark.parametrize(("name", "value", "allowed", "more"), DOT_PRODUCT)
def test_bad_arguments_by_the_names_of_jax(
    name: str, value: str, allowed: str, more: dict[str, Any]
) -> None:
    given = {"query": Q, "key": Q, "value": Q, **more}
    check(dot_product_attention, name, value, allowed, given)


def test_shapes_without_a_batch_are_told_with_one() -> None:
    told = r"^mask: shape \(1, 1, 3, 4\) .* expected 4 or 1, .* a batch of one: \[1,T,N,H\]\)$"
    with pytest.raises(lawson.InvalidArgumentError, match=told):
        dot_product_attention(Q[0], Q[0], Q[0], mask=np.ones((3, 4), bool))
    with pytest.raises(lawson.InvalidArgumentError, match="deterministic: 3 .* True or False$"):
        dot_product_attention(Q[0], Q[0], Q[0], deterministic=3)  # type: ignore[arg-type]


def test_an_engine_of_another_platform_is_unsupported() -> None:
    with pytest.raises(lawson.UnsupportedError, match="platform 'cpu': engine names cudnn"):
        attention(Q, Q, Q, engine="cudnn")
    with pytest.raises(lawson.InvalidArgumentError, match="^platform: 3 is not allowed; .*'cuda'"):
        lawson.jax.inspect(attention, platform=3)  # type: ignore[arg-type]


def test_options_of_patch() -> None:
    with pytest.raises(
        lawson.InvalidArgumentError, match="^engines: 'cpu' is not allowed; .*engine,"
    ):
        with lawson.jax.patch(engines="cpu"):
            pytest.fail("entered")
    options: dict[str, Any]
    for options in (
        {"engine": ["cpu"]},
        {"tuning": "nonsense"},
        {"target": "h300"},
        {"workspace_limit": -2},
        {"deterministic": 1},
        {"softcap": -1.0},
        {"dropout_rate": 1.0},
        {"scale": "x"},
    ):
        (name,) = options
        with pytest.raises(lawson.InvalidArgumentError, match=f"^{name}: "):
            with lawson.jax.patch(**options):
                pytest.fail("entered")


def test_a_traced_setting_is_named() -> None:
    for name in ("scale", "softcap", "dropout_rate"):
        call = jax.jit(lambda x, name=name: attention(Q, Q, Q, **{name: x}))
        with pytest.raises(lawson.InvalidArgumentError, match=f"{name}: .*not known when"):
            call(0.5)


def test_numbers_of_numpy_are_numbers() -> None:
    plain = attention(Q, Q, Q, window=(1, 0), scale=0.5, softcap=2.0, deterministic=True)
    numpy = attention(
        Q,
        Q,
        Q,
        window=np.array([1, 0]),
        scale=np.float32(0.5),
        softcap=jnp.asarray(2.0),
        deterministic=np.True_,
        workspace_limit=np.int64(1 << 40),
    )
    np.testing.assert_array_equal(plain, numpy)
    one = dot_product_attention(Q, Q, Q, local_window_size=np.int64(1))
    np.testing.assert_array_equal(one, dot_product_attention(Q, Q, Q, local_window_size=(1, 1)))


def test_lengths_beyond_int32_are_long_not_negative() -> None:
    lengths = np.array([1 << 40, -(1 << 40)])
    o = attention(Q, Q, Q, seqlens_kv=lengths)
    np.testing.assert_array_equal(o, attention(Q, Q, Q, seqlens_kv=np.array([4, 0])))


# ---- the environment ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "policy", "expected"),
    [
        ("cpu", "", "cpu"),
        ("cudnn, reference", "", "reference"),
        ("cpu,reference", "allow", "cpu"),
        ("reference,cpu", "allow", "reference"),
        ("cpu,reference", "", "LAWSON_ENGINE: cpu, reference are 2 engines of platform 'cpu'; pol"),
        ("cpu,", "", "LAWSON_ENGINE: '' is not allowed; expected one of cudnn, cpu, reference"),
        ("x", "", "LAWSON_ENGINE: 'x' is not allowed; expected one of cudnn, cpu, reference"),
        ("cpu", "maybe", "LAWSON_POLICY: 'maybe' is not allowed; expected one of require, allow"),
    ],
)
def test_the_environment_means_the_same_to_attention_and_fusions(
    monkeypatch: pytest.MonkeyPatch, engine: str, policy: str, expected: str
) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", engine)
    monkeypatch.setenv("LAWSON_POLICY", policy)
    for function in (lambda q: attention(q, q, q), lawson.jax.fusion(lambda q: q * 2)):
        if ":" in expected:
            with pytest.raises(lawson.InvalidArgumentError, match=re.escape(expected)):
                lawson.jax.inspect(function)(Q)
        else:
            told = lawson.jax.inspect(function)(Q)
            assert (told[0] if isinstance(told, tuple) else told).engine == expected


def test_allow_goes_on_to_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from lawson import _attention_plan as plan

    judged = []
    real = plan.judge

    def judge(spec: str, device: Any, options: Any) -> Any:
        judged.append(options.engine)
        if options.engine == "cpu":
            raise lawson.UnsupportedError("not today")
        return real(spec, device, options)

    monkeypatch.setattr(plan, "judge", judge)
    monkeypatch.setenv("LAWSON_ENGINE", "cpu,reference")
    monkeypatch.setenv("LAWSON_POLICY", "allow")
    (told,) = lawson.jax.inspect(lambda q: attention(q, q, q))(Q)
    assert told.engine == "reference" and judged[:2] == ["cpu", "reference"]
