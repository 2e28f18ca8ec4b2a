"""What a marked function or its settings may not be with JAX: one typed error that says which."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lawson
import lawson.jax as lj
from lawson.jax import cudnn_fusion, fusion

cpu = functools.partial(fusion, engines=["cpu"])
X, B = jnp.ones((4, 8)), jnp.ones(3)
HERE = "test_jax_fusion_refusals.py"


def refused(kind: type[lawson.Error], function: Callable[..., Any], *args: Any) -> str:
    """What a call of the function as fusion says; the function's line is in it."""
    with pytest.raises(kind) as caught:
        cpu(function)(*args)
    text = str(caught.value)
    assert f" at {HERE}:{function.__code__.co_firstlineno}: " in text, text
    assert "fusion 'lambda'" in text
    return text


UNFIT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "dot_general requires contracting": (lambda a, b: a @ b, (X, X)),
    "Incompatible shapes": (lambda a, b: a + b, (X, B)),
    "reshape": (lambda a: a.reshape(3, 3), (X,)),
    "zero-size array": (lambda a: a[:0].max(0), (X,)),
}


@pytest.mark.parametrize("words", UNFIT)
def test_operands_that_do_not_fit(words: str) -> None:
    function, args = UNFIT[words]
    with pytest.raises(Exception) as plain:
        function(*args)
    assert words in refused(lawson.InvalidArgumentError, function, *args)
    with pytest.raises(type(plain.value)):  # code that expects JAX's error gets it
        cpu(function)(*args)
    with pytest.raises(lawson.InvalidArgumentError):
        jax.jit(cpu(function))(*args)


READS: dict[str, tuple[Callable[..., Any], str]] = {
    "bool()": (lambda x: x if x.sum() > 0 else -x, "cannot branch on them"),
    "float()": (lambda x: x * float(x[0, 0]), "cannot make Python numbers"),
    "item()": (lambda x: x * x.sum().item(), "cannot make Python numbers"),
    "an array of NumPy": (lambda x: x * np.asarray(x), "cannot make Python numbers"),
    "an index": (lambda x: range(x[0].argmax()), "cannot make Python numbers"),
    "jnp.nonzero": (lambda x: jnp.nonzero(x), "the shape of its result depends on values"),
    "a boolean index": (lambda x: x[x > 0], "the shape of its result depends on values"),
}


@pytest.mark.parametrize("op", READS)
def test_what_depends_on_values(op: str) -> None:
    function, words = READS[op]
    text = refused(lawson.UnsupportedError, function, X)
    assert f"'lambda': {op} at " in text and words in text
    assert re.search("nearest supported form: (jnp.where|the array itself)", text), text


def test_errors_of_the_function_itself_are_left() -> None:
    def checked(x: Any) -> Any:
        if x.shape[0] != 3:
            raise ValueError("mine")
        return x

    def caught(x: Any) -> Any:
        try:
            return x @ x
        except TypeError:
            return x * 3

    with pytest.raises(ValueError, match="mine") as found:
        cpu(checked)(X)
    assert not isinstance(found.value, lawson.Error)
    with pytest.raises(KeyError):
        cpu(lambda x: {}[x.shape])(X)
    np.testing.assert_allclose(cpu(caught)(X), X * 3)


def test_attention_is_no_part_of_a_fusion() -> None:
    q = jnp.ones((1, 8, 2, 8))
    for function in (
        lambda q: lj.attention(q, q, q, engine="cpu") * 2,
        lambda q: lj.dot_product_attention(q, q, q) * 2,
    ):
        text = refused(lawson.UnsupportedError, function, q)
        assert "attention is a kernel of its own, and no part of a fusion" in text
        assert "lawson.jax.attention beside the fusion" in text


def test_the_nearest_form_is_near() -> None:
    text = refused(lawson.UnsupportedError, lambda x: jnp.arccos(x), X)
    assert "acos at" in text and "the angle outside of the fusion" in text  # which is no cosine
    text = refused(
        lawson.UnsupportedError, lambda x: x + jax.random.normal(jax.random.key(0), (8,)), X
    )
    assert "random numbers as an argument" in text


def test_settings_that_are_not_hashable_are_named() -> None:
    with pytest.raises(lawson.InvalidArgumentError, match=r"hashable: 'm.b': unhashable type: 's"):
        cpu(lambda x, *, m: x)(X, m={"a": 1, "b": {1}})


def test_settings_that_there_are_none_of() -> None:
    with pytest.raises(TypeError, match=r"setting 'engine'; did you mean 'engines='\?"):
        fusion(engine="cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"here engine=; lawson.jax.fusion takes settings"):
        cudnn_fusion(engine="cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lawson.jax.fusion takes settings"):
        cudnn_fusion()
    with pytest.raises(TypeError, match="@staticmethod goes above @fusion"):
        cpu(staticmethod(lambda x: x))


def test_every_refusal_names_the_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAWSON_ENGINE", raising=False)
    many = jnp.ones((300, 300))
    for settings in (
        {},
        {"engines": ["cudnn"]},
        {"engines": ["cpu", "reference"]},
        {"engines": ["cpu"], "target": "h200"},
        {"engines": ["cpu"], "workspace_limit": 0},
    ):
        with pytest.raises(lawson.Error, match="fusion 'lambda'"):
            fusion(lambda x: x @ x.T, **settings)(many)  # type: ignore[arg-type]


def test_results_that_are_no_arrays_are_named() -> None:
    with pytest.raises(lawson.UnsupportedError, match=r"result \['n'\] is 'a' \(str\)"):
        cpu(lambda x: {"y": x, "n": "a"})(X)
    with pytest.raises(lawson.UnsupportedError, match=r"it is .* \(set\)"):
        cpu(lambda x: {x.shape})(X)
    found = cpu(lambda x: (x * 2, None, 3))(X)
    assert found[1] is None and int(found[2]) == 3
