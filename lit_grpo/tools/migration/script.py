"""Reads a Python script that trains with TRL, without running it: the fields that ``trl grpo --config`` would have."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from lit_grpo.process.inputs import UNREADABLE_YAML, read_text
from lit_grpo.tools.migration.table import SFT, TRAINER, TRL
from lit_grpo.tools.migration.trl import OLD, REWARDS

Trainer = Literal["GRPO", "SFT"]
POSITIONS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
"""The first arguments of GRPOTrainer; SFTTrainer has others, and is read by names alone."""
PEFT = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "task_type": "lora_task_type",
}
"""Fields of peft's LoraConfig, and those of TRL's ModelConfig."""
PEFT_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Those of LoraConfig, where ModelConfig has others."""
QUANTIZATION = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
    "bnb_4bit_compute_dtype": None,
}
"""Fields of transformers' BitsAndBytesConfig, and those of ModelConfig."""
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
PARSES = ("parse_args_and_config", "parse_args_into_dataclasses")
"""Methods of TrlParser and HfArgumentParser."""
_DEPTH = 20
"""Max number of names and operators between a field and its value."""
MOST_BYTES, MOST_VALUES = 2**20, 10_000
"""The size of a script, and the values in its arguments, up to which it is read: lists of names may be huge."""


@dataclass
class Script:
    """The settings of a script.

    Args:
        trainer: Name of TRL's trainer that the script uses.
        fields: Fields of ``trl grpo --config`` or ``trl sft --config`` with their values.
        turns: Fields of the plug-in ``environments``: the environments and tools.
        unread: Sentences on what is known only when the script runs, by the name of the argument.
        notes: What to do about parts that are written in code.
    """

    trainer: Trainer
    fields: dict[str, Any] = field(default_factory=dict)
    turns: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _Unknown(ValueError):
    """A value is known only when the script runs."""


def read_script(path: Path, flags: Sequence[str] = ()) -> Script:
    """Read a script that calls ``GRPOTrainer`` or ``SFTTrainer``, or makes their config, by its syntax alone.

    Args:
        path: The script. It is parsed, and neither imported nor run.
        flags: The arguments that the script is run with, for one that takes its config from TRL's ``TrlParser``.

    Raises:
        ValueError: It is no Python, or makes neither a trainer nor a config of TRL.
    """
    try:
        tree = ast.parse(read_text(path, MOST_BYTES))
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"{path} is no Python that can be parsed ({error}); correct it.") from error
    return _Reader(path, tree, flags).read()


def _read_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Return ``--name value ...`` as fields; one without a value is true.

    Raises:
        ValueError: The first is no name.
    """
    given: dict[str, list[Any]] = {}
    for flag in flags:
        if flag.startswith("--"):
            name, equals, value = flag.removeprefix("--").partition("=")
            given[name] = [_number_of(value)] if equals else []
        elif not given:
            raise ValueError(f"the script's arguments begin with {flag!r}; begin with a name, such as --learning_rate.")
        else:
            given[next(reversed(given))].append(_number_of(flag))
    return {name: values if len(values) > 1 else values[0] if values else True for name, values in given.items()}


def _number_of(text: str) -> Any:
    """Return a flag's value: YAML reads ``1e-5`` as text, and a number is meant."""
    with suppress(ValueError):
        return float(text) if "e" in text.lower() else int(text)
    try:
        return yaml.safe_load(text)
    except UNREADABLE_YAML:
        return text


