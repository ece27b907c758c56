# /// script
# requires-python = ">=3.11"
# dependencies = ["lit_grpo"]
# [tool.uv.sources]
# lit_grpo = { path = "..", editable = true }
# ///
"""The shortest run: a policy, prompts, a reward, and a number of updates. ``python examples/train.py``."""

import lit_grpo

# Prompts are rows; any column beside the prompt reaches the reward by its name.
rows = [{"prompt": f"{number:03d}%{divisor}=", "answer": number % divisor} for number, divisor in [(95, 12), (147, 15)]]


def score(completion: str, answer: int) -> float:
    """Return 1 if the answer, the text after the last equals sign, is right, else 0."""
    return float(completion.split("=")[-1] == f"{answer:03d}")


if __name__ == "__main__":
    run = lit_grpo.train(
        "tiny", rows, [score], max_steps=2, batch_size=2, num_generations=8, sampling={"max_tokens": 64}
    )
    print("The trained policy, metrics and samples are in", run.folder)
