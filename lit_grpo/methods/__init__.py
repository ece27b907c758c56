"""Methods that ship, one file per paper or family, each built only on the extension points of :mod:`lit_grpo.plugins`.

A file has a ``PLUGINS`` table of its plug-ins by name. Deleting the file removes the method, and nothing else changes:
what several methods use is in :mod:`lit_grpo.methods.shared`.
``environments`` and ``agent`` have a package of their own, :mod:`lit_grpo.environments`, and plans of papers have
:mod:`lit_grpo.methods.plans`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from lit_grpo.plugins import Plugin, check_decisions, check_overrides, restricted
from lit_grpo.settings import by_name

SETTING = "rollout.plugins"


@cache
def shipped() -> dict[str, Plugin]:
    names = [f"{__name__}.{module.name}" for module in iter_modules(__path__)]
    names += ["lit_grpo.environments.plugin", "lit_grpo.environments.agent.plugin"]
    modules = [import_module(name) for name in names]
    return {name: plugin for module in modules for name, plugin in getattr(module, "PLUGINS", {}).items()}


def make_plugins(specs: Sequence[str | Mapping[str, Any]]) -> dict[str, Plugin]:
    """Return plug-ins by the names that a user gave them.

    Args:
        specs: For each plug-in its name or class path, as in ``april``; with fields ``april:max_staleness=4`` or
            ``{april: {max_staleness: 4}}``. The further field ``datasets`` limits it to rows of data sets, by a list of
            their names or by one name.

    Raises:
        ValueError: There is no such plug-in or field, a value does not fit, one overrides no hook, or two decide the
            same thing.
    """
    if isinstance(specs, str | Mapping):
        specs = [specs]
    plugins: dict[str, Plugin] = {}
    for spec in specs:
        if not isinstance(spec, str | Mapping):
            raise ValueError(f"{SETTING} has {spec!r}; give a name, a class path, or {{NAME: {{FIELD: VALUE}}}}.")
        name = spec.partition(":")[0] if isinstance(spec, str) else next(iter(spec), "")
        spec, datasets = _without_datasets(name, spec)
        plugin = by_name(SETTING, spec, shipped(), Plugin)
        check_overrides(f"{SETTING} {name}", plugin)
        if datasets:
            plugin, name = restricted(name, plugin, datasets), f"{name} ({', '.join(datasets)})"
        if name in plugins:
            raise ValueError(f"{SETTING} has {name} twice; leave one out.")
        plugins[name] = plugin
    check_decisions([*plugins.items()])
    return plugins


def _without_datasets(name: str, spec: str | Mapping[str, Any]) -> tuple[str | Mapping[str, Any], list[str]]:
    """Return what is given of a plug-in without its field ``datasets``, and the names in that field."""
    if isinstance(spec, str):
        fields = spec.partition(":")[2].split(",")
        datasets: Any = [field.partition("=")[2] for field in fields if field.startswith("datasets=")]
        kept = [field for field in fields if field and not field.startswith("datasets=")]
        spec = f"{name}:{','.join(kept)}" if kept else name
    elif isinstance(fields := spec.get(name), Mapping) and "datasets" in fields:
        datasets = [fields["datasets"]] if isinstance(fields["datasets"], str) else fields["datasets"]
        spec = {name: {field: value for field, value in fields.items() if field != "datasets"}}
    else:
        return spec, []
    if not isinstance(datasets, list) or not all(isinstance(each, str) and each for each in datasets):
        raise ValueError(f"{SETTING} {name}: datasets is {datasets!r}; give names of data sets, as a list.")
    return spec, list(dict.fromkeys(datasets))
