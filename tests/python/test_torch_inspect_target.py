"""What would run on a GPU that is not here, asked with tensors and arrays of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import lawson
import lawson.jax
import lawson.torch

pytestmark = pytest.mark.skipif(
    "h200" not in {target["name"] for target in lawson.targets()}, reason="built without cuDNN"
)
X, W, B = ((64, 256), (256, 1024), (1024,))


def mlp(x: Any, w: Any, b: Any) -> Any:
    return F.gelu(x @ w + b, approximate="tanh")


def jax_mlp(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(x @ w + b)


def tensors() -> list[torch.Tensor]:
    return [torch.ones(s, dtype=torch.bfloat16).requires_grad_() for s in (X, W, B)]


def arrays() -> list[jax.Array]:
    return [jnp.ones(s, jnp.bfloat16) for s in (X, W, B)]


def asked(inspected: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    try:
        found = inspected(*args)
    except lawson.UnavailableError as error:
        pytest.skip(f"no cuDNN: {error}")
    return found if isinstance(found, tuple) else (found,)


def check(found: tuple[Any, ...], names: list[str], target: str) -> None:
    assert [one.name for one in found] == names
    for one in found:
        assert (one.platform, one.engine, one.plan.target) == ("cuda", "cudnn", target)
        assert one.verdict.supported


@pytest.mark.parametrize("target", ["h200", "b200"])
def test_a_fusion(target: str) -> None:
    (found,) = asked(lawson.torch.inspect(lawson.torch.fusion(mlp), target=target), *tensors())
    check((found,), ["mlp"], target)
    (named,) = asked(lawson.torch.inspect(lawson.torch.fusion(mlp, target=target)), *tensors())
    assert named.plan_id == found.plan_id
    (other,) = asked(lawson.jax.inspect(lawson.jax.fusion(jax_mlp), target=target), *arrays())
    check((other,), ["jax_mlp"], target)
    (named,) = asked(lawson.jax.inspect(lawson.jax.fusion(jax_mlp, target=target)), *arrays())
    assert named.plan_id == other.plan_id


def test_a_step_of_training() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(128, 128).bfloat16()

        @lawson.torch.fusion
        def act(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.linear(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lawson.torch.patch():
                heads = self.act(x).view(2, 64, 2, 64).transpose(1, 2)
                out: torch.Tensor = F.scaled_dot_product_attention(heads, heads, heads)
                return out

    block = Block()
    x = torch.ones(128, 128, dtype=torch.bfloat16, requires_grad=True)
    found = asked(lawson.torch.inspect(lambda x: block(x).sum().backward(), target="h200"), x)
    passes = ["attention.forward", "attention.backward"]
    check(found, ["Block.act", *passes, "Block.act.backward"], "h200")
    assert block.linear.weight.grad is None

    def loss(x: Any, w: Any) -> Any:
        heads = lawson.jax.fusion(lambda x, w: jax.nn.relu(x @ w))(x, w).reshape(2, 64, 2, 64)
        return lawson.jax.dot_product_attention(heads, heads, heads).sum()

    given = [jnp.ones((128, 128), jnp.bfloat16)] * 2
    found = asked(lawson.jax.inspect(jax.grad(loss, (0, 1)), target="h200"), *given)
    assert [one.name for one in found if one.name.startswith("attention")] == passes
    assert all((one.engine, one.plan.target) == ("cudnn", "h200") for one in found)


def test_a_refusal_is_the_targets() -> None:
    for inspected, args in (
        (lawson.torch.inspect(lawson.torch.fusion(mlp), target="v100"), tensors()),
        (lawson.jax.inspect(lawson.jax.fusion(jax_mlp), target="v100"), arrays()),
    ):
        with pytest.raises(lawson.UnsupportedError, match="v100 has compute capability 7.0"):
            asked(inspected, *args)
    q = torch.ones(1, 2, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(lawson.UnsupportedError, match="cuDNN's attention needs 8.0"):
        asked(lawson.torch.inspect(lawson.torch.attention, target="v100"), q, q, q)
    with pytest.raises(lawson.InvalidArgumentError, match="target: .*h300"):
        lawson.torch.inspect(mlp, target="h300")
    with pytest.raises(lawson.InvalidArgumentError, match="target: .*h300"):
        lawson.jax.inspect(jax_mlp, target="h300")


def test_what_runs_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking about another device selects nothing of what runs here."""
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")
    fused = lawson.torch.fusion(mlp)
    asked(lawson.torch.inspect(fused, target="h200"), *tensors())
    here: Any = lawson.torch.inspect(fused)(*tensors())
    assert (here.platform, here.engine) == ("cpu", "cpu")
    assert torch.equal(fused(*tensors()), lawson.torch.fusion(mlp)(*tensors()))
    again = lawson.jax.fusion(jax_mlp)
    asked(lawson.jax.inspect(again, target="h200"), *arrays())
    assert lawson.jax.inspect(again)(*arrays()).engine == "cpu"
    assert (again(*arrays()) == lawson.jax.fusion(jax_mlp)(*arrays())).all()
