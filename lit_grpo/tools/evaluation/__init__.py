"""Evaluation of several policies on the same held-out rows.

``python -m lit_grpo evaluate`` writes a folder: ``runs/NAME/evaluation`` if its last policy is in the folder of a run,
or the folder of ``--output``:

.. code-block:: text

    evaluation.json      figures of each policy with their intervals, and each policy compared with the first
    completions.jsonl    every completion, a line each
    evaluation.svg       fractions of correct completions with their intervals; needs matplotlib
    side_by_side.html    the greedy completions of all policies to the same prompts

A line of ``completions.jsonl``::

    {"prompt_id": "validation/17", "prompt": "...", "policy": "runs/demo", "greedy": false, "sample": 3,
     "completion": "...", "reward": 1.0, "correct": true, "answer": "42", "length": 24, "truncated": false,
     "columns": {"answer": "42"}}

``policy`` is the policy as the command line names it. ``sample`` counts the completions of a row from 0; a greedy
completion is number 0. ``reward`` is the weighted sum of the rewards, null if no reward function applies. ``correct``
says whether the completion passes ``model.pass_threshold``, null if the rewards that decide give no value, as for a row
without an answer; a row with nothing but null is in no figure. ``answer`` is what the majority is taken of: empty
without an answer, null if answers to the row are not told apart. ``length`` counts sampled tokens. ``columns`` are the
columns of the row that reward functions need. Completions of several turns also have ``messages``, the conversation
after the prompt; rows of several data sets have ``dataset``.

``evaluation.json`` has, for each policy, ``figures.greedy`` (``accuracy``, ``reward``, ``length``, ``truncated``) and
``figures.sampled`` (``pass@K``, ``majority@N``, ``reward``, ``length``, ``truncated``). Rows of
several data sets also have ``accuracy NAME`` and ``pass@1 NAME``. Each figure is a mapping with ``value``, ``low`` and
``high``, the bounds of the 95% interval.
"""
