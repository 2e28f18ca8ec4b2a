"""The attention implementation "lawson" of transformers: models beside their own attention."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import lawson
from new_process import in_new_process

installed = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAWSON_ENGINE", "cpu")


@installed
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


@pytest.mark.parametrize("name", ["position_bias", "head_mask"])
def test_what_would_change_the_numbers_is_not_dropped(name: str) -> None:
    from lawson.torch._huggingface import attention_forward

    q = torch.randn(1, 2, 3, 8)
    attention_forward(None, q, q, q, None, **{name: None})
    with pytest.raises(lawson.UnsupportedError, match=f"'lawson': {name} is not supported"):
        attention_forward(None, q, q, q, None, **{name: torch.ones(2)})


# Packages of this name with what registration looks for, to be put in front of an installed one.
_TABLES = """
class _Table(dict):
    @classmethod
    def register(cls, name, function): cls.known[name] = function
class AttentionInterface(_Table): known = {}
class AttentionMaskInterface(_Table): known = {}
"""


def _package(folder: Path, init: str, models: str = "") -> str:
    """Code that makes this the package transformers."""
    package = folder / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    (package / "masking_utils.py").write_text("def sdpa_mask(): ...")
    (package / "modeling_utils.py").write_text(models)
    return f"import sys; sys.path.insert(0, {str(folder)!r})\n"


def test_a_version_without_a_table_is_left_alone(tmp_path: Path) -> None:
    out = in_new_process(
        _package(tmp_path, "")
        + """
import lawson.torch
import transformers.modeling_utils
lawson.torch._huggingface.register_when_imported()  # as where it was imported before
print(lawson.torch.attention is not None)
"""
    )
    assert out.split() == ["True"]


def test_a_module_keeps_its_loader_and_a_failed_import_is_waited_for_again(tmp_path: Path) -> None:
    models = "import builtins\nif not hasattr(builtins, 'ready'): raise ImportError('not yet')"
    out = in_new_process(
        _package(tmp_path, _TABLES, models)
        + """
import builtins, importlib, inspect
import lawson.torch
before = len(sys.meta_path)
try:
    import transformers.modeling_utils
except ImportError as error:
    assert str(error) == "not yet"
builtins.ready = True
import transformers.modeling_utils as models
assert len(sys.meta_path) == before - 1  # nobody waits any more
from transformers import AttentionInterface, AttentionMaskInterface
print("lawson" in AttentionInterface.known, "lawson" in AttentionMaskInterface.known)
print(type(models.__spec__.loader).__name__, type(models.__loader__).__name__)
print("ready" in inspect.getsource(models), importlib.reload(models) is models)
"""
    )
    assert out.split() == ["True", "True", *["SourceFileLoader"] * 2, "True", "True"]


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


@installed
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
