"""The commands around a run. Only this file is imported until one of them is used."""

from typing import NamedTuple


class Tool(NamedTuple):
    """A command: its module, and its line in the overview.

    Args:
        module: The module whose function ``main`` takes the arguments.
        what: Line of the command in the overview.
        help: Text of ``--help`` for a command that takes the settings of a run, as ``fit`` does; other commands have
            their own parsers.
    """

    module: str
    what: str
    help: str = ""

    @property
    def has_settings_of_a_run(self) -> bool:
        return bool(self.help)


SFT = """\
usage: python -m lit_grpo sft --config CONFIG [--FIELD VALUE ...]

Trains the policy on the examples of the plug-in sft alone, without rollouts:
supervised fine-tuning, in a stage before fit. It is fit with the plug-in's
warm_up set to all; model.rewards may be empty. Validation logs the loss of
held-out examples, and samples completions if there are rewards. Afterwards
fit goes on with --model.policy runs/NAME/policy. The fields are those of fit:
python -m lit_grpo fit --help lists them.

Example, with the answers in the column solution:
  python -m lit_grpo sft --model.policy smollm2 --data.train train.jsonl
    --rollout.plugins sft:column=solution --trainer.max_steps 100
"""
DOCTOR = """\
usage: python -m lit_grpo doctor --config CONFIG [--FIELD VALUE ...]

Examines the run that fit would start with the same arguments, on one device,
in the time of a few updates. It leaves no file, and no weight changes. The
fields are those of fit: python -m lit_grpo fit --help lists them.

Each check prints a line: its verdict, its name, the measured value, the remedy.
  pass   no problem found
  warn   may be intended
  fail   the run cannot start, or cannot learn
  skip   could not be checked, because a check that it needs failed

The checks: settings (all mistakes), prompts, tokenizer, generator, weight
sync, samples, rewards (with one scored completion beside its row), log-prob
gap, dropout, memory, one optimizer step, checkpoint and export.

The exit code is 0, 1 if a check failed, or 2 if an argument cannot be read.
"""
FIT_CHECK = """\
usage: python -m lit_grpo fit-check --config CONFIG [--FIELD VALUE ...]
                                    [--memory AMOUNT]

Estimates the memory that the run takes which fit would start with the same
arguments, by part and phase, without loading weights; and how large num_slots
and max_tokens_per_micro_batch can be. The fields are those of fit:
python -m lit_grpo fit --help lists them.

  --memory AMOUNT   memory of the device, such as 80GiB; by default the
                    free memory of this machine's. For another GPU, add
                    --trainer.accelerator gpu.

The exit code is 0 if the run fits, 1 if it does not, or 2 if an argument
cannot be read.
"""
EVALUATE = """\
usage: python -m lit_grpo evaluate [POLICY ...] [--config CONFIG]
                                   [--FIELD VALUE ...] [OPTION ...]

Asks several policies the same held-out rows, greedily and sampled, with the
generator and the rewards of a run, on one device. The figures are those that
validate and test log: fraction of correct completions, pass@k, reward, length,
truncated; and the majority of the samples. All have 95% intervals. Each policy
is compared with the first by an exact paired test.

  POLICY            a model as model.policy takes it (a folder, a hub id, a GGUF
                    file, tiny), runs/NAME for the policy of a run, or a
                    checkpoint of a run; by default model.policy
  --config CONFIG   settings of the run; by default those of the last policy's
                    run. The fields are those of fit: python -m lit_grpo fit
                    --help lists them.
  --split SPLIT     test or validation; by default data.test, or if it is not
                    set data.validation
  --samples N       sampled completions per row (default 8); 0 for none. The
                    temperature is that of model.eval_sampling, or if that
                    decodes greedily, of model.sampling.
  --k K ...         values of k for pass@k, at most N; by default 1, 2, 4, ...
  --answer REGEX    group 1 of the last match is a completion's answer, for the
                    majority; by default what the reward exact_match compares
  --output FOLDER   where evaluation.json, completions.jsonl, evaluation.svg and
                    side_by_side.html are written; by default the folder
                    evaluation of the last policy's run
  --lm-eval FOLDER  also write the rows as a task of EleutherAI's
                    lm-evaluation-harness

Example: python -m lit_grpo evaluate tiny runs/arithmetic
"""
_HERE = "lit_grpo.tools.commands"
TOOLS = {
    "sft": Tool(f"{_HERE}.sft", "supervised fine-tuning on examples, with the arguments of fit", SFT),
    "doctor": Tool(f"{_HERE}.doctor", "checks of a run before it begins, with the arguments of fit", DOCTOR),
    "fit-check": Tool(f"{_HERE}.fit_check", "the memory that a run will take, with the arguments of fit", FIT_CHECK),
    "evaluate": Tool("lit_grpo.tools.evaluation.command", "policies compared on held-out rows", EVALUATE),
    "export": Tool(f"{_HERE}.export", "a checkpoint's policy as a Hugging Face folder"),
    "finish": Tool("lit_grpo.tools.finishing.command", "a run as a folder for others: model card, GGUF, hub"),
    "report": Tool(f"{_HERE}.report", "a run as one HTML file"),
    "dashboard": Tool(f"{_HERE}.dashboard", "a view of runs in W&B or TensorBoard"),
    "simulate": Tool(f"{_HERE}.simulate", "simulation of scheduling policies, without a model"),
    "serve": Tool(f"{_HERE}.serve", "a vLLM server for a policy"),
    "smollm2": Tool(f"{_HERE}.smollm2", "a pretrained chat model, fetched as a policy"),
    "from-trl": Tool(f"{_HERE}.from_trl", "a config of TRL's as one of ours"),
}
"""The commands by their names on the command line."""
