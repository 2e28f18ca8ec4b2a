"""500 random attention calls through jit, grad and vmap, element by element against f64.

What jax.nn has too is compared with XLA's results, call by call.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from attention_cases import CASES, Case

CALLS = 500


def _elements(case: Case, rng: np.random.Generator) -> tuple[dict[str, Any], list[Any]]:
    """Arrays with those of `mapped` stacked, and each element's own."""
    first, info = case.draw(rng)
    like = None if {"seqlens_kv", "cu_seqlens_q"} & set(case.mapped) else info
    drawn = [(first, info), *(case.draw(rng, like) for _ in range(case.elements - 1))]
    elements = []
    for arrays, own in drawn:
        arrays = {name: arrays[name] if name in case.mapped else first[name] for name in first}
        mixed = {name: own[name] if name in case.mapped else info[name] for name in info}
        if "seqlens_kv" in case.mapped:
            mixed["lk"] = own["lk"]
        if "cu_seqlens_q" in case.mapped:
            mixed = own
            arrays["dlse"] = first["dlse"]
        elements.append((arrays, mixed))
    stacked = {
        name: np.stack([arrays[name] for arrays, _ in elements])
        if name in case.mapped
        else first[name]
        for name in first
    }
    return stacked, elements


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_random_calls(case: Case) -> None:
    """Output, log-sum-exp and every gradient of the case's share of the 500 calls."""
    wide = jax.enable_x64(True) if case.dtype == "float64" else contextlib.nullcontext()
    with wide:
        _calls(case)


def _calls(case: Case) -> None:
    rng = np.random.default_rng([20, CASES.index(case)])
    calls = len(range(CASES.index(case), CALLS, len(CASES)))
    run = case.with_gradients
    if not case.mapped:
        run, by_xla = jax.jit(run), jax.jit(case.by_xla)
        for _ in range(calls):
            arrays, info = case.draw(rng)
            results, gradients = run(arrays)
            case.check(arrays, info, results, gradients)
            if case.is_jax_nn:
                case.check_xla(arrays, info, results, by_xla)
        return
    for call in itertools.count():
        if call * case.elements >= calls:
            return
        stacked, elements = _elements(case, rng)
        axes = ({name: 0 if name in case.mapped else None for name in stacked},)
        if call == 0:
            run = jax.jit(jax.vmap(case.with_gradients, in_axes=axes))
        results, gradients = run(stacked)
        for n, (arrays, info) in enumerate(elements):
            own = {name: np.asarray(x)[n] for name, x in gradients.items()}
            case.check(arrays, info, [np.asarray(x)[n] for x in results], own)
