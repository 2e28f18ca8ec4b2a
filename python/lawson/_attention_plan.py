"""The verdict on an attention spec, and the engine that runs it: the same in every frontend."""

from __future__ import annotations

from lawson import _core, _settings
from lawson._attention_setup import Setup
from lawson._errors import UnsupportedError


def judge(spec: str, device: _core.Device, options: _core.Options) -> _core.Verdict:
    """The verdict. Raises UnsupportedError, with every reason, unless it is `supported`."""
    verdict = _core.attention_select(_core.AttentionConfig.from_spec(spec), device, options)
    if not verdict.supported:
        raise UnsupportedError("; ".join(message for _, message in verdict.reasons if message))
    return verdict


def options_of(setup: Setup, platform: str, spec: str, device: _core.Device) -> _core.Options:
    """The options of judging and compiling, with the engine that runs; None: the device's own.

    Of several that LAWSON_ENGINE names, under policy "allow", it is the first that supports the
    spec. Raises UnsupportedError, with the reasons of each, where none does.
    """
    choice = setup.choice
    engines: tuple[str | None, ...] = (choice.engine,)
    if device.is_present:
        given = None if choice.engine is None else tuple(choice.engine.split(","))
        engines = _settings.engines_on(platform, given, name="engine") or (None,)
    reasons: list[str] = []
    for engine in engines:
        options = _core.Options(
            engine=engine,
            workspace_limit=choice.workspace_limit,
            tuning=choice.tuning,
            deterministic=setup.deterministic,
        )
        if len(engines) == 1:
            return options
        try:
            judge(spec, device, options)
            return options
        except UnsupportedError as error:
            reasons.append(f"{engine}: {error}")
    raise UnsupportedError(f"attention: no engine named has it; {'; '.join(reasons)}")
