"""The attention implementation "lawson" of transformers: models beside their own attention."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from new_process import in_new_process

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")


@pytest.mark.parametrize("first", ["lawson.torch", "transformers.modeling_utils"])
def test_it_is_registered_in_any_order(first: str) -> None:
    second = {"lawson.torch", "transformers.modeling_utils"} - {first}
    out = in_new_process(
        f"""
import importlib, sys
importlib.import_module("{first}")
if "{first}" == "lawson.torch":
    assert "transformers" not in sys.modules
importlib.import_module("{second.pop()}")
from transformers import AttentionInterface, AttentionMaskInterface
print("lawson" in AttentionInterface(), "lawson" in AttentionMaskInterface())
"""
    )
    assert out.split() == ["True", "True"]


def _model(kind: str, attention: str) -> Any:
    import transformers

    small: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "attn_implementation": attention,
    }
    if kind in ("mistral", "gemma2"):
        small["sliding_window"] = 4
    config = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "gemma2": transformers.Gemma2Config,
    }[kind](**small)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("padded", [False, True])
def test_models_give_what_their_eager_attention_gives(kind: str, padded: bool) -> None:
    """Logits, gradients and tokens that are generated; gemma2 has a softcap and windows."""
    import lawson.torch

    assert lawson.torch
    tokens = torch.randint(1, 50, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :4] = 0
    own, other = _model(kind, "lawson"), _model(kind, "eager")
    found = own(tokens, attention_mask=mask, labels=tokens)
    expected = other(tokens, attention_mask=mask, labels=tokens)
    kept = mask.bool()
    torch.testing.assert_close(found.logits[kept], expected.logits[kept], rtol=1e-4, atol=1e-4)
    (found.logits[kept].sin().sum()).backward()
    (expected.logits[kept].sin().sum()).backward()
    for one, two in zip(own.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-4)
    more = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(own.generate(tokens, **more), other.generate(tokens, **more))
