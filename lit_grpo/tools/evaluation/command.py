"""``python -m lit_grpo evaluate``: several policies on the same held-out rows, with the settings of a run."""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import lightning.pytorch as pl
import torch

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.checkpoints import read
from lit_grpo.checks import check_prompt_lengths
from lit_grpo.cli.command_line import GROUPS, LikeFitCLI, run
from lit_grpo.cli.parsing.refusals import check_settings, check_values
from lit_grpo.cli.parsing.sentences import CONFIG, SentenceParser, exit_with
from lit_grpo.data.chat import without_files
from lit_grpo.display.screen import tell, the_console
from lit_grpo.module import GRPOModule
from lit_grpo.policy.loading import load_tokenizer, longest_sequence
from lit_grpo.process.files import PrivateFolder
from lit_grpo.process.inputs import read_yaml
from lit_grpo.process.signals import exit_on_signals
from lit_grpo.process.terminal import counted, say
from lit_grpo.tools.evaluation.answers import Answers, find_answers
from lit_grpo.tools.evaluation.harness import HarnessTask, adds_special_tokens, make_task
from lit_grpo.tools.evaluation.held_out import Collector, HeldOutRows, SamplingPass, Scored
from lit_grpo.tools.evaluation.policies import PolicySource, find_policies
from lit_grpo.tools.evaluation.result import Conditions, Result, write_completions
from lit_grpo.training.run_folder import RunFolder
from lit_grpo.types import RolloutGroup

Split = Literal["test", "validation"]
ON_ONE_DEVICE = {
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "logger": False,
    "enable_progress_bar": False,
    "fast_dev_run": False,
    "limit_val_batches": 1.0,
    "limit_test_batches": 1.0,
}
"""Settings of the trainer: all rows, on one device, and no files."""


@dataclass(frozen=True)
class Options:
    """The arguments of ``evaluate`` alone.

    Args:
        policies: The policies; none for that of the config.
        split: The rows; None for ``test`` if the data has it, otherwise ``validation``.
        samples: Number of sampled completions per row; 0 for greedy completions alone.
        ks: Values of k for pass@k.
        answer: Regular expression of a completion's answer; None if the rewards say it.
        output: Folder of the files; None for that of the last policy's run.
        lm_eval: Folder of a task for the lm-evaluation-harness; None for no task.
    """

    policies: tuple[PolicySource, ...]
    split: Split | None
    samples: int
    ks: tuple[int, ...]
    answer: str | None
    output: Path | None
    lm_eval: Path | None


