"""A field of the command line, with short names of classes, and lists that are never merged."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, cast, get_args

import yaml
from jsonargparse import Namespace, _typehints
from jsonargparse._typehints import ActionTypeHint, get_all_subclass_paths

from lit_grpo.cli.parsing.names import FIELDS
from lit_grpo.process.inputs import UNREADABLE_YAML
from lit_grpo.rewards.function import with_function

REWARDS, TEACHER = "model.rewards", "model.teacher"
_typehints.implements_protocol = cache(_typehints.implements_protocol)
"""It compiles the modules of both classes at every question, which takes a second or two of a start."""


class Field(ActionTypeHint):
    """A field whose classes have short names, and whose lists replace earlier lists.

    jsonargparse merges lists of equal length item by item, so a reward function would get the arguments of the one
    before it. ``--model.rewards+`` still appends. If a field's class changes, jsonargparse keeps the settings that the
    new class has too, and drops the others silently; here defaults of the earlier class are not kept, and others that
    are dropped are named. Reward functions may be given by name, and a teacher by its policy.
    """

    def _check_type(self, value: Any, append: bool = False, cfg: Any = None, **options: Any) -> Any:  # pyrefly: ignore[bad-override]
        if self.dest == REWARDS:
            value = _spelled_out(value, append)
        value = self._as_group(value)
        is_list = isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))
        before = _spec(cfg.get(self.dest)) if self.dest in FIELDS and cfg else {}
        value = self._with_path(value) if self.dest in FIELDS else value
        path = value if isinstance(value, str) else _spec(value).get("class_path")
        if before.get("init_args") and path not in (None, before["class_path"]):
            self._leave_out_defaults(cfg[self.dest], before)
        checked = super()._check_type(value, append=append, cfg=None if is_list and not append else cfg, **options)
        if before.get("init_args") and before["class_path"] != _spec(checked).get("class_path", before["class_path"]):
            self._tell_left_out(before, _spec(checked))
        return checked

    def _as_group(self, value: Any) -> Any:
        """Replace a text that stands for a group of fields by the group."""
        kinds = [one for one in get_args(self._typehint) if is_dataclass(one)]
        if not kinds or not isinstance(value, str | int | float) or _is_group(value):
            return value
        if self.dest == TEACHER:
            return {"policy": str(value)}
        first = f"{self.dest}.{fields(kinds[0])[0].name}"
        raise TypeError(f"{self.dest} is {value!r}, but it is a group of fields; give these, such as {first}.")

    def _with_path(self, value: Any) -> Any:
        """Replace the short name of a class by its path."""
        if isinstance(value, str) and value.isidentifier() and value != "null":
            return self._path(value)
        if isinstance(value, Mapping | Namespace) and isinstance(name := value.get("class_path"), str):
            value = value.clone() if isinstance(value, Namespace) else dict(value)
            value["class_path"] = self._path(name)
        return value

    def _path(self, name: str) -> str:
        names = FIELDS[self.dest]
        if name in names or "." in name:
            return names.get(name, name)
        imported = {path.rsplit(".", 1)[-1]: path for path in get_all_subclass_paths(cast(Any, self._typehint))}
        if name not in imported:
            raise TypeError(f"{self.dest} is {name!r}; take {', '.join(names)}, or the path of a class.")
        return imported[name]

    def _leave_out_defaults(self, earlier: Namespace, before: Mapping[str, Any]) -> None:
        """Take what is only the default of the earlier class out of the settings so far, but for ``lr``.

        AdamW's weight decay of 0.01 would otherwise be that of the SGD that takes its place.
        """
        defaults = self.get_class_parser(before["class_path"], self.sub_add_kwargs).get_defaults()
        for name, value in before["init_args"].items():
            if name != "lr" and value == defaults.get(name):
                earlier.init_args.pop(name, None)

    def _tell_left_out(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Name the settings of the earlier class that the new class does not have."""
        defaults, taken = (
            self.get_class_parser(spec["class_path"], self.sub_add_kwargs).get_defaults() for spec in (before, now)
        )
        given = [name for name, value in before["init_args"].items() if value != defaults.get(name)]
        if left_out := [f"{self.dest}.{name}" for name in given if name not in taken]:
            earlier, name = (spec["class_path"].rsplit(".", 1)[-1] for spec in (before, now))
            print(
                f"Left out, because {name} has no such field: {', '.join(left_out)} (set before for {earlier}).",
                file=sys.stderr,
            )

    def extra_help(self) -> str:
        """Return the short names, in place of the classes that happen to be imported."""
        return f", names: {', '.join(FIELDS[self.dest])}" if self.dest in FIELDS else super().extra_help()


def _is_group(value: Any) -> bool:
    """Return whether a value of the command line is a mapping, or null."""
    try:
        read = yaml.safe_load(value) if isinstance(value, str) else value
    except UNREADABLE_YAML:
        return False
    return read is None or isinstance(read, Mapping)


def _spelled_out(value: Any, append: bool) -> Any:
    """Return reward functions as a list of specs; a name becomes a spec, and a single one a list.

    With ``append`` a single one stays alone. Other values are left to the type check.
    """
    if isinstance(value, str):
        text = value.strip()
        if text in ("", "null"):
            return value
        try:
            value = yaml.safe_load(text) if text[0] in "[{" else text
        except UNREADABLE_YAML:
            return value
    if isinstance(value, list):
        return [_reward(each) for each in value]
    reward = _reward(value)
    return reward if append or not isinstance(reward, Mapping) else [reward]


def _reward(value: Any) -> Any:
    if isinstance(value, str):
        return {"function": value}
    value = value.as_dict() if isinstance(value, Namespace) else value
    return with_function(value) if isinstance(value, Mapping) else value


def _spec(value: Any) -> Mapping[str, Any]:
    """Return a class with its arguments as a mapping; an empty one for other values."""
    value = value.as_dict() if isinstance(value, Namespace) else value
    return value if isinstance(value, Mapping) and "class_path" in value else {}
