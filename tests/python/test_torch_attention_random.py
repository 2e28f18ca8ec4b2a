"""1,000 random calls of lawson.torch.scaled_dot_product_attention against torch's, in f64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lawson.torch import scaled_dot_product_attention
from torch_attention_calls import Call, check

_GROUPS = 10
_CALLS = 1000
_SHARES = {torch.float32: 0.55, torch.float64: 0.15, torch.bfloat16: 0.15, torch.float16: 0.15}


@pytest.mark.parametrize("group", range(_GROUPS))
def test_random_calls(group: int) -> None:
    for call in range(group, _CALLS, _GROUPS):
        drawn = Call.draw(np.random.default_rng([31, call]), "cpu", _SHARES)
        check(drawn, scaled_dot_product_attention, engine="cpu")
