"""The teacher: a frozen model, or the policy itself, whose log-probs of the policy's tokens methods learn from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from json import JSONDecodeError
from typing import TYPE_CHECKING, Annotated, Any, Literal
from zlib import crc32

import torch

from lit_grpo.compatibility import SHARDS, Requirement, check_together
from lit_grpo.limits import Limit, Positive, check_fields
from lit_grpo.policy.architecture.decoder import context_length, token_logits
from lit_grpo.policy.architecture.vision import give_vision, sees, vision_of
from lit_grpo.policy.loading import LoadedPolicy, embeddings, load_policy, load_tokenizer, load_vision
from lit_grpo.policy.sharding import is_sharded
from lit_grpo.process.urls import is_on_loopback, is_url, masked, read_secret
from lit_grpo.ranks import Ranks
from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import ReleaseRule
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import AllGather, Completion, Key, Request, Rollout, alone
from lit_grpo.update.logprobs.forward import LOGITS_PER_CHUNK, head_logprobs, log_rest
from lit_grpo.update.logprobs.reference import AdapterFreeReference, Reference, ReferenceSettings, make_reference
from lit_grpo.update.plugin import Measure, TeacherScores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lit_grpo.policy.spec import PolicySpec


@dataclass(frozen=True)
class TeacherSettings:
    """Settings of the teacher, for methods that learn from its log-probs."""

    policy: str
    """Name, folder, GGUF file or Hugging Face id of a model or adapter with the vocabulary of the policy. Or the policy
    itself: ``base`` as it is when the run starts, ``live`` as it is at each batch, ``average`` a moving average of its
    weights. Or the URL of a vLLM server that has the model, such as ``http://127.0.0.1:8000``.
    """
    dtype: Literal["float32", "bfloat16", "nf4"] = "float32"
    """Data type of the teacher's weights; ``nf4`` keeps its linear layers in four bits and needs bitsandbytes."""
    offload: bool = False
    """Keep the teacher's weights in host memory. The device has them only while a batch is scored, not during the
    backward pass. Of no use on a CPU.
    """
    temperature: Positive = 1.0
    """Temperature that divides the teacher's logits, whatever the temperature of sampling is."""
    average_rate: Annotated[float, Limit(gt=0, le=1)] = 0.05
    """Fraction of the policy in the moving average after each optimizer step, for ``average``."""
    timeout_s: Positive = 600.0
    """Max seconds that a server is asked for the log-probs of one completion, with all repeated requests."""
    api_key_env: str | None = None
    """The environment variable with the API key of a server."""

    def __post_init__(self) -> None:
        check_fields(self, "model.teacher.")
        serves, foreign = is_url(self.policy), self.policy not in SELF
        for name, fits in (
            ("dtype", foreign and not serves),
            ("offload", not serves and self.policy != "live"),
            ("temperature", not serves),
            ("average_rate", self.policy == "average"),
            ("timeout_s", serves),
            ("api_key_env", serves),
        ):
            if getattr(self, name) != getattr(TeacherSettings, name) and not fits:
                raise ValueError(
                    f"model.teacher.{name} has no effect with model.teacher.policy {self.policy!r}; leave it out."
                )
        if self.api_key_env is not None:
            read_secret(self.api_key_env, "model.teacher.api_key_env")
            if not self.policy.startswith("https://") and not is_on_loopback(self.policy):
                raise ValueError(
                    f"model.teacher.api_key_env would send a key readably to {self.policy!r}; give an https:// URL."
                )


SELF = ("base", "live", "average")
"""Teachers that are the policy itself."""