class _Reader:
    """Values of a script's names, and the arguments of the calls that are looked for."""

    def __init__(self, path: Path, tree: ast.Module, flags: Sequence[str]) -> None:
        self._path, self._tree, self._flags = path, tree, _read_flags(flags)
        self._num_values = 0
        self._parsed: set[str] = set()  # names of what TrlParser gives
        self._values: dict[str, ast.expr] = {}  # of names that are assigned once
        self._sources: dict[str, str] = {}  # import path by the name in the script
        self._definitions = {each.name for each in tree.body if isinstance(each, _DEFINED)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._note(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._note(node.target, node.value)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self._sources[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        stored = Counter(each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and _is_stored(each))
        stored.update(each.arg for each in ast.walk(tree) if isinstance(each, ast.arg))
        self._values = {name: node for name, node in self._values.items() if stored[name] == 1}

    def _note(self, target: ast.expr, value: ast.expr) -> None:
        """Note what a name, or each name of a tuple, stands for."""
        if isinstance(value, ast.Call) and self._called(value) in PARSES:
            self._parsed |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
        elif isinstance(target, ast.Name):
            self._values[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for each, its in zip(target.elts, value.elts, strict=True):
                self._note(each, its)

    def read(self) -> Script:
        makers = {f"{kind}{part}": kind for kind in ("GRPO", "SFT") for part in ("Trainer", "Config")}
        calls = [(makers[name], name, node) for node in self._calls() if (name := self._called(node)) in makers]
        configs = [node for _, name, node in calls if name.endswith("Config")]
        trainers = [node for _, name, node in calls if name.endswith("Trainer")]
        if not calls:
            raise ValueError(
                f"{self._path} calls neither GRPOTrainer nor GRPOConfig by name; give the script that does, or a YAML "
                "file as for trl grpo --config."
            )
        for found, what in ((configs, "configs"), (trainers, "trainers")):
            if len(found) > 1:
                lines = ", ".join(str(node.lineno) for node in found)
                raise ValueError(f"{self._path} makes {len(found)} {what} of TRL (lines {lines}); leave one of them.")
        self._script = Script("SFT" if calls[0][0] == "SFT" else "GRPO")
        given = self._trainer_arguments(trainers[0]) if trainers else {}
        config = given.pop("args", None)
        is_parsed = isinstance(config, ast.Name) and config.id in self._parsed
        if config is not None and not configs and not is_parsed:
            raise ValueError(
                f"{self._path} takes the config of its trainer from {ast.unparse(config)}, which is known only when it "
                "runs; write GRPOConfig(...) there, or give a YAML file as for trl grpo --config."
            )
        if self._flags and not self._parsed:
            raise ValueError(f"{self._path} parses no arguments by TrlParser; leave out those after --.")
        self._script.fields |= self._flags
        if configs:
            self._read_config(configs[0])
        self._read_attributes({config.id} if isinstance(config, ast.Name) else set())
        for name, value in given.items():
            self._read_argument(name, value)
        return self._script

    # ---- names and values --------------------------------------------------------------------------

    def _calls(self) -> Iterator[ast.Call]:
        return (node for node in ast.walk(self._tree) if isinstance(node, ast.Call))

    def _called(self, node: ast.Call) -> str:
        """Return the last name of what is called, by its name where it was imported from."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        return self._sources.get(name, name).rpartition(".")[2]

    def _resolved(self, node: ast.expr) -> ast.expr:
        """Return what a name stands for, if it is assigned once; else the node itself."""
        for _ in range(_DEPTH):
            if not isinstance(node, ast.Name) or node.id not in self._values:
                break
            node = self._values[node.id]
        return node

    def _value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of literals, names of them, and sums and products of numbers.

        Raises:
            _Unknown: It is something else.
        """
        node, deeper = self._resolved(node), depth + 1
        self._num_values += 1
        if depth > _DEPTH or self._num_values > MOST_VALUES:
            raise _Unknown
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List() | ast.Tuple():
                return [self._value(each, deeper) for each in node.elts]
            case ast.Dict() if None not in node.keys:
                keys = [str(self._value(each, deeper)) for each in node.keys if each is not None]
                return dict(zip(keys, (self._value(each, deeper) for each in node.values), strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=[]) if all(each.arg for each in node.keywords):
                return {str(each.arg): self._value(each.value, deeper) for each in node.keywords}
            case ast.UnaryOp(op=ast.USub()):
                return -_number(self._value(node.operand, deeper))
            case ast.BinOp() if (run := _OPERATORS.get(type(node.op))) is not None:
                sides = [_number(self._value(each, deeper)) for each in (node.left, node.right)]
                if sides[1] == 0 and isinstance(node.op, ast.Div | ast.FloorDiv):
                    raise _Unknown
                try:
                    return run(*sides)
                except OverflowError:
                    raise _Unknown from None
            case ast.JoinedStr():
                parts = (each.value if isinstance(each, ast.FormattedValue) else each for each in node.values)
                return "".join(str(self._value(each, deeper)) for each in parts)
            case ast.Attribute(value=ast.Name(id="torch")):
                return node.attr
            case ast.Attribute(value=ast.Name(id=name)) if name in self._parsed and (SFT | TRL).keys() & {node.attr}:
                table = SFT if self._script.trainer == "SFT" else TRL
                return self._flags.get(node.attr, table[node.attr].default)
        raise _Unknown

    def _arguments(self, node: ast.Call, positions: tuple[str, ...] = ()) -> dict[str, ast.expr]:
        """Return the arguments of a call by name; those of ``**mapping`` where that is a literal."""
        given = dict(zip(positions, node.args, strict=False))
        for each in node.keywords:
            if each.arg is not None:
                given[each.arg] = each.value
                continue
            mapping = self._resolved(each.value)
            if isinstance(mapping, ast.Call) and self._called(mapping) == "dict":
                given |= self._arguments(mapping)
            elif isinstance(mapping, ast.Dict):
                pairs = zip(mapping.keys, mapping.values, strict=True)
                given |= {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
            else:
                self._unread(f"**{ast.unparse(each.value)}", each.value)
        return given

    def _unread(self, name: str, node: ast.expr, remedy: str = "write its value there, or leave it out") -> None:
        self._script.unread[name] = (
            f"{name} is {ast.unparse(node):.80} in {self._path.name}, line {node.lineno}, which is known only when "
            f"the script runs: {remedy}."
        )

    # ---- the config --------------------------------------------------------------------------------

    def _read_config(self, node: ast.Call) -> None:
        self._take(self._arguments(node, ("output_dir",)))

    def _read_attributes(self, configs: Collection[str]) -> None:
        """Read ``config.learning_rate = 1e-5``, after the config has been made."""
        for each in ast.walk(self._tree):
            match each:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr=attribute)]) if name in configs:
                    if not (attribute == "model_init_kwargs" and self._is_of_flags(each.value)):
                        self._take({attribute: each.value})

    def _is_of_flags(self, node: ast.expr) -> bool:
        """Return whether an expression uses what TrlParser gives, so that the flags say it already."""
        return any(isinstance(each, ast.Name) and each.id in self._parsed for each in ast.walk(node))

    def _take(self, given: Mapping[str, ast.expr]) -> None:
        for name, node in given.items():
            try:
                self._script.fields[name] = self._value(node)
            except _Unknown:
                self._unread(name, node)

    # ---- the trainer -------------------------------------------------------------------------------

    def _trainer_arguments(self, node: ast.Call) -> dict[str, ast.expr]:
        return self._arguments(node, POSITIONS if self._script.trainer == "GRPO" else ("model", "args"))

    def _read_argument(self, name: str, given: ast.expr) -> None:
        node = self._resolved(given)
        if isinstance(node, ast.Constant) and node.value is None:
            return
        if name in ("peft_config", "quantization_config") and self._is_of_flags(node):
            return  # such as get_peft_config(model_args)
        match name:
            case "model":
                self._read_model(node)
            case "reward_funcs":
                self._read_rewards(node)
            case "train_dataset":
                self._read_rows(given, "train")
            case "eval_dataset":
                self._read_rows(given, "test")
            case "peft_config":
                self._read_parts(node, "LoraConfig", PEFT, {"use_peft": True, **PEFT_DEFAULTS})
            case "quantization_config":
                self._read_parts(node, "BitsAndBytesConfig", QUANTIZATION, {})
            case "environment_factory" | "tools":
                self._read_turns("factory" if name == "environment_factory" else name, node)
            case "processing_class":
                if not (isinstance(node, ast.Call) and self._called(node) == "from_pretrained"):
                    self._script.notes.append("processing_class: the tokenizer is that of the policy's folder or id")
            case _:
                row = TRAINER.get(name)
                remedy = OLD.get(name) or (row.note if row else "it is no argument of GRPOTrainer")
                self._script.unread[name] = (
                    f"{name} of the trainer is {ast.unparse(given):.80}, which is not converted: {remedy}."
                )

    def _read_model(self, node: ast.expr) -> None:
        if not (isinstance(node, ast.Call) and self._called(node) == "from_pretrained" and node.args):
            self._take({"model_name_or_path": node})
            return
        given = self._arguments(node, ("model_name_or_path",))
        known = {"dtype": "dtype", "torch_dtype": "dtype", "attn_implementation": "attn_implementation"}
        known |= {"revision": "model_revision", "trust_remote_code": "trust_remote_code"}
        self._take({known.get(name, name): value for name, value in given.items() if name in (*known, POSITION)})
        if "quantization_config" in given:
            self._read_argument("quantization_config", given["quantization_config"])
        others = [name for name in given if name not in (*known, POSITION, "quantization_config")]
        if others:
            self._script.notes.append(f"model: from_pretrained's {', '.join(others)} has no counterpart")

    def _read_parts(
        self, node: ast.expr, kind: str, names: Mapping[str, str | None], defaults: Mapping[str, Any]
    ) -> None:
        """Read the arguments of one of the configs of other libraries."""
        if not (isinstance(node, ast.Call) and self._called(node) == kind):
            self._unread(kind, node, f"write {kind}(...) there")
            return
        self._script.fields |= defaults
        given = self._arguments(node)
        self._take({names[name] or "": value for name, value in given.items() if names.get(name)})
        for name in given.keys() - names.keys() - {"bias"}:
            self._script.unread[name] = f"{name} of {kind} is {ast.unparse(given[name]):.80}, which has no counterpart."

    def _read_turns(self, field: str, node: ast.expr) -> None:
        """Read environments, by their names or one alone, or tools, as fields of the plug-in ``environments``."""
        match node:
            case ast.Dict():
                names = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
                self._script.turns[field] = {
                    str(name): self._path_of(each) for name, each in zip(names, node.values, strict=True)
                }
            case ast.List() | ast.Tuple():
                self._script.turns[field] = [self._path_of(each) for each in node.elts]
            case _:
                self._script.turns[field] = self._path_of(node)

    def _path_of(self, node: ast.expr) -> str | None:
        """Return the path of a function or class that the script defines or imports; None if there is none."""
        name = node.id if isinstance(node, ast.Name) else ""
        if name in self._definitions:
            if self._trains_when_imported():
                self._script.unread[name] = (
                    f"{name} is defined in {self._path.name}, which trains when it is imported: put the call of train "
                    'under if __name__ == "__main__":, or the definition into a file of its own.'
                )
            return f"{self._path}:{name}"
        if name in self._sources:
            return self._sources[name]
        self._unread(ast.unparse(node)[:40], node, "name a function or class that the script defines or imports")
        return None

    def _read_rewards(self, node: ast.expr) -> None:
        each = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        rewards = [self._reward(one) for one in each]
        if None not in rewards:
            self._script.fields["reward_funcs"] = rewards

    def _reward(self, node: ast.expr) -> Any:
        """Return a reward function's name, path or fields; None if it cannot be named."""
        node = self._resolved(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._script.unread["reward_funcs"] = (
                f"reward_funcs has the reward model {node.value!r}: leave it out here, and add the reward "
                "reward_model with its argument model to model.rewards."
            )
            return None
        if isinstance(node, ast.Call) and self._called(node) == "get_soft_overlong_punishment":
            known = {"max_completion_len": "max_tokens", "soft_punish_cache": "buffer"}
            given = self._arguments(node, ("max_completion_len", "soft_punish_cache"))
            try:
                args = {known[name]: self._value(value) for name, value in given.items() if name in known}
            except _Unknown:
                self._unread("get_soft_overlong_punishment", node)
                return None
            return REWARDS["get_soft_overlong_punishment"] | {"args": args}
        if isinstance(node, ast.Name) and node.id in REWARDS and self._sources.get(node.id, "").startswith("trl."):
            return node.id
        return self._path_of(node)

    def _trains_when_imported(self) -> bool:
        """Return whether a statement of the script's own level calls ``train`` or a function of the script."""
        for each in self._tree.body:
            if isinstance(each, ast.Expr | ast.Assign) and isinstance(each.value, ast.Call):
                called = self._called(each.value)
                if called == "train" or called in self._definitions:
                    return True
        return False

    def _read_rows(self, given: ast.expr, split: Literal["train", "test"]) -> None:
        """Read ``load_dataset(...)``; rows that code of the script makes are to be written to a file."""
        node = loaded = self._resolved(given)
        part = None
        if isinstance(node, ast.Subscript):
            loaded, part = self._resolved(node.value), node.slice
        if isinstance(loaded, ast.Call) and self._called(loaded) == "load_dataset":
            taken = self._arguments(loaded, ("path", "name"))
            part = taken.pop("split", part)
            places = {"path": "dataset_name", "name": "dataset_config"}
            if taken.keys() <= places.keys() and part is not None:
                try:
                    read = {places[name]: self._value(value) for name, value in taken.items()}
                    read[f"dataset_{split}_split"] = self._value(part)
                except _Unknown:
                    read = {}
                shared = {name: value for name, value in read.items() if name in places.values()}
                if read and all(self._script.fields.get(name, value) == value for name, value in shared.items()):
                    self._script.fields |= read
                    return
        argument = "train_dataset" if split == "train" else "eval_dataset"
        file, rows = f"{argument}.jsonl", given.id if isinstance(given, ast.Name) else argument
        self._script.fields["dataset_name" if split == "train" else "dataset_test_split"] = file
        self._script.notes.append(
            f"{argument}: code of {self._path.name} makes these rows (line {node.lineno}): write them to the file that "
            f'is named here, with {rows}.to_json("{file}") in the script'
        )


POSITION = "model_name_or_path"
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unknown
    return value


def plain_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a ``GRPOConfig`` or ``SFTConfig`` that differ from their defaults, as a YAML file has them.

    Args:
        config: The object. What it works out of other fields when it is made is left out.

    Raises:
        ValueError: It is no dataclass of TRL.
    """
    if not is_dataclass(config) or isinstance(config, type) or not hasattr(config, "per_device_train_batch_size"):
        raise ValueError(f"config is of type {type(config).__name__}; give a GRPOConfig or an SFTConfig.")
    given: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        value = getattr(value, "value", value)  # of an enumeration
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if value != default and value not in (None, []) and each.name not in WORKED_OUT:
            given[each.name] = value
    if given.get("steps_per_generation") == given.get("gradient_accumulation_steps", 1):
        given.pop("steps_per_generation")
    return given


WORKED_OUT: Collection[str] = (
    *("accelerator_config", "dataloader_pin_memory", "debug", "disable_tqdm", "generation_batch_size"),
    *("pad_to_multiple_of", "local_rank"),
)
"""Fields that a config of TRL sets itself when it is made, or that say nothing of the training."""