def read_options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the arguments of ``evaluate`` alone, and those of ``fit``.

    Without ``--config``, the config of the last policy's run is added, if the policy belongs to one.

    Raises:
        ValueError: A policy cannot be found, or a value cannot be used.
    """
    given = list(itertools.takewhile(lambda one: not one.startswith("-"), arguments))
    parser = SentenceParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--split", choices=("test", "validation"))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--k", type=int, nargs="+")
    parser.add_argument("--answer")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--lm-eval", type=Path)
    own, others = parser.parse_known_args(list(arguments[len(given) :]))
    if own.samples < 0:
        raise ValueError(
            f"--samples is {own.samples}; give the number of completions per row, or 0 for greedy ones alone."
        )
    ks = own.k
    if ks is None:
        ks = [2**power for power in range(own.samples.bit_length())]
    for k in ks:
        if not 1 <= k <= own.samples:
            raise ValueError(
                f"--k is {k}, but pass@k needs k from 1 to the number of completions per row, and --samples is "
                f"{own.samples}; raise --samples, or lower --k."
            )
    for name, place in (("--output", own.output), ("--lm-eval", own.lm_eval)):
        if place is not None and place.exists() and not place.is_dir():
            raise ValueError(f"{name} {str(place)!r} is a file; give a folder.")
    policies = tuple(find_policies(given))
    run_folder = policies[-1].run if policies else None
    if not any(one in CONFIG or one.startswith("--config=") for one in others) and run_folder is not None:
        config = run_folder / "config.yaml"
        try:
            read_yaml(config)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ValueError(f"{config} cannot be read ({error.strerror}); make it readable.") from None
        else:
            say(f"Settings: {config}")
            others = ["--config", str(config), *others]
    output = own.output
    if output is None and run_folder is not None:
        output = run_folder / "evaluation"
    return Options(policies, own.split, own.samples, tuple(sorted(set(ks))), own.answer, output, own.lm_eval), others


class Candidate(NamedTuple):
    """A policy with what evaluates it; nothing is loaded yet."""

    source: PolicySource
    trainer: pl.Trainer
    module: GRPOModule
    data: HeldOutRows
    scheduler: RolloutScheduler
    sync: WeightSync


class EvaluateCLI(LikeFitCLI):
    """Sets up an evaluation of each policy as ``validate`` or ``test`` does, on one device.

    Args:
        options: The arguments of ``evaluate`` alone.
        scratch: Folder for what parts of a run write.
        run_folder: The folder of a run, which stays unclaimed.
        kwargs: Keyword arguments that are passed on to LightningCLI.
    """

    def __init__(self, options: Options, scratch: Path, run_folder: RunFolder, **kwargs: Any) -> None:
        self._options, self._scratch = options, scratch
        self._candidates: list[Candidate] = []
        super().__init__(run_folder, **{**kwargs, "datamodule_class": HeldOutRows})

    def before_instantiate_classes(self) -> None:
        """Check the settings, and let nothing be written."""
        settings = self._settings
        check_values(settings, GROUPS)
        for name, value in ON_ONE_DEVICE.items():
            settings["trainer"][name] = value
        settings["trainer"]["default_root_dir"] = str(self._scratch)
        settings["run"]["wandb"], settings["ckpt_path"], settings["weights_only"] = "disabled", None, True
        self.save_config_callback = None
        check_settings(settings, fits=False)
        data = settings["data"]
        self._split: Split = self._options.split or ("validation" if data["test"] is None else "test")
        if data[self._split] is None and self._options.split is None:
            raise ValueError(
                "There are no held-out rows, because neither data.test nor data.validation is set; give one of them a "
                "file, a folder, a dataset id or the class path of a RowSource."
            )

    def instantiate_classes(self) -> None:
        """Make the objects of each policy; no policy is loaded."""
        settings = self._settings
        dtype = settings["model"]["dtype"]
        for source in self._options.policies or find_policies([settings["model"]["policy"]]):
            settings["model"]["policy"] = settings["data"]["policy"] = source.policy
            settings["model"]["lora"], settings["model"]["dtype"] = source.lora, source.dtype or dtype
            super().instantiate_classes()
            scheduler, sync = (self._get(self.config_init, name) for name in ("rollout", "weight_sync"))
            trainer, module, data = cast(Any, self.trainer), cast(Any, self.model), cast(Any, self.datamodule)
            self._candidates.append(Candidate(source, trainer, module, data, scheduler, sync))

    def before_fit(self) -> None:
        """Find all mistakes, and make the folder of the files."""
        stage = "test" if self._split == "test" else "validate"
        for candidate in self._candidates:
            _set_up(candidate, stage, self._split)
        self._num_left_out = _keep_common_rows([one.data for one in self._candidates], self._split)
        module = self._candidates[0].module
        if not module.rewards:
            raise ValueError(
                "model.rewards is empty, so nothing says which completions are correct; name a reward function, such "
                "as lit_grpo.rewards.exact_match."
            )
        self._answers = find_answers(self._options.answer, module.rewards, module.pass_rule.reward)
        self._passes, self._temperature_from = _passes(module, self._options.samples)
        self._task = None
        if self._options.lm_eval is not None:
            self._task = self._make_task(self._candidates[0])
        for option, folder in (("--lm-eval", self._options.lm_eval), ("--output", self._options.output)):
            try:
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                said = f"The folder {str(folder)!r} cannot be made ({error.strerror}); give another as {option}."
                raise ValueError(said) from error

    def _make_task(self, candidate: Candidate) -> HarnessTask:
        """Return the rows as a task of the lm-evaluation-harness."""
        data, module = candidate.data, candidate.module
        if data.renderer.conversing is not None:
            raise ValueError("--lm-eval writes no tasks of several turns, and this run has environments; leave it out.")
        name = f"{self._settings['run']['name']}_{self._split}"
        sampling = self._passes[0].sampling
        if module.keep_special_tokens:
            raise ValueError(
                "--lm-eval: the lm-evaluation-harness leaves special tokens out of completions, and "
                "model.keep_special_tokens keeps them; leave one of the two out."
            )
        prompts = data.prompts[self._split]
        task = make_task(name, prompts, module.rewards, module.pass_rule, sampling)
        return replace(task, adds_special_tokens=adds_special_tokens(prompts, load_tokenizer(data.policy)))

    def _conditions(self) -> Conditions:
        """Return what is the same for all policies."""
        module, data = self._candidates[0].module, self._candidates[0].data
        return Conditions(
            split=self._split,
            source=f"data.{self._split}",
            num_rows=len(data.prompts[self._split]),
            num_left_out=self._num_left_out,
            passes=self._passes,
            temperature_from=self._temperature_from,
            ks=self._options.ks,
            seed=module.sampling_seed,
            pass_rule=str(module.pass_rule),
            majority=self._answers.rule,
            has_answers=self._answers.exist,
        )

    def fit(self, **_: Any) -> None:
        """Evaluate one policy after another, each freed before the next, show the figures, and write the files."""
        conditions = self._conditions()
        if self._task is not None and self._options.lm_eval is not None:
            say(f"A task for the lm-evaluation-harness: {self._task.write(self._options.lm_eval)}")
            if self._task.is_rendered:
                name = self._candidates[0].source.name
                tell(
                    f"Its prompts are conversations as the chat template of {name} renders them, for that policy alone."
                )
            if self._task.num_left_out:
                rows = counted(self._task.num_left_out, "row")
                tell(f"It leaves out {rows} without an answer, as the figures below do.")
        sources, completions = {}, {}
        while self._candidates:
            candidate = self._candidates.pop(0)
            name, began = candidate.source.name, time.monotonic()
            sources[name] = {
                "policy": candidate.source.policy,
                "checkpoint": None if candidate.source.checkpoint is None else str(candidate.source.checkpoint),
            }
            completions[name] = _completions(candidate, self._split, self._passes, self._answers)
            if self._options.output is not None:
                write_completions(self._options.output, completions)
            number = sum(map(len, completions[name]))
            say(f"{name}: {counted(number, 'completion')} in {time.monotonic() - began:.1f} s", flush=True)
            self.model = self.trainer = self.datamodule = self.config_init = cast(Any, None)  # frees the policy
            del candidate
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        result = Result(conditions, completions, sources)
        the_console().print(result.table())
        for sentence in result.sentences():
            tell(sentence)
        if self._options.output is None:
            tell("Nothing was written; --output FOLDER keeps the figures and all completions.")
        else:
            files = result.write(self._options.output)
            tell(f"Written to {self._options.output}: {', '.join(files)}.")


def _set_up(candidate: Candidate, stage: str, split: Split) -> None:
    """Check that a policy exists, and read and check its prompts; its weights are not loaded.

    Raises:
        ValueError: There is no such policy, or a row, a reward function or a plug-in cannot be used.
    """
    source, trainer, module, data, scheduler, sync = candidate
    anyones = cast(Any, trainer)
    anyones.callbacks = [scheduler, sync]
    anyones.datamodule, data.trainer, module.trainer = data, trainer, trainer
    longest = longest_sequence(source.policy)
    data.setup(stage)
    scheduler.setup(trainer, module, stage)
    module.setup(stage)
    if longest is not None:
        check_prompt_lengths({split: data.prompts[split]}, module.sampling, module.eval_sampling, longest)


def _keep_common_rows(every: Sequence[HeldOutRows], split: Split) -> int:
    """Leave out rows that are unusable for any policy; return their number.

    Raises:
        ValueError: No row is left.
    """
    usable = [{prompt.prompt_id for prompt in data.prompts[split]} for data in every]
    common = set.intersection(*usable)
    if not common:
        raise ValueError(
            f"No row of data.{split} is usable for every policy; see the warnings above, or evaluate them one by one."
        )
    for data in every:
        data.prompts[split] = [prompt for prompt in data.prompts[split] if prompt.prompt_id in common]
    return len(set.union(*usable)) - len(common)


def _passes(module: GRPOModule, samples: int) -> tuple[list[SamplingPass], str]:
    """Return the passes over the rows, and the field that the temperature of the samples is from.

    Raises:
        ValueError: All samples of a row would be equal.
    """
    sampling, source = module.eval_sampling, "of model.eval_sampling"
    passes = [SamplingPass(True, 1, replace(sampling, temperature=0.0))]
    if sampling.temperature == 0 or sampling == module.sampling:
        sampling = replace(sampling, temperature=module.sampling.temperature)
        source = "of model.sampling"
    if samples and sampling.temperature == 0:
        raise ValueError(
            "The temperature is 0 in model.sampling and in model.eval_sampling, so all samples of a row would be "
            "equal; set model.eval_sampling.temperature, or give --samples 0."
        )
    if samples:
        passes.append(SamplingPass(False, samples, sampling))
    return passes, source


def _completions(
    candidate: Candidate, split: Split, passes: Sequence[SamplingPass], answers: Answers
) -> list[list[Scored]]:
    """Load a policy, and return its completions of each pass."""
    source, trainer, module, data, scheduler, sync = candidate
    data.num_passes = len(passes)
    collector = Collector(source.name, passes, -(-len(data.prompts[split]) // data.eval_batch_size))
    cast(Any, trainer).callbacks = [collector, scheduler, sync]
    if source.checkpoint is not None:
        with trainer.strategy.tensor_init_context(), trainer.precision_plugin.module_init_context():
            module.configure_model()
        saved = read(source.checkpoint, only=("state_dict",))
        module.on_load_checkpoint(saved)
        module.load_state_dict(saved["state_dict"], strict=module.strict_loading)
    evaluate = trainer.test if split == "test" else trainer.validate
    evaluate(module, datamodule=data, verbose=False)
    return [
        [scored for group in groups for scored in _scored(group, source.name, how, module, answers)]
        for how, groups in zip(passes, collector.collected, strict=True)
    ]


def _scored(group: RolloutGroup, policy: str, how: SamplingPass, module: GRPOModule, answers: Answers) -> list[Scored]:
    """Return the completions of one row."""
    found: list[Scored] = []
    needed = {name for function in module.rewards for name in function.needs}
    for rollout in group.rollouts:
        completion = rollout.completion
        text = rollout.prompt.given + completion.text
        found.append(
            Scored(
                prompt_id=rollout.prompt.prompt_id,
                prompt=rollout.asked,
                policy=policy,
                greedy=how.greedy,
                sample=completion.request.path[0],
                completion=completion.text,
                reward=rollout.reward,
                correct=module.pass_rule.passes(rollout.rewards) if module.pass_rule.judges(rollout.rewards) else None,
                answer=answers.of(rollout.prompt, text),
                length=completion.num_sampled,
                truncated=completion.finish_reason == "length",
                columns={name: value for name, value in rollout.prompt.columns.items() if name in needed},
                dataset=rollout.prompt.dataset,
                messages=None if completion.episode is None else without_files(completion.episode.messages),
            )
        )
    assert len(found) == how.num_samples, (group.key, len(found))
    return found


def main(arguments: Sequence[str]) -> None:
    """Evaluate the policies; a mistake in the input ends the program with one sentence and exit code 2."""
    try:
        options, others = read_options(arguments)
    except ValueError as error:
        exit_with(str(error))
    exit_on_signals()
    scratch = PrivateFolder("lit_grpo-evaluate-")
    try:
        run(["fit", *others], functools.partial(EvaluateCLI, options, scratch.path))
    finally:
        scratch.remove()