class ModelTeacher:
    """Scores the tokens of rollouts, packed as in the update, each prompt once.

    Args:
        settings: What the user has set.
        vocab_size: Number of tokens that the policy knows: no other is among the likeliest.
        lend: Makes a context that gives the model, on its device.
        weights: Of a moving average, by the names of the policy's parameters; empty for a teacher that does not move.
    """

    def __init__(
        self,
        settings: TeacherSettings,
        vocab_size: int,
        lend: Callable[[], AbstractContextManager[PreTrainedModel]],
        weights: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        self.settings, self.vocab_size, self.lend, self.weights = settings, vocab_size, lend, weights
        with lend() as model:  # once: an offloaded model is copied to the device for it
            self.num_tokens, self._context = len(embeddings(model)[0]), context_length(model)

    @torch.no_grad()
    def follow(self, policy: PreTrainedModel) -> None:
        if mine := self.weights():
            rate, its = self.settings.average_rate, dict(policy.named_parameters())
            for name, weight in mine.items():
                weight.mul_(1 - rate).add_(its[name].to(weight.device), alpha=rate)

    def score(
        self, measure: Measure, rollouts: Sequence[Rollout], all_gather: AllGather, top_k: int = 0
    ) -> Mapping[Key, TeacherScores]:
        """Return by completion what the model says of its tokens that are trained on."""
        temperature, vocab_size = self.settings.temperature, self.vocab_size

        def of_hidden(
            model: PreTrainedModel, hidden_nD: torch.Tensor, target_ids_n: torch.Tensor, _: torch.Tensor
        ) -> torch.Tensor:
            logprobs_n, entropy_n = head_logprobs(model, hidden_nD, target_ids_n, temperature)
            columns = [logprobs_n[:, None], entropy_n[:, None]]
            if top_k:
                tops: list[tuple[torch.Tensor, ...]] = []
                for each_nD in hidden_nD.split(max(1, LOGITS_PER_CHUNK // vocab_size)):
                    logprobs_nV = torch.log_softmax(token_logits(model, each_nD) / temperature, -1)
                    values_nk, ids_nk = logprobs_nV[:, :vocab_size].topk(top_k)
                    ids = ids_nk.to(logprobs_n.dtype)  # exact below 2^24
                    tops.append((ids, values_nk, log_rest(logprobs_nV, ids_nk)))
                columns += map(torch.cat, zip(*tops, strict=True))
            return torch.cat(columns, 1)

        parts = _readable(rollouts, self.num_tokens)
        values = measure(parts, of_hidden, self.lend)
        problem = _not_finite(parts, values)
        for sentence in filter(None, all_gather(problem)):
            raise ValueError(sentence)
        own, scores = {each.completion.request.key: each.completion for each in rollouts}, dict[Key, TeacherScores]()
        for key, values_TX in values.items():
            ids_TK, top_logprobs_TL = values_TX[:, 2 : 2 + top_k].long(), values_TX[:, 2 + top_k :]
            known = TeacherScores(values_TX[:, 0], values_TX[:, 1], ids_TK, top_logprobs_TL)
            scores[key] = _filled_up(known, own[key])
        return scores

    def complete(
        self, requests: Sequence[Request], spec: PolicySpec, version: int, all_gather: AllGather = alone
    ) -> Mapping[Key, Completion]:
        """Decode in slots, at the teacher's temperature, from all of its tokens."""
        own = {"temperature": self.settings.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        asked = [replace(each, sampling=replace(each.sampling, **own)) for each in _known(requests, self.num_tokens)]
        if not asked:
            return {}
        generator = SlotGenerator(min(len(asked), MOST_REQUESTS), drafts="off")
        with self.lend() as model:
            generator.start(replace(spec, module=model))
            generator.load_weights(generator.weights(), version)
            loop = RolloutLoop(generator, RolloutBuffer(ReleaseRule(leftovers="keep", max_staleness=version)))
            loop.buffer.open(asked)  # prefixes of any age stay
            loop.run(loop.buffer.ready)
            generator.close()
        completions = [rollout.completion for group in loop.buffer.take() for rollout in group.rollouts]
        return {each.request.key: each for each in completions if max(each.sampled_ids) < self.vocab_size}

    def check_context(self, longest_row: int) -> None:
        """Check that a prompt and its completion, of so many tokens together, fit into the teacher's context."""
        most = self._context
        if longest_row > most:
            raise ValueError(
                f"model.teacher.policy {self.settings.policy!r} has a context of {most} tokens, and a prompt with its "
                f"completion may take {longest_row}; lower model.sampling.max_tokens, or take another teacher."
            )


class ServerTeacher:
    """Asks a vLLM server for the log-probs of tokens, a request for each row (``prompt_logprobs``).

    The server computes a prompt once for each completion. Its log-probs are at temperature 1. It knows no entropy: that
    of the likeliest tokens and the rest as one token stands for it, and NaN where none are asked for.

    Args:
        settings: What the user has set.
        tokenizer: The policy's, which the server's has to agree with.
        vocab_size: Number of tokens that the policy knows.

    Raises:
        ValueError: No vLLM server answers there, or it has another vocabulary.
    """

    def __init__(self, settings: TeacherSettings, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        import httpx

        self.vocab_size = vocab_size
        self.settings, self.url = settings, settings.policy.rstrip("/").removesuffix("/v1")
        key = None if settings.api_key_env is None else read_secret(settings.api_key_env, "model.teacher.api_key_env")
        headers, near = {} if key is None else {"Authorization": f"Bearer {key}"}, is_on_loopback(self.url)
        self._client = httpx.Client(headers=headers, timeout=settings.timeout_s, trust_env=not near)
        self._patience_s = min(settings.timeout_s, 10.0)  # one that is not there is not waited for
        try:
            served = self._ask("GET", "/v1/models")["data"][0]
            self.model, self.context = str(served["id"]), int(served["max_model_len"])
            ids = list(range(len(tokenizer)))
            if self._text(ids) != tokenizer.decode(ids):
                low = 0  # the first so many tokens have the same text; those up to the last have not
                while len(ids) - low > 1:
                    middle = (low + len(ids)) // 2
                    same = self._text(ids[:middle]) == tokenizer.decode(ids[:middle])
                    low, ids = (middle, ids) if same else (low, ids[:middle])
                raise ValueError(
                    f"{self._name} has another vocabulary than the policy: it reads token {low} as "
                    f"{self._text([low])!r}, and the policy as {tokenizer.decode([low])!r}; serve a model of the same "
                    "family."
                )
            known = len(tokenizer)
            self.num_tokens = known if vocab_size <= known or not self._reads(vocab_size - 1) else vocab_size
        except (LookupError, TypeError, RuntimeError, JSONDecodeError) as error:
            raise ValueError(f"{self._name} is no vLLM server that can be used: {error}.") from error
        self._patience_s = settings.timeout_s

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {}

    def follow(self, policy: PreTrainedModel) -> None:
        """Leave the server as it is."""

    def check_context(self, longest_row: int) -> None:
        """Check that a prompt and its completion fit, with the token that the server samples."""
        if longest_row >= self.context:
            raise ValueError(
                f"{self._name} has a context of {self.context} tokens, and a prompt with its completion and one more "
                f"may take {longest_row + 1}; lower model.sampling.max_tokens, or serve it with a larger max_model_len."
            )

    def score(
        self, measure: Measure, rollouts: Sequence[Rollout], all_gather: AllGather, top_k: int = 0
    ) -> Mapping[Key, TeacherScores]:
        """Return by completion what the server says of its tokens that are trained on."""
        own = {rollout.completion.request.key: rollout.completion for rollout in rollouts}
        problem, scores, rollouts = "", dict[Key, TeacherScores](), _readable(rollouts, self.num_tokens)
        rows = [(place, row) for place, rollout in enumerate(rollouts) for row in rollout.rows]
        try:
            with ThreadPoolExecutor(MOST_REQUESTS) as threads:
                answers = list(threads.map(lambda each: self._scores(each[1], top_k), rows))
            parts: list[list[TeacherScores]] = [[] for _ in rollouts]
            for (place, _), answer in zip(rows, answers, strict=True):
                parts[place].append(answer)
            for rollout, its in zip(rollouts, parts, strict=True):
                if rollout.completion.num_trained:
                    scores[rollout.completion.request.key] = TeacherScores(*map(torch.cat, zip(*its, strict=True)))
            problem = _not_finite(rollouts, {key: its.logprobs_T[:, None] for key, its in scores.items()})
            scores = {key: _filled_up(its, own[key]) for key, its in scores.items()}
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            problem = f"{self._name} gives no log-probs: {error or type(error).__name__}. The batch was not trained on."
        for sentence in filter(None, all_gather(problem)):
            raise ValueError(sentence)
        return scores

    def complete(
        self, requests: Sequence[Request], spec: PolicySpec, version: int, all_gather: AllGather = alone
    ) -> Mapping[Key, Completion]:
        """Ask the server to go on, at temperature 1: a request for each."""

        def completed(request: Request) -> Completion:
            sampling, prefix = request.sampling, request.prefix
            asked = {
                "model": self.model,
                "prompt": [*request.prompt.token_ids, *prefix.token_ids_T.tolist()],
                "max_tokens": sampling.max_tokens - prefix.num_sampled,
                "stop": sampling.stop,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "seed": crc32(repr((request.key, request.seed)).encode()),
                "return_token_ids": True,
            }
            said = self._ask("POST", "/v1/completions", asked)["choices"][0]
            token_ids, reason = said["token_ids"], said["finish_reason"]
            are_tokens = isinstance(token_ids, list) and all(type(each) is int and each >= 0 for each in token_ids)
            if not are_tokens or not 0 < len(token_ids) <= asked["max_tokens"] or reason not in ("stop", "length"):
                raise ValueError(
                    f"it answers {token_ids!s:.80}, ended by {reason!r}, in place of 1 to {asked['max_tokens']} "
                    "tokens that end by 'stop' or 'length'"
                )
            whole = prefix.followed_by(token_ids, version=version)
            return request.after(whole).ended(reason, spec.text_of(whole.token_ids_T.tolist(), request.prompt))

        problem, completions = "", list[Completion]()
        try:
            with ThreadPoolExecutor(MOST_REQUESTS) as threads:
                completions = list(threads.map(completed, _known(requests, self.num_tokens)))
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            problem = f"{self._name} gives no tokens: {error or type(error).__name__}."
        for sentence in filter(None, all_gather(problem)):
            raise ValueError(sentence)
        return {each.request.key: each for each in completions if max(each.sampled_ids) < self.vocab_size}

    def _scores(self, row: Rollout, top_k: int) -> TeacherScores:
        completion, prompt_ids = row.completion, row.prompt.token_ids
        token_ids = [*prompt_ids, *completion.token_ids_T.tolist()]
        told = self._prompt_logprobs(token_ids, top_k)
        if any(max(map(int, each)) >= self.vocab_size for each in told if each):  # tokens of the teacher alone
            told = self._prompt_logprobs(token_ids, 2 * top_k)
        logprobs, ids, tops = list[float](), list[list[int]](), list[list[float]]()
        for place in completion.trained_T.nonzero().flatten().tolist():
            said = told[len(prompt_ids) + place]
            logprobs.append(said[str(token_ids[len(prompt_ids) + place])]["logprob"])
            ranked = sorted(said.items(), key=lambda item: item[1]["rank"])
            likeliest = [item for item in ranked if int(item[0]) < self.vocab_size][:top_k]
            ids.append([int(token) for token, _ in likeliest])
            if len(likeliest) < top_k:
                other = next(token for token, _ in ranked if int(token) >= self.vocab_size)
                raise ValueError(f"it names token {other}, and the policy knows {self.vocab_size} tokens")
            tops.append([each["logprob"] for _, each in likeliest])
        top_TK = torch.tensor(tops, dtype=torch.float64).view(len(logprobs), top_k)
        total_T1 = top_TK.logsumexp(1, keepdim=True).clamp(max=-LEAST_REST)
        top_TL = torch.cat([top_TK, (-torch.expm1(total_T1)).log()], 1).float() if top_k else top_TK.float()
        entropy_T = -(top_TL.exp() * top_TL).sum(1)
        return TeacherScores(
            torch.tensor(logprobs, dtype=torch.float32),
            entropy_T if top_k else torch.full_like(entropy_T, math.nan),
            torch.tensor(ids, dtype=torch.int64).view(len(logprobs), top_k),
            top_TL,
        )

    @property
    def _name(self) -> str:
        return f"model.teacher.policy {self.settings.policy!r}"

    def _prompt_logprobs(self, token_ids: Sequence[int], top_k: int) -> Sequence[Mapping[str, Any] | None]:
        asked = {"model": self.model, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": top_k}
        return self._ask("POST", "/v1/completions", asked)["choices"][0]["prompt_logprobs"]

    def _reads(self, token_id: int) -> bool:
        """Return whether the server takes a token as a prompt."""
        try:
            self._ask("POST", "/v1/completions", {"model": self.model, "prompt": [token_id], "max_tokens": 1})
        except RuntimeError:  # it answers 400
            return False
        return True

    def _text(self, token_ids: Sequence[int]) -> str:
        asked = {"model": self.model, "tokens": token_ids}
        return str(self._ask("POST", "/detokenize", asked)["prompt"])

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Ask the server, again and again while it is busy or cannot be reached.

        Raises:
            RuntimeError: It refuses, or gives no answer in time.
        """
        import httpx

        until, pause_s = time.monotonic() + self._patience_s, 0.5
        while True:
            try:
                response = self._client.request(method, self.url + path, json=body)
                if response.status_code == 200:
                    return response.json()
                why = f"it answers {response.status_code} to {path}: {masked(response.text)[:120]!r}"
                if response.status_code != 429 and response.status_code < 500:
                    raise RuntimeError(why)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                why = f"it cannot be reached ({type(error).__name__} {error})"
            if time.monotonic() + pause_s > until:
                raise RuntimeError(f"{why}, for {self._patience_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 30.0)


LEAST_REST = 1e-7
"""Least probability of the tokens that a server does not tell of, as in TRL: the log of none is not finite."""
MOST_REQUESTS = 64
"""Max number of requests at a time that a server gets from one rank."""


def _known(requests: Sequence[Request], num_tokens: int) -> list[Request]:
    """Return requests whose prompt and prefix have tokens alone that a teacher of ``num_tokens`` tokens knows."""
    return [each for each in requests if max([*each.prompt.token_ids, *each.prefix.sampled_ids]) < num_tokens]


def _readable(rollouts: Sequence[Rollout], num_tokens: int) -> list[Rollout]:
    """Return what a teacher of ``num_tokens`` tokens can read: each completion up to the first token it does not know.

    A rollout is left out if its prompt has such a token, or if it has one in a conversation that was rewritten.
    """
    found = list[Rollout]()
    for rollout in rollouts:
        completion = rollout.completion
        unknown_T = completion.token_ids_T >= num_tokens
        if not unknown_T.any() and all(max(row.prompt.token_ids, default=0) < num_tokens for row in rollout.rows):
            found.append(rollout)
        elif not completion.contexts and max(rollout.prompt.token_ids, default=0) < num_tokens:
            end = int(unknown_T.int().argmax())
            seen = completion.pictures
            end = next((place for place, each in seen if place < end < place + each.num_tokens), end)
            part = Completion(
                completion.request,
                completion.token_ids_T[:end],
                completion.logprobs_T[:end],
                completion.versions_T[:end],
                completion.finish_reason,
                trained_T=completion.trained_T[:end],
                pictures=completion.pictures_until(end),
            )
            found += [replace(rollout, completion=part)] if part.num_trained else []
    return found


def _filled_up(scores: TeacherScores, completion: Completion) -> TeacherScores:
    """Return scores with NaN for the trained tokens that the teacher could not read, at the end of a completion."""
    lacking = completion.num_trained - len(scores.logprobs_T)
    if not lacking:
        return scores
    nan_T, top_k = scores.logprobs_T.new_full((lacking,), math.nan), scores.top_ids_TK.shape[1]
    ids_TK = torch.arange(top_k, device=scores.top_ids_TK.device).expand(lacking, top_k)
    return TeacherScores(
        torch.cat([scores.logprobs_T, nan_T]),
        torch.cat([scores.entropy_T, nan_T]),
        torch.cat([scores.top_ids_TK, ids_TK]),
        torch.cat([scores.top_logprobs_TL, nan_T[:, None].expand(lacking, scores.top_logprobs_TL.shape[1])]),
    )


def _not_finite(rollouts: Sequence[Rollout], values: Mapping[Key, torch.Tensor]) -> str:
    for rollout in rollouts:
        values_TX = values.get(rollout.completion.request.key)
        if values_TX is not None and not (finite_T := values_TX[:, 0].isfinite()).all():
            place = int((~finite_T).int().argmax())
            return (
                f"The teacher gives sample {rollout.completion.request.path} of prompt {rollout.prompt.prompt_id!r} "
                f"the log-prob {float(values_TX[place, 0])} at its trained token {place}; take a teacher, or a "
                "model.teacher.dtype, whose log-probs are finite. The batch was not trained on."
            )
    return ""


def check_vocabulary(teacher: str, own: PreTrainedTokenizerBase, its: PreTrainedTokenizerBase) -> None:
    """Check that the teacher's tokenizer gives every token of the policy its id; it may have more tokens.

    Raises:
        ValueError: A token has another id, or only the policy knows it; the first by the policy's ids is named.
    """
    theirs = its.get_vocab()
    for token, number in sorted(own.get_vocab().items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            has = "does not know it" if token not in theirs else f"gives it the id {theirs[token]}"
            raise ValueError(
                f"model.teacher.policy {teacher!r} has another vocabulary than the policy: token {token!r} "
                f"has the id {number}, and the teacher {has}; take a teacher of the same family."
            )


def check_num_tokens(teacher: str, num_tokens: int, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> None:
    """Check that the teacher's embedding has a row for each token of the policy, and warn of other rows it lacks.

    Args:
        teacher: Name of the teacher.
        num_tokens: Number of tokens that the teacher knows.
        tokenizer: Tokenizer of the policy, all of whose tokens the teacher has to know.
        num_rows: Number of rows of the policy's embedding; those after the tokenizer's tokens are padding.

    Raises:
        ValueError: The teacher lacks a row of a token.
    """
    own = ((token, number) for token, number in tokenizer.get_vocab().items() if number < num_rows)
    token, largest = max(own, key=lambda item: item[1])
    if largest >= num_tokens:
        raise ValueError(
            f"model.teacher.policy {teacher!r} has {num_tokens} rows of embeddings, and the policy's token {token!r} "
            f"has the id {largest}; take a teacher that knows all tokens of the policy."
        )
    if num_rows > num_tokens:
        Ranks().warn(
            f"model.policy has {num_rows} rows of embeddings and model.teacher.policy {teacher!r} has {num_tokens}; "
            f"a completion is taught up to its first token from {num_tokens} on, for which the tokenizer has no text."
        )


def check_teacher(settings: TeacherSettings, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Check that there is such a teacher for a policy, before a run writes anything; no weights are loaded.

    Args:
        settings: What the user has set.
        tokenizer: Tokenizer of the policy, which is compared with the teacher's.
        vocab_size: Number of rows of the policy's embedding.

    Raises:
        ValueError: There is no such model or server, or it has another vocabulary.
    """
    name = settings.policy
    if is_url(name):
        ServerTeacher(settings, tokenizer, vocab_size)
    elif name not in SELF:
        check_vocabulary(name, tokenizer, load_tokenizer(name))
        load_policy(name, outline=True)


def make_teacher(
    settings: TeacherSettings,
    policy: PreTrainedModel,
    source: str | LoadedPolicy,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    began: Literal["full", "bare", "adapter"],
) -> ModelTeacher | ServerTeacher:
    """Load a teacher, or find its server, once its vocabulary has been compared with the policy's.

    Args:
        settings: What the user has set.
        policy: The policy, of which nothing has been trained yet; perhaps sharded.
        source: What it was loaded from.
        dtype: Name of the policy's dtype, such as ``bfloat16``.
        tokenizer: Tokenizer of the policy, which is compared with the teacher's.
        device: Where the teacher computes.
        began: What is trained, as for :func:`lit_grpo.update.logprobs.reference.make_reference`.

    Raises:
        ValueError: There is no such model, it has another vocabulary, or it cannot follow shards.
    """
    name, vocab_size = settings.policy, len(embeddings(policy)[0])
    if name == "live":
        return ModelTeacher(settings, vocab_size, partial(nullcontext, policy))
    if is_url(name):
        server = ServerTeacher(settings, tokenizer, vocab_size)
        check_num_tokens(name, server.num_tokens, tokenizer, vocab_size)
        return server
    if name not in SELF:
        check_vocabulary(name, tokenizer, load_tokenizer(name))
        is_nf4 = settings.dtype == "nf4"
        model = load_policy(name, "bfloat16" if is_nf4 else settings.dtype, is_nf4, vision=sees(policy))
        if sees(policy):
            own, its = vision_of(policy), load_vision(name, tokenizer)
            if not own.is_like(its):
                raise ValueError(
                    f"model.teacher.policy {name!r} reads an image as other tokens than the policy does; take one "
                    "of the same family with the same settings of its image processor."
                )
            give_vision(model, its)
        check_num_tokens(name, len(embeddings(model)[0]), tokenizer, vocab_size)
        return ModelTeacher(settings, vocab_size, Reference(model, device, ReferenceSettings(settings.offload)).lend)
    moves = name == "average"
    if moves and is_sharded(policy):
        needs = Requirement("model.teacher.policy average", frozenset({"unsharded_weights"}), remedy="take live")
        check_together([needs, SHARDS])
    began = "adapter" if moves and began == "bare" else began
    reference = make_reference(policy, source, dtype, device, ReferenceSettings(settings.offload), began)
    if not moves or isinstance(reference, AdapterFreeReference):
        return ModelTeacher(settings, vocab_size, reference.lend)
    return ModelTeacher(settings, vocab_size, reference.lend, reference.weights)
